"""The mean loss of a batch: the caller's own, or the default of the task that the labels show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from fairpruner.errors import FairprunerError, unknown
from fairpruner.inputs.batches import Batch
from fairpruner.inputs.tokens import IGNORED, targets_of
from fairpruner.models.calling import describe, tensors_of
from fairpruner.models.devices import device_of_example
from fairpruner.models.precision import in_float32

Loss = Callable[[Any, Any], Tensor]
Task = Literal[
    "classification", "language", "segmentation", "multilabel", "regression", "detection", "unlabelled"
]
TASKS: tuple[Task, ...] = get_args(Task)

UNLABELLED_PIXEL = 255  # the usual label of pixels that do not count


def task_of(batch: Batch, output: Any) -> Task:
    """What the model is for, from the labels of a batch and the model's output.

    >>> batch = Batch(torch.zeros(4, 3), torch.rand(4, 2), 0)
    >>> task_of(batch, torch.zeros(4, 2))
    'regression'
    """
    labels, logits = batch.labels, logits_of(output)
    if labels is None:
        return "unlabelled"
    if isinstance(labels, list):
        return "detection"
    if logits is None:
        return "classification"
    if labels.shape == logits.shape and labels.ndim > 1 and all_zeros_and_ones(labels):
        return "multilabel"
    if labels.is_floating_point():
        same = labels.numel() == logits.numel() and len(labels) == len(logits)
        return "regression" if same else "classification"
    if logits.ndim == 3:
        return "language"
    return "segmentation" if logits.ndim == 4 and labels.ndim == 3 else "classification"


def all_zeros_and_ones(labels: Tensor) -> bool:
    """Whether labels have no other values, as those of several classes for each sample."""
    return bool(((labels == 0) | (labels == 1)).all())


def logits_of(output: Any) -> Tensor | None:
    """The logits inside a model's output.

    They are the output itself, `.logits`, `["logits"]`, `["out"]`, or the first tensor of a tuple.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, (tuple, list)):
        return next((item for item in output if isinstance(item, Tensor)), None)
    if isinstance(output, Mapping):
        named = output.get("logits", output.get("out"))
    else:
        named = getattr(output, "logits", None)
    return named if isinstance(named, Tensor) else None


def checked_task(loss: Loss | str | None) -> Task | None:
    """The task that a caller names in place of a loss, if any; refused unless there is such a task."""
    if not isinstance(loss, str):
        return None
    found = next((task for task in TASKS if task == loss), None)
    if found is None:
        raise unknown("task", loss, TASKS)
    return found


def mean_loss(loss: Loss | str | None, output: Any, batch: Batch, *, label_smoothing: float = 0.0) -> Tensor:
    """The loss of a batch, checked to be one finite number.

    `loss` is the caller's function, or names a task; None: the task is the one that the labels show.
    """
    if loss is None or isinstance(loss, str):
        value = default_loss(output, batch, checked_task(loss), label_smoothing=label_smoothing)
    else:
        value = _called(loss, output, batch)
    if not isinstance(value, Tensor) or value.ndim != 0:
        raise FairprunerError(
            f"The loss of batch {batch.position} is {describe(value)}, expected a scalar tensor: the mean"
            " over the batch."
        )
    if not torch.isfinite(value):
        raise FairprunerError(
            f"The loss of batch {batch.position} is {value.item()}, expected a finite number: look at that"
            " batch and at the model's weights."
        )
    return value


def loss_or_distance(
    loss: Loss | str | None, output: Any, batch: Batch, original: Callable[[], Any]
) -> float:
    """The mean loss; without labels and loss, the mean squared distance to the original model's output.

    If two detectors return different numbers of boxes, the distance is infinite.
    """
    if loss != "unlabelled" and (loss is not None or isinstance(batch.labels, Tensor)):
        return float(mean_loss(loss, output, batch))
    given, wanted = ([t for t in tensors_of(o) if t.is_floating_point()] for o in (output, original()))
    if [t.shape for t in given] != [t.shape for t in wanted]:
        return math.inf
    pairs = zip(given, wanted, strict=True)
    distance = sum(float(in_float32(a - b).square().sum()) for a, b in pairs) / batch.size
    if math.isnan(distance):
        raise FairprunerError(
            f"The output on batch {batch.position} has NaN: look at that batch and at the model's weights."
        )
    return distance


def default_loss(
    output: Any, batch: Batch, task: Task | None = None, *, label_smoothing: float = 0.0
) -> Tensor:
    """The mean loss of a task, by default of the task that labels and output show."""
    task = task or task_of(batch, output)
    if task == "unlabelled":
        raise FairprunerError(
            f"Batch {batch.position} has no labels, and the loss needs some: give batches such as (input,"
            " label), or pass loss=."
        )
    if task in _CROSS_ENTROPIES:
        return _CROSS_ENTROPIES[task](output, batch, label_smoothing)
    if label_smoothing:
        raise FairprunerError(
            f"Label smoothing of {label_smoothing:g} applies to cross-entropy, but the labels of batch"
            f" {batch.position} show the task {task}: give a label smoothing of 0."
        )
    return _OTHER_LOSSES[task](output, batch)


def _called(loss: Loss, output: Any, batch: Batch) -> Any:
    """The caller's loss; its failure is reported in one sentence that shows output and labels."""
    labels = batch.labels
    if isinstance(labels, Tensor) and any(True for _ in tensors_of(output)):
        labels = labels.to(device_of_example(output))  # a model may be spread over several devices
    try:
        return loss(output, labels)
    except FairprunerError:
        raise
    except Exception as error:
        raise FairprunerError(
            f"The loss failed on batch {batch.position}: called with the output {describe(output)} and the"
            f" labels {describe(batch.labels)} it raised {type(error).__name__}: {error}"
        ) from error


def _classification(output: Any, batch: Batch, smoothing: float) -> Tensor:
    logits, labels = logits_of(output), batch.class_labels()
    if logits is None or logits.ndim != 2 or len(logits) != len(labels):
        raise FairprunerError(
            f"The model returned {describe(output)}, expected logits of shape [{len(labels)}, classes] for"
            " cross-entropy. Pass loss= for other outputs."
        )
    _check_classes(labels, logits, batch)
    return F.cross_entropy(in_float32(logits), labels.to(logits.device), label_smoothing=smoothing)


def _mismatch(output: Any, batch: Batch, expected: str) -> FairprunerError:
    """The error of a batch whose labels do not fit the output, for the task that was chosen."""
    return FairprunerError(
        f"The model returned {describe(output)} and batch {batch.position} has labels"
        f" {describe(batch.labels)}, expected {expected}. Pass another task, or your own function, as loss=."
    )


def _dims(labels: Any) -> int:
    return labels.ndim if isinstance(labels, Tensor) else 0


def _check_classes(labels: Tensor, logits: Tensor, batch: Batch) -> None:
    if labels.numel() and int(labels.max()) >= logits.shape[1]:
        raise FairprunerError(
            f"Batch {batch.position} has the label {int(labels.max())}, expected class indices below the"
            f" {logits.shape[1]} logits."
        )


def _segmentation(output: Any, batch: Batch, smoothing: float) -> Tensor:
    """The mean over all labelled pixels; smaller maps of logits are enlarged to the size of the labels."""
    logits = logits_of(output)
    if logits is None or logits.ndim != 4 or _dims(batch.labels) != 3:
        raise _mismatch(output, batch, "maps of logits [N, classes, H, W] and of class indices [N, H, W]")
    labels = pixel_labels(batch.labels).to(logits.device)
    _check_classes(labels, logits, batch)
    if logits.shape[2:] != labels.shape[1:]:
        logits = F.interpolate(in_float32(logits), labels.shape[1:], mode="bilinear", align_corners=False)
    if bool((labels < 0).all()):
        raise FairprunerError(f"Batch {batch.position} has no labelled pixel: give maps of class indices.")
    return F.cross_entropy(in_float32(logits), labels, ignore_index=-1, label_smoothing=smoothing)


def pixel_labels(labels: Tensor) -> Tensor:
    """Label maps [N, H, W] as int64, -1 for pixels that do not count: negative ones and 255."""
    return labels.long().masked_fill((labels < 0) | (labels == UNLABELLED_PIXEL), -1)


def _multilabel(output: Any, batch: Batch) -> Tensor:
    logits = logits_of(output)
    if logits is None or not isinstance(batch.labels, Tensor) or batch.labels.shape != logits.shape:
        raise _mismatch(output, batch, "a logit for each label, in the same shape")
    wide = in_float32(logits)
    labels = batch.labels.to(wide.device, wide.dtype)
    if bool(((labels < 0) | (labels > 1)).any()):
        raise FairprunerError(
            f"Batch {batch.position} has labels from {float(labels.min()):g} to {float(labels.max()):g},"
            " expected values from 0 to 1 for several classes. Pass loss='regression' if they are amounts."
        )
    return F.binary_cross_entropy_with_logits(wide, labels)


def _regression(output: Any, batch: Batch) -> Tensor:
    found = logits_of(output)
    if found is None or not isinstance(batch.labels, Tensor) or found.numel() != batch.labels.numel():
        raise _mismatch(output, batch, "as many numbers of each")
    wide = in_float32(found)
    return F.mse_loss(wide, batch.labels.to(wide.device, wide.dtype).reshape(wide.shape))


def token_losses(output: Any, batch: Batch) -> Tensor | None:
    """The cross-entropy of every position of a batch of texts, [N, T]; None for other outputs.

    It is 0 where nothing is predicted.
    """
    logits, targets = logits_of(output), targets_of(batch.inputs, batch.labels)
    if logits is None or logits.ndim != 3 or targets is None or targets.shape != logits.shape[:2]:
        return None
    targets = targets.to(logits.device)
    return F.cross_entropy(in_float32(logits).movedim(2, 1), targets, ignore_index=IGNORED, reduction="none")


def _language(output: Any, batch: Batch, smoothing: float) -> Tensor:
    """The mean over all tokens that are predicted; logits [N, T, V]."""
    logits, targets = logits_of(output), targets_of(batch.inputs, batch.labels)
    if logits is None or logits.ndim != 3 or targets is None or targets.shape != logits.shape[:2]:
        raise _mismatch(output, batch, "logits [N, tokens, words] and a label for each token")
    if bool((targets == IGNORED).all()):
        raise FairprunerError(
            f"Batch {batch.position} has no token to predict: give longer texts, or labels other than"
            f" {IGNORED}."
        )
    targets = targets.flatten().to(logits.device)
    # Ignoring tokens is quicker than selecting the others, which would copy the logits.
    rows = in_float32(logits).flatten(0, 1)
    return F.cross_entropy(rows, targets, ignore_index=IGNORED, label_smoothing=smoothing)


def _detection(output: Any, batch: Batch) -> Tensor:
    """The sum of the losses that a detector returns in training mode.

    torchvision returns a dict of means over the images. Ultralytics returns a vector of sums over the images,
    and a copy of it without gradients.
    """
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor) and output[0].ndim < 2:
        return in_float32(output[0]).sum() / batch.size
    losses = list(output.values()) if isinstance(output, Mapping) else []
    if not losses or not all(isinstance(value, Tensor) and value.ndim == 0 for value in losses):
        raise FairprunerError(
            f"The model returned {describe(output)}, expected the losses for images and boxes that the"
            " detectors of torchvision and Ultralytics return in training mode. Pass loss= for other outputs."
        )
    return torch.stack([in_float32(value) for value in losses]).sum()


# With the classes of samples, tokens or pixels as labels, which can be smoothed.
_CROSS_ENTROPIES: dict[Task, Callable[[Any, Batch, float], Tensor]] = {
    "classification": _classification,
    "language": _language,
    "segmentation": _segmentation,
}
_OTHER_LOSSES: dict[Task, Callable[[Any, Batch], Tensor]] = {
    "multilabel": _multilabel,
    "regression": _regression,
    "detection": _detection,
}
