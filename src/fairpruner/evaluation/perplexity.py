"""Perplexity on any text, over consecutive and independent windows of tokens."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fairpruner.errors import FairprunerError, check_whole_number
from fairpruner.inputs.batches import Batch
from fairpruner.inputs.data_files import read_plain_text
from fairpruner.inputs.streamed import ORIGINAL, Streamed
from fairpruner.inputs.walking import Disk, walking
from fairpruner.models.calling import call, evaluating
from fairpruner.models.devices import device_of_model

LARGEST = math.log(sys.float_info.max)  # the largest number whose exp is finite


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-likelihood of all predicted tokens."""

    value: float
    tokens: int  # predicted tokens: all but the first of each window
    windows: int
    length: int

    def __str__(self) -> str:
        return (
            f"perplexity {self.value:.3f} over {self.tokens:,} tokens in {self.windows:,} windows of"
            f" {self.length}"
        )


def read_tokens(path: str | Path, tokenizer: Any) -> Tensor:
    """The text of a file as tokens, [T], without special tokens."""
    text = read_plain_text(path)
    return torch.tensor(
        tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long
    )


@torch.no_grad()
def perplexity(
    model: nn.Module | Streamed, tokens: Tensor, *, length: int = 512, batch_size: int = 8
) -> Perplexity:
    """The perplexity of tokens [T], split into windows of `length` tokens; the last may be shorter.

    The model predicts every token of a window but the first, from the tokens before it in that window. The
    perplexity is exp(sum of -log p / number of predicted tokens).

    >>> class Uniform(nn.Module):
    ...     def forward(self, input_ids): return torch.zeros(*input_ids.shape, 10)
    >>> print(perplexity(Uniform(), torch.arange(7), length=4))
    perplexity 10.000 over 5 tokens in 2 windows of 4
    """
    config = getattr(model.model if isinstance(model, Streamed) else model, "config", None)
    limit = getattr(config, "max_position_embeddings", None) or math.inf
    if not 2 <= length <= limit:
        raise FairprunerError(
            f"length is {length}, expected at least 2 and at most the {limit} positions of the model."
        )
    check_whole_number("batch_size", batch_size)
    windows = [window for window in tokens.split(length) if window.numel() > 1]
    if not windows:
        raise FairprunerError(f"The text has {tokens.numel()} tokens, expected at least 2.")
    whole = [window for window in windows if window.numel() == length]
    batches = [torch.stack(whole[i : i + batch_size]) for i in range(0, len(whole), batch_size)]
    batches += [window[None] for window in windows[len(whole) :]]
    total, predicted = 0.0, 0
    for batch, output in zip(batches, _outputs(model, batches), strict=True):  # [n, length]
        logits = getattr(output, "logits", output)[:, :-1]  # [n, length - 1, vocabulary]
        # float64 is slow on GPUs, and MPS has none.
        logits = logits.double() if logits.device.type == "cpu" else logits.float()
        targets = batch[:, 1:].flatten().to(logits.device)
        total += float(nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"))
        predicted += targets.numel()
    mean = total / predicted
    if not mean < LARGEST:  # this also refuses NaN
        raise FairprunerError(
            f"The mean negative log-likelihood of a token is {mean:.4g}, so the perplexity is not a finite"
            " number: check the model's weights and the range of its logits."
        )
    return Perplexity(math.exp(mean), predicted, len(windows), length)


def _outputs(model: nn.Module | Streamed, batches: Sequence[Tensor]) -> Iterator[Any]:
    """The model's output on each batch of tokens, [n, length]."""
    if isinstance(model, Streamed):
        walked = [Batch({"input_ids": batch}, None, position) for position, batch in enumerate(batches)]
        with walking(model, walked, {"job": "perplexity"}, disk=Disk(streams=2), passes=1) as walk:
            walk.start(ORIGINAL)
            walk.forward(keep=False)
            yield from (output for _, output in walk.outputs())
        return
    device = device_of_model(model)
    with evaluating(model):
        for batch in batches:
            yield call(model, {"input_ids": batch.to(device)})
