"""How far a smaller model's outputs lie from the original's; labels are not looked at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairpruner.inputs.batches import Batch, forward, read_batches
from fairpruner.inputs.losses import logits_of
from fairpruner.inputs.tokens import counted_rows
from fairpruner.models.calling import evaluating, tensors_of
from fairpruner.models.devices import device_of_model

MOST_HELD = 2**24  # numbers of the original's outputs that are kept, so that it need not run again


class Judge:
    """Compares smaller models with the original on the same samples.

    >>> model, data = nn.Linear(4, 3), [(torch.randn(8, 4), torch.arange(8) % 3)]
    >>> Judge(model, data, logits=True).distance(model)
    0.0
    """

    def __init__(self, model: nn.Module, data: Iterable[Any], *, logits: bool) -> None:
        self._model, self._data, self._device = model, data, device_of_model(model)
        self._outputs, self._error = (_log_softmax, _divergence) if logits else (_numbers, _squared_error)
        self._held: dict[int, Tensor] = {}  # batch -> the original's outputs
        self._room = MOST_HELD

    def distance(self, small: nn.Module) -> float:
        """The mean KL divergence of the original's predictions from the smaller model's, over samples or
        tokens; without `logits`, the squared error of all outputs as a share of the original's power.
        """
        total, weight = 0.0, 0.0
        with torch.inference_mode(False), torch.no_grad(), evaluating(self._model), evaluating(small):
            for batch in read_batches(self._data, self._device, self._model):
                error, weighs = self._error(self._outputs(forward(small, batch), batch), self._wanted(batch))
                total, weight = total + error, weight + weighs
        mean = total / weight if weight else 0.0
        return mean if math.isfinite(mean) else math.inf

    def _wanted(self, batch: Batch) -> Tensor:
        """The original's outputs, from memory if they are there."""
        wanted = self._held.get(batch.position)
        if wanted is None:
            wanted = self._outputs(forward(self._model, batch), batch)
            if wanted.numel() <= self._room:
                self._held[batch.position] = wanted
                self._room -= wanted.numel()
        return wanted


def _log_softmax(output: Any, batch: Batch) -> Tensor:
    """The logarithms of the predicted probabilities of every sample or real token, [rows, classes]."""
    logits = logits_of(output)
    assert logits is not None  # the default loss was computed from them
    rows = logits.flatten(0, -2)
    counted = counted_rows(len(rows), batch.inputs, "decoder").to(rows.device)
    return rows[counted].double().log_softmax(1)


def _divergence(given: Tensor, wanted: Tensor) -> tuple[float, float]:
    """KL summed over the rows, and their number."""
    return float(F.kl_div(given, wanted, reduction="sum", log_target=True)), len(given)


def _numbers(output: Any, batch: Batch) -> Tensor:
    """All numbers of an output, [n]."""
    return torch.cat([tensor.double().flatten() for tensor in _floats(output)])


def _floats(output: Any) -> Iterator[Tensor]:
    return (tensor for tensor in tensors_of(output) if tensor.is_floating_point())


def _squared_error(given: Tensor, wanted: Tensor) -> tuple[float, float]:
    """The summed squared error, and the sum of the original's squares."""
    return float((given - wanted).square().sum()), float(wanted.square().sum())
