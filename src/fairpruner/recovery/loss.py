"""The loss of recovery: from labels, from the teacher's outputs, and from the activations of its blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairpruner.errors import FairprunerError
from fairpruner.inputs.activations import BlockOutputs, Outputs, relative_error
from fairpruner.inputs.batches import Batch, forward
from fairpruner.inputs.losses import Task, checked_task, logits_of, mean_loss, task_of
from fairpruner.inputs.tokens import targets_of
from fairpruner.models.calling import describe, tensors_of
from fairpruner.models.precision import in_float32
from fairpruner.recovery.recipe import Recipe
from fairpruner.scoring.objective import own_logits

# The dimensions of logits, and which of them counts the classes.
CLASSES: dict[Task, tuple[int, int]] = {"classification": (2, 1), "language": (3, 2), "segmentation": (4, 1)}


def training_loss(
    recipe: Recipe, output: Any, batch: Batch, teacher: nn.Module | None, activations: Outputs | None = None
) -> Tensor:
    """The loss to minimise: (1 - d - m)·loss + d·distillation + m·error.

    The loss is that of the labels, which are smoothed if the recipe asks for it. d is the weight of the
    distillation and m that of the matching; the error is that of the model's `activations`. Without a
    teacher, d and m are 0.
    """
    if teacher is None or not recipe.distillation + recipe.matching:
        return _of_labels(recipe, output, batch)
    given = activations or {}
    with torch.no_grad(), BlockOutputs(teacher, list(given)) as of_teacher:
        target = forward(teacher, batch)
    wanted = of_teacher.taken()
    terms: dict[str, tuple[float, Callable[[], Tensor]]] = {
        "label": (recipe.label_weight, lambda: _of_labels(recipe, output, batch)),
        "distillation": (recipe.distillation, lambda: _distillation(recipe, output, target, batch)),
        "matching": (recipe.matching, lambda: _matching(given, wanted, batch)),
    }
    losses = {name: weight * term() for name, (weight, term) in terms.items() if weight}
    for name, loss in losses.items():
        if not torch.isfinite(loss):
            raise FairprunerError(
                f"The {name} loss of batch {batch.position} is {loss.item()}, expected a finite number:"
                f" {_cause((output, given), (target, wanted))}"
            )
    return torch.stack(list(losses.values())).sum()


def _cause(of_model: Any, of_teacher: Any) -> str:
    """Which of the two models gave numbers that are not finite, and what to do."""
    if not _finite(of_teacher):
        return "the teacher's outputs are not finite. Look at that batch and at the teacher's weights."
    if not _finite(of_model):
        return (
            "the model's outputs are not finite, the teacher's are. Look at the model's weights, or lower the"
            " learning rate."
        )
    return "the outputs of both models are finite, but too far apart. Lower the learning rate."


def _finite(outputs: Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors_of(outputs))


def _of_labels(recipe: Recipe, output: Any, batch: Batch) -> Tensor:
    return mean_loss(recipe.loss, output, batch, label_smoothing=recipe.label_smoothing)


def _distillation(recipe: Recipe, output: Any, target: Any, batch: Batch) -> Tensor:
    """Hinton's loss T²·KL(teacher ‖ model), averaged over all predictions of a batch.

    The factor T² makes its gradient independent of the temperature, to first order. Outputs that are not
    logits are compared as numbers.
    """
    task = checked_task(recipe.loss) or task_of(batch, output)
    axis = _class_axis(recipe, output, batch, task)
    # Of a task with labels that fit the output, only the tensor that they are compared with.
    named = axis is not None or task in ("regression", "multilabel")
    found, wanted = (_floating(logits_of(value) if named else value) for value in (output, target))
    if not wanted or [t.shape for t in found] != [t.shape for t in wanted]:
        raise FairprunerError(
            f"The teacher gives {describe(target)}, the model {describe(output)}: give the model that was"
            " pruned as the teacher."
        )
    if axis is None:
        return _squared_error(found, wanted)
    # [predictions, C] each
    log_found, log_wanted = (
        F.log_softmax(in_float32(logits).movedim(axis, -1) / recipe.temperature, dim=-1).flatten(0, -2)
        for (logits,) in (found, wanted)
    )
    return recipe.temperature**2 * F.kl_div(log_found, log_wanted, reduction="batchmean", log_target=True)


def _class_axis(recipe: Recipe, output: Any, batch: Batch, task: Task) -> int | None:
    """The dimension of the output that counts the classes; None if the output is not known to be logits."""
    logits = logits_of(output)
    if logits is None:
        return None
    if task == "unlabelled":  # a caller's loss may take numbers of any meaning
        known = not callable(recipe.loss) and own_logits(output) is not None
        return (1 if logits.ndim == 4 else -1) if known else None
    dims, axis = CLASSES.get(task, (0, 0))
    if logits.ndim != dims or logits.shape[axis] < 2:  # the softmax of a single number is always 1
        return None
    if task == "segmentation":
        return axis
    # A caller's loss may also take other labels, which do not show that the outputs are logits.
    labels = targets_of(batch.inputs, batch.labels) if task == "language" else batch.labels
    fits = labels is not None and not labels.is_floating_point() and labels.shape == logits.shape[:axis]
    return axis if fits else None


def _floating(output: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]


def _squared_error(found: list[Tensor], wanted: list[Tensor]) -> Tensor:
    """The mean squared error of outputs that are not logits, divided by the teacher's mean square.

    A softmax would ignore a number that is added to all outputs of a sample, which is an error here. The
    quotient does not depend on the unit of the outputs.
    """
    # [n] each; a model over several devices may have outputs on each of them
    mine, theirs = (
        torch.cat([in_float32(t).flatten().to(found[0].device) for t in tensors])
        for tensors in (found, wanted)
    )
    return F.mse_loss(mine, theirs) / theirs.square().mean().clamp_min(torch.finfo(theirs.dtype).tiny)


def _matching(given: Outputs, wanted: Outputs, batch: Batch) -> Tensor:
    """The error of the activations; blocks whose output lost units are left out."""
    error = relative_error(given, wanted, batch)
    if error is None:
        raise FairprunerError(
            "No block of the teacher gives tensors of the same shape as the model's: give the model that was"
            " pruned as the teacher, or Recipe(matching=0)."
        )
    return error
