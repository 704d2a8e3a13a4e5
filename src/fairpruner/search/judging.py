"""How far a smaller model's outputs lie from the original's; labels are not looked at."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairpruner.inputs.batches import forward, logits_of, read_batches
from fairpruner.inputs.tokens import counted_rows
from fairpruner.models.calling import evaluating, tensors_of


def distance(
    small: nn.Module, model: nn.Module, data: Iterable[Any], device: torch.device, *, logits: bool
) -> float:
    """The mean KL divergence of the original's predictions from the smaller model's, over samples or tokens.

    Without `logits`, the squared error of all outputs as a share of the original's power.
    """
    measure = _divergence if logits else _squared_error
    total, weight = 0.0, 0.0
    with torch.inference_mode(False), torch.no_grad(), evaluating(model), evaluating(small):
        for batch in read_batches(data, device):
            found, weighs = measure(forward(small, batch), forward(model, batch), batch.inputs)
            total, weight = total + found, weight + weighs
    mean = total / weight if weight else 0.0
    return mean if math.isfinite(mean) else math.inf


def _divergence(given: Any, wanted: Any, inputs: Any) -> tuple[float, float]:
    """KL summed over the rows that count, and their number."""
    mine, theirs = (_log_softmax(output, inputs) for output in (given, wanted))  # [rows, C]
    return float(F.kl_div(mine, theirs, reduction="sum", log_target=True)), len(mine)


def _log_softmax(output: Any, inputs: Any) -> Tensor:
    logits = logits_of(output)
    assert logits is not None  # the default loss was computed from them
    rows = logits.flatten(0, -2)
    return rows[counted_rows(len(rows), inputs, "decoder").to(rows.device)].double().log_softmax(1)


def _squared_error(given: Any, wanted: Any, inputs: Any) -> tuple[float, float]:
    """The squared error summed over all tensors, and the sum of the original's squares."""
    pairs = list(zip(tensors_of(given), tensors_of(wanted), strict=True))
    numbers = [(a.double(), b.double()) for a, b in pairs if b.is_floating_point()]
    return (
        float(sum((a - b).square().sum() for a, b in numbers)),
        float(sum(b.square().sum() for _, b in numbers)),
    )
