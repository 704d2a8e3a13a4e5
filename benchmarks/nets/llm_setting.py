"""A language model, its calibration text, its scores, and how a smaller version of it is judged."""

from __future__ import annotations

import lzma
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

import harness.torchvision_shim  # noqa: F401 (transformers imports torchvision)
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fairpruner as fp
from fairpruner.inputs.hugging_face import pretrained, tokenizer_of

WINDOW = 512  # tokens
WIDTH = ("hidden", "head")
Windows = list[dict[str, Tensor]]


def text(shared: Path, split: str) -> str:
    """Mixed English text, decoded from its tokens."""
    from tokenizers import Tokenizer

    folder = shared / "data" / "text"
    tokens = np.frombuffer(lzma.decompress((folder / f"moe_tokens_{split}.bin.xz").read_bytes()), np.uint16)
    return str(Tokenizer.from_file(str(folder / "moe_tokenizer.json")).decode(tokens[:400_000].tolist()))


def windows(
    tokenizer: Any, passage: str, count: int, *, draw: int | None = None, begun: bool = False
) -> Windows:
    """The first windows of one long text, each full, or windows drawn from all of it.

    Neighbouring windows are often of one domain, so calibration text is drawn. `begun`: each window begins
    with the token that begins a text.
    """
    ids = torch.tensor(tokenizer(passage, add_special_tokens=False)["input_ids"])
    size = WINDOW - begun
    whole = ids[: len(ids) // size * size].view(-1, size)
    if begun:
        whole = torch.cat([torch.full((len(whole), 1), tokenizer.bos_token_id), whole], 1)
    chosen = np.arange(count)
    if draw is not None:
        chosen = np.random.default_rng(draw).choice(len(whole), count, replace=False)
    return [{"input_ids": whole[number][None]} for number in chosen]


class Judge:
    """Perplexity, and agreement with the original, on the test windows."""

    def __init__(self, model: nn.Module, test: Windows) -> None:
        self._test = test
        self.perplexity, self._best = self._run(model)

    def _run(self, model: nn.Module) -> tuple[float, Tensor]:
        losses, best = [], []
        with torch.no_grad():
            for window in self._test:
                logits = model(**window).logits[0]  # [tokens, vocabulary]
                losses.append(F.cross_entropy(logits[:-1], window["input_ids"][0, 1:]))
                best.append(logits.argmax(1))
        return float(torch.stack(losses).mean().exp()), torch.cat(best)

    def __call__(self, model: nn.Module) -> dict[str, float]:
        perplexity, best = self._run(model)
        agreement = float((best == self._best).double().mean())
        return {"perplexity": round(perplexity, 2), "agreement": round(agreement, 4)}


class Setting:
    """A model, the calibration text of one draw, and scores of all units, which are made once and stored."""

    def __init__(
        self,
        folder: Path,
        shared: Path,
        draw: int,
        *,
        sizes: tuple[int, int],
        begun: bool,
        cache: Path | None,
    ) -> None:
        """`sizes`: how many windows calibrate, and how many test. `cache` is a folder for scores."""
        self.model: Any = pretrained(str(folder)).float()
        self.tokenizer, self.shared = tokenizer_of(str(folder)), shared
        self._draw, self._tested, self._begun, self._cache = draw, sizes[1], begun, cache
        self.data = windows(self.tokenizer, text(shared, "train"), sizes[0], draw=draw, begun=begun)

    @cached_property
    def judge(self) -> Judge:
        passage = text(self.shared, "val")
        return Judge(self.model, windows(self.tokenizer, passage, self._tested, begun=self._begun))

    def budget(self, share: float) -> fp.Budget:
        """What is kept if a share of the parameters outside of the embedding is removed."""
        return fp.Budget("inner_params", 1 - share)

    def removed(self, small: nn.Module) -> float:
        """The share of the parameters outside of the embedding that a smaller model lacks."""
        outer = self.model.get_input_embeddings().weight.numel()
        return 1 - (fp.count_params(small) - outer) / (fp.count_params(self.model) - outer)

    @cached_property
    def spaces(self) -> fp.Spaces:
        example = {"input_ids": self.data[0]["input_ids"][:, :16]}
        return fp.discover(self.model, example, kinds=[*WIDTH, "block"])

    def scores(self, signals: Collection[Any], kinds: Collection[str] = WIDTH) -> fp.Scores:
        """The scores of these removal signals, from the cache if they are there."""
        names = [signal if isinstance(signal, str) else signal.name for signal in signals]
        file = self._cache and self._cache / f"{'-'.join([*sorted(names), *kinds, str(self._draw)])}.scores"
        if file and file.exists():
            return fp.Scores.load(file)
        found = fp.score(
            self.model,
            self.data,
            spaces=self.spaces.only(kinds=list(kinds)),
            removal=list(signals),
            protection="taylor",
        )
        if file:
            found.save(file)
        return found
