"""The tiny Qwen2-MoE of the benchmarks of routed experts: its texts, its scores, and plans of its experts."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import harness.torchvision_shim  # noqa: F401 (transformers imports torchvision)
import numpy as np
import torch
from routing import DOMAINS, LENGTH, VALIDATION, read_tokens
from torch import Tensor, nn

import fairpruner as fp
from fairpruner import evaluation
from fairpruner.inputs.hugging_face import pretrained

NAME = "tiny_qwen2moe"
REMOVED = (0.5, 0.75, 5 / 6)
REMOVALS = ("soft_activation", "reap", "frequency", "random")
MIXES = ("equally much of each domain", "as the text comes")


@cache
def model(shared: Path) -> nn.Module:
    return pretrained(str(shared / "weights" / NAME))


@cache
def validation(shared: Path) -> Tensor:
    """The first 24,576 validation tokens."""
    return read_tokens(shared, "moe_tokens_val")[:VALIDATION]


def example(shared: Path) -> dict[str, Tensor]:
    return {"input_ids": validation(shared)[None, :LENGTH]}


@cache
def experts(shared: Path) -> fp.Spaces:
    return fp.discover(model(shared), example(shared), kinds=["expert"])


def perplexity(pruned: nn.Module, shared: Path) -> float:
    """In windows of 128 tokens, the length that the model was trained on."""
    return evaluation.perplexity(pruned, validation(shared), length=LENGTH, batch_size=32).value


@cache
def full(shared: Path) -> float:
    """The perplexity of the whole model."""
    return perplexity(model(shared), shared)


def draw(shared: Path, seed: int, tokens: int, mix: str = MIXES[0]) -> list[dict[str, Tensor]]:
    """Batches of 64 windows of calibration text."""
    text, domains = (read_tokens(shared, f"moe_{what}_train").numpy() for what in ("tokens", "domains"))
    kinds = [domains == domain for domain in range(DOMAINS)] if mix == MIXES[0] else [domains >= 0]
    rng, count = np.random.default_rng(seed), tokens // LENGTH // len(kinds)
    starts = np.concatenate([rng.choice(np.flatnonzero(kind)[:-LENGTH], count) for kind in kinds])
    windows = torch.from_numpy(np.stack([text[start : start + LENGTH] for start in rng.permutation(starts)]))
    return [{"input_ids": some, "labels": some} for some in windows.split(64)]


@cache
def scores(shared: Path, seed: int, tokens: int, mix: str = MIXES[0]) -> fp.Scores:
    """The scores of one draw."""
    return score(model(shared), draw(shared, seed, tokens, mix), experts(shared), seed)


def score(whole: nn.Module, data: Sequence[dict[str, Tensor]], spaces: fp.Spaces, seed: int = 0) -> fp.Scores:
    """All signals of the tables; no warning of noisy scores, since the tables show how far draws differ."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fp.FairprunerWarning)
        return fp.score(whole, data, spaces=spaces, removal=REMOVALS, protection="routed_taylor", seed=seed)


def plan_for(found: fp.Scores, signal: str, rule: str, removed: float) -> fp.Plan:
    kept = round(sum(space.size for space in found.spaces) * (1 - removed))
    return fp.allocate(found.using(signal), keep=fp.Budget("experts", kept), rule=rule, exact=True)


def cell(values: Sequence[float], form: str = ".1f") -> str:
    """Mean and standard deviation over the draws."""
    deviation = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{deviation}"
