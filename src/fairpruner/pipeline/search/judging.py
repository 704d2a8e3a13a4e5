"""The distance of a smaller model's outputs from the original's; labels are not used."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairpruner.inputs.batches import Batch, Mark, forward, read_batches
from fairpruner.inputs.losses import Task, logits_of
from fairpruner.inputs.tokens import counted_rows
from fairpruner.models.calling import evaluating, tensors_of
from fairpruner.models.devices import device_of_model, in_float64
from fairpruner.scoring.objective import own_logits

MOST_HELD = 2**24  # numbers of the original's outputs that are kept in memory, so that it runs only once


class Judge:
    """Compares smaller models with the original on the same samples.

    >>> model, data = nn.Linear(4, 3), [(torch.randn(8, 4), torch.arange(8) % 3)]
    >>> Judge(model, data, task="classification").distance(model)
    0.0
    """

    def __init__(self, model: nn.Module, data: Iterable[Any], *, task: Task | None) -> None:
        """`task` determines which outputs are logits; with None, no output is known to be logits."""
        self._model, self._data, self._device = model, data, device_of_model(model)
        self._task = task
        self._held: dict[int, tuple[Mark, Tensor]] = {}  # batch -> its mark, and the original's outputs
        self._room = MOST_HELD

    def distance(self, small: nn.Module) -> float:
        """The mean over samples or tokens of the KL divergence between the predictions of both models.

        If no output is known to be logits: the squared error of all outputs, divided by the sum of the
        original's squared outputs.
        """
        total, weight = 0.0, 0.0
        with torch.inference_mode(False), torch.no_grad(), evaluating(self._model), evaluating(small):
            for batch in read_batches(self._data, self._device, self._model):
                error, weighs = _compared(self._outputs(forward(small, batch), batch), self._wanted(batch))
                total, weight = total + error, weight + weighs
        mean = total / weight if weight else 0.0
        return mean if math.isfinite(mean) else math.inf

    def _outputs(self, output: Any, batch: Batch) -> Tensor:
        """Log-probabilities of all samples, pixels or real tokens, [rows, classes]; else all numbers, [n]."""
        logits = _class_logits(output, self._task)
        if logits is None:
            return torch.cat([in_float64(t).flatten() for t in tensors_of(output) if t.is_floating_point()])
        rows = logits.flatten(0, -2)
        counted = counted_rows(len(rows), batch.inputs, "decoder").to(rows.device)
        return in_float64(rows[counted]).log_softmax(1)

    def _wanted(self, batch: Batch) -> Tensor:
        """The original's outputs, computed once if there is room to keep them."""
        mark, (known, held) = batch.mark, self._held.get(batch.position, (None, None))
        if held is not None and known == mark:
            return held
        wanted = self._outputs(forward(self._model, batch), batch)
        if held is None and wanted.numel() <= self._room:
            self._held[batch.position] = mark, wanted
            self._room -= wanted.numel()
        return wanted


def _class_logits(output: Any, task: Task | None) -> Tensor | None:
    """The logits of an output, [..., classes]; None for boxes, regression and outputs of unknown meaning."""
    if task in ("classification", "language"):
        return logits_of(output)
    if task == "segmentation":
        logits = logits_of(output)
        return None if logits is None else logits.movedim(1, -1)
    return own_logits(output) if task == "unlabelled" else None


def _compared(given: Tensor, wanted: Tensor) -> tuple[float, float]:
    """The error of one batch, and its weight: sums of errors are divided by sums of weights.

    For log-probabilities [rows, classes]: the KL divergence, and the number of rows. For other outputs [n]:
    the squared error, and the sum of the original's squares. If two detectors return different numbers of
    boxes, the error is infinite.
    """
    if given.shape != wanted.shape:
        return math.inf, 1.0
    if given.ndim == 2:
        return float(F.kl_div(given, wanted, reduction="sum", log_target=True)), len(given)
    return float((given - wanted).square().sum()), float(wanted.square().sum())
