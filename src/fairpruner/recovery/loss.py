"""The loss of recovery, from labels, from the teacher's logits, and from the activations of its blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairpruner.errors import FairprunerError
from fairpruner.inputs.activations import BlockOutputs, Outputs, relative_error
from fairpruner.inputs.batches import Batch, forward
from fairpruner.inputs.losses import logits_of, mean_loss
from fairpruner.models.calling import describe
from fairpruner.recovery.recipe import Recipe


def training_loss(
    recipe: Recipe, output: Any, batch: Batch, teacher: nn.Module | None, activations: Outputs | None = None
) -> Tensor:
    """The loss to minimise: (1 - d - m)·((1 - s)·loss + s·uniform) + d·T²·KL(teacher ‖ model) + m·error.

    s is the label smoothing, d the weight of the distillation and T its temperature. m is the weight of the
    matching, and the error is that of the model's `activations`. Without a teacher, d and m are 0.
    """
    if teacher is None or not recipe.distillation + recipe.matching:
        return _of_labels(recipe, output, batch)
    with torch.no_grad(), BlockOutputs(teacher, list(activations or {})) as of_teacher:
        target = forward(teacher, batch)
    terms: list[tuple[float, Callable[[], Tensor]]] = [
        (recipe.label_weight, lambda: _of_labels(recipe, output, batch)),
        (recipe.distillation, lambda: _distillation(recipe.temperature, output, target)),
        (recipe.matching, lambda: _matching(activations or {}, of_teacher.taken(), batch)),
    ]
    loss = torch.stack([weight * term() for weight, term in terms if weight]).sum()
    if not torch.isfinite(loss):
        raise FairprunerError(
            f"The distillation loss of batch {batch.position} is {loss.item()}, expected a finite number:"
            " check the teacher's weights."
        )
    return loss


def _of_labels(recipe: Recipe, output: Any, batch: Batch) -> Tensor:
    loss = mean_loss(recipe.loss, output, batch)
    if not recipe.label_smoothing:
        return loss
    # Cross-entropy against the uniform distribution. The sum equals torch's label smoothing.
    uniform = -F.log_softmax(_logits("model", output), dim=-1).mean()
    return (1 - recipe.label_smoothing) * loss + recipe.label_smoothing * uniform


def _distillation(temperature: float, output: Any, target: Any) -> Tensor:
    """Hinton's distillation loss, averaged over all predictions of a batch.

    The factor T² makes its gradient independent of the temperature, to first order.
    """
    wanted, found = _logits("teacher", target), _logits("model", output)  # [..., C]
    if wanted.shape != found.shape:
        raise FairprunerError(
            f"The teacher gives logits of shape {list(wanted.shape)}, the model of {list(found.shape)}: give"
            " the model that was pruned as the teacher."
        )
    # [N, C] each
    log_found, log_wanted = (
        F.log_softmax(logits.float() / temperature, dim=-1).flatten(0, -2) for logits in (found, wanted)
    )
    return temperature**2 * F.kl_div(log_found, log_wanted, reduction="batchmean", log_target=True)


def _matching(given: Outputs, wanted: Outputs, batch: Batch) -> Tensor:
    """The error of the activations; blocks whose output lost units are left out."""
    error = relative_error(given, wanted, batch)
    if error is None:
        raise FairprunerError(
            "No block of the teacher gives tensors of the same shape as the model's: give the model that was"
            " pruned as the teacher, or Recipe(matching=0)."
        )
    return error


def _logits(whose: str, output: Any) -> Tensor:
    """The logits in the output of the model or of the teacher, [..., C]."""
    logits = logits_of(output)
    if logits is None or logits.ndim < 2:
        raise FairprunerError(
            f"The {whose} returned {describe(output)}, expected logits of shape [samples, classes]."
        )
    return logits
