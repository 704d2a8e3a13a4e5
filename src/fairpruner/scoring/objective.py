"""The loss that protection signals differentiate, for every task, also where the data has no labels.

**Without labels** the model's predictions are used instead. If its output is logits, one label is drawn for
each prediction from its softmax. The mean gradient of the cross-entropy is then zero in expectation, and the
mean of its square is the Fisher information, so `taylor2` is the default protection signal. For any other
output, the objective is half the squared norm of the output, averaged over the samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairpruner.errors import FairprunerError
from fairpruner.inputs.batches import Batch, forward, joined_boxes
from fairpruner.inputs.losses import (
    Loss,
    Task,
    all_zeros_and_ones,
    checked_task,
    default_loss,
    logits_of,
    mean_loss,
    pixel_labels,
    task_of,
)
from fairpruner.models.calling import describe, tensors_of
from fairpruner.models.precision import in_float32
from fairpruner.models.torch_private import without_reentrant_checkpoints

DRAWN_TOGETHER = 256  # samples whose random numbers come from one seed
LOSS_NAMES: dict[Task, str] = {
    "classification": "cross_entropy",
    "language": "cross_entropy",
    "segmentation": "cross_entropy",
    "multilabel": "binary_cross_entropy",
    "regression": "mse",
    "detection": "the model's own losses",
}
WHY: dict[Task, str] = {
    "classification": "The labels are class indices",
    "language": "The labels are tokens to predict",
    "segmentation": "The labels are maps of class indices, so each pixel is a sample",
    "multilabel": "The labels are several zeros and ones for each sample",
    "regression": "The labels are numbers",
    "detection": "The labels are boxes",
    "unlabelled": "The data has no labels",
}


@dataclass(frozen=True, eq=False)
class Objective:
    """What is differentiated: the caller's loss, or the default of the task."""

    task: Task
    loss: Loss | None
    has_classes: bool  # of samples, texts or pixels
    draws_labels: bool  # from the model's own softmax
    seed: int

    @staticmethod
    def of(model: nn.Module, batch: Batch, loss: Loss | str | None, seed: int) -> Objective:
        """The caller's loss, the task that the caller names, or the task that the first batch shows."""
        named = checked_task(loss)
        function = None if isinstance(loss, str) else loss
        if isinstance(batch.labels, list):
            return Objective("detection", function, has_classes=False, draws_labels=False, seed=seed)
        # A reentrant checkpoint would warn that no input has a gradient.
        with torch.no_grad(), without_reentrant_checkpoints():
            output = forward(model, few := batch.rows(0, 2))
        task = named or task_of(few, output)
        if not named and task == "multilabel" and not all_zeros_and_ones(batch.labels):
            task = "regression"  # the first two samples have zeros and ones only
        draws = task == "unlabelled" and function is None and own_logits(output) is not None
        classes = task == "segmentation" or (batch.has_classes and loss not in ("regression", "unlabelled"))
        return Objective(task, function, has_classes=classes, draws_labels=draws, seed=seed)

    @property
    def name(self) -> str:
        """The name of the loss, for the settings of the scores."""
        if self.loss is not None:
            return getattr(self.loss, "__name__", type(self.loss).__name__)
        if self.task == "unlabelled":
            return "cross_entropy of drawn labels" if self.draws_labels else "squared norm of the output"
        return LOSS_NAMES[self.task]

    @property
    def uses_class_labels(self) -> bool:
        """Whether the loss compares logits with one class index for each sample."""
        return self.loss is None and self.task == "classification"

    @property
    def on_tokens(self) -> bool:
        """Whether the loss is a mean over tokens, not over samples."""
        return self.loss is None and self.task == "language"

    def count(self, batch: Batch) -> int:
        """How many samples, tokens or pixels the loss of a batch is the mean over."""
        if self.on_tokens:
            return batch.predicted_tokens()
        if self.loss is None and self.task == "segmentation":
            return int((pixel_labels(batch.labels) >= 0).sum())
        return batch.size

    def mode(self, model: nn.Module) -> Any:
        """The mode that the model runs in: a detector computes its losses in training mode."""
        return _computing_losses(model) if self._runs_on_boxes else nullcontext()

    @property
    def _runs_on_boxes(self) -> bool:
        return self.task == "detection" and self.loss is None

    def run(self, model: nn.Module, batch: Batch) -> Any:
        """The model's output on a batch; for a detector, its losses."""
        if not self._runs_on_boxes:
            return forward(model, batch)
        torch.manual_seed(self.seed + batch.position)  # detectors sample their proposals at random
        if isinstance(batch.inputs, Tensor):  # Ultralytics: a dict in, its losses out
            return forward(model, replace(batch, inputs=[joined_boxes(batch)]))
        return forward(model, replace(batch, inputs=[*batch.inputs, batch.labels]))

    def mean(self, output: Any, batch: Batch) -> Tensor:
        """The mean over the batch, checked to be one finite number."""
        if self.loss is not None:
            return mean_loss(self.loss, output, batch)
        if self.task == "unlabelled":
            return mean_loss(lambda output, labels: self._without_labels(output, batch), output, batch)
        return mean_loss(lambda output, labels: default_loss(output, batch, self.task), output, batch)

    def _without_labels(self, output: Any, batch: Batch) -> Tensor:
        """Cross-entropy of labels drawn from the model's softmax, or half the squared norm of the output."""
        logits = own_logits(output)
        if logits is not None:
            rows = in_float32(logits).flatten(0, -2)  # [predictions, classes]
            heights = rows.detach().softmax(-1).cpu().cumsum(-1)  # of the steps of each distribution
            drawn = self._drawn(batch, -(-len(rows) // batch.size))[: len(rows)] * heights[:, -1:]
            labels = torch.searchsorted(heights, drawn, right=True).squeeze(1).clamp(max=rows.shape[1] - 1)
            return F.cross_entropy(rows, labels.to(rows.device))
        tensors = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        if not tensors:
            raise FairprunerError(
                f"The model returned {describe(output)}, which holds no tensor with a gradient: pass loss=."
            )
        squares = [in_float32(tensor).square().sum() for tensor in tensors]
        return torch.stack([square.to(squares[0].device) for square in squares]).sum() / (2 * batch.size)

    def _drawn(self, batch: Batch, each: int) -> Tensor:
        """`each` random numbers below 1 for every sample, [samples * each, 1]; batches make no difference."""
        first, last = batch.start // DRAWN_TOGETHER, (batch.start + batch.size - 1) // DRAWN_TOGETHER
        generator, blocks = torch.Generator("cpu"), []
        for number in range(first, last + 1):
            generator.manual_seed(self.seed + number)
            blocks.append(torch.rand(DRAWN_TOGETHER, each, generator=generator, device="cpu"))
        skipped = batch.start - first * DRAWN_TOGETHER
        return torch.cat(blocks)[skipped : skipped + batch.size].reshape(-1, 1)

    def entered(self, model: nn.Module) -> Sequence[Tensor]:
        """Tensors besides weights and gates whose gradients are needed after `run`; none of a whole model."""
        return ()

    def receive(self, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of what `entered` named."""

    def sentence(self, removal: Sequence[str], protection: Sequence[str]) -> str:
        """Which signals were chosen, and why."""
        return (
            f"{WHY[self.task]}: removal by {', '.join(removal)}, protection by {', '.join(protection)}"
            f" ({self.name})."
        )


def own_logits(output: Any) -> Tensor | None:
    """Logits with the classes last: `.logits`, or a matrix [N, classes]; None for any other output."""
    logits = logits_of(output)
    if logits is None or not logits.is_floating_point():
        return None
    named = not isinstance(output, (Tensor, tuple, list))
    if logits.ndim == 4 and named:  # maps of logits, [N, classes, H, W]
        return logits.movedim(1, -1)
    return logits if logits.shape[-1] > 1 and (logits.ndim == 2 or (logits.ndim == 3 and named)) else None


@contextmanager
def _computing_losses(model: nn.Module) -> Iterator[None]:
    """Inside, modules that hold other modules are in training mode, so that a detector returns its losses.

    Modules without children stay in eval mode: norms keep their statistics, and dropout is off.
    """
    before = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in before:
            module.training = any(True for _ in module.children())
        yield
    finally:
        for module, training in before:
            module.training = training
