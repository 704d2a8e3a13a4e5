"""Signals for routed experts on a tiny Qwen2-MoE: their cost, and how many calibration tokens they need.

Cost: one call of `score` with five signals, compared with a plain forward pass of the same tokens with the
fastest experts backend of transformers; medians of interleaved rounds.
Noise: the sums of single batches of training text are recorded once, and added up to disjoint draws of any
number of tokens; the text is taken as it comes, or equally much from each of its 10 domains. For two draws
of equal size, the ranks of each block's 60 experts are correlated (Spearman). The tables show the mean over
pairs of draws and blocks, and the lowest block. The perplexity is that of the first 24,576 validation
tokens, in windows of 128, with the 30 lowest experts of every block removed, over the draws.
"""

from __future__ import annotations

import itertools
import lzma
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import harness.torchvision_shim  # noqa: F401 (transformers imports torchvision)
import numpy as np
import torch
from harness import runs
from torch import Tensor, nn

import fairpruner as fp
from fairpruner import evaluation
from fairpruner.core.correlation import spearman
from fairpruner.core.spaces import Spaces
from fairpruner.core.units import Kind
from fairpruner.inputs.hugging_face import pretrained
from fairpruner.scoring.signals import Accumulator, BatchInfo, Context, Result, Signal

TEXTS = ("as the text comes", "even over domains")
REMOVAL = ("soft_activation", "soft_activation_all", "frequency", "reap")
LENGTH, WINDOWS, DOMAINS = (
    128,
    40,
    10,
)  # tokens of a window, as the model was trained, windows of a batch, kinds of text
VALIDATION = 24_576  # tokens
ROUNDS, TIMED = 5, 4  # of the cost, and batches in each
SIZES = (2, 5, 10, 20, 50, 100, 200)  # batches of a draw
DRAWS = 5  # of one size at most
CUT = ("soft_activation", "reap")  # whose lowest experts are removed

Row = dict[str, Any]
Sums = Mapping[str, Mapping[str, Tensor]]  # block -> quantity -> [E]


class Recorder(Signal):
    """Keeps what every batch sums up to, so that draws of any size can be added up afterwards."""

    name = "recorder"
    kinds: ClassVar[frozenset[Kind]] = frozenset({"expert"})
    needs = frozenset({"routing", "routed_gradients"})

    def __init__(self) -> None:
        self.batches: list[Sums] = []

    def start(self, context: Context) -> Accumulator:
        return _RecorderAccumulator(self.batches, context.spaces)


class _RecorderAccumulator(Accumulator):
    def __init__(self, batches: list[Sums], spaces: Spaces) -> None:
        self._batches, self._spaces = batches, spaces

    def see_routing(self, tallies: Sums, info: BatchInfo) -> None:
        self._batches.append(tallies)

    def result(self) -> Result:
        return Result({space.name: np.zeros(space.size) for space in self._spaces})


def read_tokens(shared: Path, name: str) -> Tensor:
    raw = lzma.decompress((shared / "data" / "text" / f"{name}.bin.xz").read_bytes())
    return torch.from_numpy(np.frombuffer(raw, np.uint8 if "domains" in name else np.uint16).astype(np.int64))


def draw(shared: Path, batches: int, even: bool) -> list[dict[str, Tensor]]:
    """Batches of windows of the training tokens, no window twice: as they come, or equally many from each
    domain; a short one begins again.
    """
    tokens, domains = (read_tokens(shared, f"moe_{what}_train") for what in ("tokens", "domains"))
    count = len(tokens) // LENGTH
    windows, of = tokens[: count * LENGTH].view(count, LENGTH), domains[: count * LENGTH].view(count, LENGTH)
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    if even:
        pure = (of == of[:, :1]).all(1)
        own = [shuffled[(pure & (of[:, 0] == domain))[shuffled]] for domain in range(DOMAINS)]
        rounds = torch.arange(batches * WINDOWS // DOMAINS)
        shuffled = torch.stack(
            [some[rounds % len(some)] for some in own], 1
        ).flatten()  # a window of each domain in turn
    return [{"input_ids": windows[row]} for row in shuffled[: batches * WINDOWS].view(batches, WINDOWS)]


def cost(model: nn.Module, spaces: Spaces, data: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    def plain() -> None:
        with torch.no_grad():
            for batch in data:
                model(**batch)

    def scored() -> None:
        fp.score(model, data, spaces=spaces, removal=REMOVAL, protection="routed_taylor")

    seconds: dict[str, list[float]] = {"forward": [], "score": []}
    for _ in range(ROUNDS + 1):
        for name, run in (("forward", plain), ("score", scored)):
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    medians = {
        name: statistics.median(times[1:]) for name, times in seconds.items()
    }  # the first round warms up
    print(medians, flush=True)
    tokens = sum(batch["input_ids"].numel() for batch in data)
    return {
        "tokens": tokens,
        "threads": torch.get_num_threads(),
        **{k: round(v, 3) for k, v in medians.items()},
        "ratio": round(medians["score"] / medians["forward"], 2),
    }


def signals_of(batches: Sequence[Sums]) -> dict[str, dict[str, np.ndarray]]:
    """signal -> block -> [E], from the sums of some batches."""
    blocks = list(batches[0])
    total = {
        block: {quantity: sum(b[block][quantity] for b in batches).numpy() for quantity in batches[0][block]}
        for block in blocks
    }
    return {
        "soft_activation": {block: t["weight"] for block, t in total.items()},
        "reap": {block: t["output"] / np.maximum(t["selected"], 1) for block, t in total.items()},
        "routed_taylor": {block: np.abs(t["weighted_term"]) for block, t in total.items()},
    }


def perplexity(model: nn.Module, windows: Tensor) -> float:
    return evaluation.perplexity(model, windows.flatten(), length=LENGTH, batch_size=32).value


def noise(model: nn.Module, spaces: Spaces, batches: Sequence[Sums], windows: Tensor) -> list[dict[str, Any]]:
    rows = []
    for size in (size for size in SIZES if 2 * size <= len(batches)):
        draws = [
            signals_of(batches[start : start + size]) for start in range(0, len(batches) - size + 1, size)
        ][:DRAWS]
        row: dict[str, Any] = {"tokens": size * WINDOWS * LENGTH, "draws": len(draws)}
        for signal in draws[0]:
            pairs = [
                [spearman(a[signal][s.name], b[signal][s.name]) or 0.0 for s in spaces]
                for a, b in itertools.combinations(draws, 2)
            ]
            by_block = np.mean(pairs, axis=0)
            row[signal] = {
                "mean": round(float(by_block.mean()), 3),
                "lowest block": round(float(by_block.min()), 3),
            }
        for signal in CUT:
            found = []
            for scores in (one[signal] for one in draws):
                removed = {
                    s.name: np.argsort(scores[s.name], kind="stable")[: s.size // 2].tolist() for s in spaces
                }
                found.append(perplexity(fp.cut(model, fp.Plan.removing(spaces, removed)), windows))
            row[signal]["perplexity"] = [round(value, 1) for value in found]
        rows.append(row)
        print(row, flush=True)
    return rows


def cases(quick: bool) -> Iterator[Row]:
    """The cost, then the noise with the text in each order; the latter takes 40 minutes."""
    yield {"part": "cost"}
    for text in TEXTS[:1] if quick else TEXTS:
        yield {"part": "noise", "text": text, "tokens": 20_480 if quick else 2_048_000}


def measure(case: Row, shared: Path) -> Row:
    model = pretrained(str(shared / "weights" / "tiny_qwen2moe")).float()
    data = draw(shared, TIMED, even=False)
    spaces = fp.discover(model, {"input_ids": data[0]["input_ids"][:1]}, kinds=["expert"])
    if case["part"] == "cost":
        return cost(model, spaces, data)
    windows = read_tokens(shared, "moe_tokens_val")[:VALIDATION].view(-1, LENGTH)
    recorder, count = Recorder(), case["tokens"] // (WINDOWS * LENGTH)
    recorded = draw(shared, count, even=case["text"] == TEXTS[1])
    fp.score(model, recorded, spaces=spaces, removal=recorder, protection="routed_taylor")
    return {
        "perplexity": round(perplexity(model, windows), 2),
        "sizes": noise(model, spaces, recorder.batches, windows),
    }


def page() -> str:
    """The cost in a sentence, and rank stability and perplexity by the number of tokens as Markdown."""
    stored = runs.stored("routing")
    lines = [
        f"Scoring took {row['ratio']} times a plain forward of the same tokens."
        for row in stored
        if row["part"] == "cost"
    ]
    for found in (row for row in stored if row["part"] == "noise"):
        lines += [
            "",
            (
                f"| tokens, {found['text']} | soft_activation | reap | routed_taylor |"
                " perplexity, soft_activation | perplexity, reap |"
            ),
            "|---" * 6 + "|",
        ]
        for row in found["sizes"]:
            ranks = (
                f"{row[signal]['mean']:.2f} ({row[signal]['lowest block']:.2f})"
                for signal in ("soft_activation", "reap", "routed_taylor")
            )
            spread = (
                f"{min(row[signal]['perplexity'])} to {max(row[signal]['perplexity'])}" for signal in CUT
            )
            lines.append(f"| {row['tokens']:,} | {' | '.join((*ranks, *spread))} |")
    return "\n".join(lines)
