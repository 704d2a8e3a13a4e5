"""Reading calibration data: batches of many forms, and the loss on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairpruner.errors import FairprunerError
from fairpruner.inputs.tokens import IGNORED, own_labels, real_tokens, targets_of
from fairpruner.models.calling import call, describe, tensors_of
from fairpruner.models.precision import widened

Loss = Callable[[Any, Any], Tensor]

LABEL_KEYS = ("labels", "label", "y", "target")


@dataclass(frozen=True, eq=False)
class Batch:
    """What the model is called with, the labels of its samples, and the place in the data."""

    inputs: Any
    labels: Tensor
    position: int

    @property
    def size(self) -> int:
        """The number of samples: the length of the first tensor the model is called with."""
        first = next(tensors_of(self.inputs), self.labels)
        if first.ndim == 0:
            raise FairprunerError(
                f"Batch {self.position} has {describe(self.inputs)} as its input, expected a tensor whose dim"
                " 0 counts the samples."
            )
        return first.shape[0]

    def rows(self, start: int, stop: int) -> Batch:
        """The samples from `start` to `stop` as a batch of their own."""
        size = self.size

        def some(tensor: Tensor) -> Tensor:
            return tensor[start:stop] if tensor.ndim and tensor.shape[0] == size else tensor

        return Batch(_map(self.inputs, some), some(self.labels), self.position)

    def some(self, chosen: Tensor) -> Batch:
        """The samples of these indices, [n], as a batch of their own."""
        size = self.size

        def taken(tensor: Tensor) -> Tensor:
            return tensor[chosen.to(tensor.device)] if tensor.ndim and tensor.shape[0] == size else tensor

        return Batch(_map(self.inputs, taken), taken(self.labels), self.position)

    def predicted_tokens(self) -> int:
        """How many tokens the default loss of a language model is the mean over."""
        targets = targets_of(self.inputs, self.labels)
        return 0 if targets is None else int((targets != IGNORED).sum())

    @property
    def has_classes(self) -> bool:
        """Whether there may be classes to compare: texts whose labels are their tokens have none."""
        return self.labels.ndim <= 1 or real_tokens(self.inputs) is None

    def class_labels(self) -> Tensor:
        """The labels, refused unless they are one class index for each sample, int64 [N]."""
        found = describe(self.labels)
        if self.labels.is_floating_point() or self.labels.is_complex() or self.labels.ndim != 1:
            raise FairprunerError(
                f"Batch {self.position} has labels {found}, expected class indices: integers of shape"
                f" [{self.size}]. Choose signals and a loss that need no classes, or give indices."
            )
        if len(self.labels) != self.size:
            raise FairprunerError(
                f"Batch {self.position} has {len(self.labels)} labels for {self.size} samples, expected one"
                " label for each."
            )
        if len(self.labels) and int(self.labels.min()) < 0:
            raise FairprunerError(
                f"Batch {self.position} has the label {int(self.labels.min())}, expected class indices from 0"
                " upwards."
            )
        return self.labels.long()


def read_batches(data: Iterable[Any], device: torch.device) -> Iterator[Batch]:
    """Every batch of `data`, moved to `device`: (input, label) pairs, or dicts with the label under one
    of LABEL_KEYS.

    A dict of tokens may come without: its tokens are then their own labels, to be predicted one ahead.
    """
    for position, item in enumerate(_reading(data)):
        if isinstance(item, Mapping):
            key = next((k for k in LABEL_KEYS if k in item), None)
            inputs = {k: v for k, v in item.items() if k != key}
            labels = item[key] if key is not None else own_labels(inputs)
            if labels is None:
                raise FairprunerError(
                    f"Batch {position} is a dict with the keys {sorted(map(str, item))}, expected a label"
                    f" under one of {', '.join(LABEL_KEYS)}."
                )
        elif isinstance(item, (tuple, list)) and len(item) == 2:
            inputs, labels = item
        else:
            raise FairprunerError(f"Batch {position} is {describe(item)}, expected (input, label) or a dict.")
        batch = Batch(_map(inputs, lambda t: t.to(device)), _tensor(labels, position).to(device), position)
        if batch.size:
            yield batch


def _reading(data: Iterable[Any]) -> Iterator[Any]:
    """The items of the data; a failure of the user's loader becomes one sentence that says where."""
    position = 0
    try:
        for item in data:
            yield item
            position += 1
    except FairprunerError:
        raise
    except Exception as error:
        raise FairprunerError(
            f"The data failed at batch {position}: {type(data).__name__} raised {type(error).__name__}:"
            f" {error}"
        ) from error


def _tensor(labels: Any, position: int) -> Tensor:
    try:
        return torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FairprunerError(
            f"Batch {position} has labels of type {type(labels).__name__}, expected a tensor of class"
            f" indices: {error}"
        ) from error


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {k: _map(v, change) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_map(v, change) for v in value]
    return value


def check_rereadable(data: Any, reason: str, *, name: str = "data") -> None:
    """Refuse data that can be read only once; `reason` says who reads it again."""
    if isinstance(data, Iterator):
        raise FairprunerError(
            f"The {name} is a {type(data).__name__}, which can be read once, and {reason}: give a loader or a"
            " list of batches."
        )


def in_halves(batches: Iterator[Batch]) -> Iterator[tuple[int, Batch]]:
    """Batches with the half of the data (0 or 1) each belongs to; a batch that is alone is split in two."""
    first = next(batches, None)
    if first is None:
        return
    second = next(batches, None)
    if second is None:
        middle = (first.size + 1) // 2
        yield 0, first.rows(0, middle)
        if middle < first.size:
            yield 1, first.rows(middle, first.size)
        return
    yield 0, first
    yield 1, second
    for count, batch in enumerate(batches):
        yield count % 2, batch


def forward(model: nn.Module, batch: Batch) -> Any:
    """The model's output on a batch, a failure turned into one sentence that shows the batch."""
    try:
        return call(model, batch.inputs)
    except FairprunerError:
        raise
    except Exception as error:
        raise FairprunerError(
            f"Batch {batch.position} does not fit the model: {type(model).__name__} called with"
            f" {describe(batch.inputs)} raised {type(error).__name__}: {error}"
        ) from error


def logits_of(output: Any) -> Tensor | None:
    """The logits inside a model's output: itself, `.logits`, `["logits"]`, or the first tensor of a
    tuple.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, (tuple, list)):
        return next((item for item in output if isinstance(item, Tensor)), None)
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return named if isinstance(named, Tensor) else None


def mean_loss(loss: Loss | None, output: Any, batch: Batch) -> Tensor:
    """The loss of a batch, checked to be one finite number; cross-entropy on the logits, of classes or of
    tokens, when `loss` is None.
    """
    value = _cross_entropy(output, batch) if loss is None else _called(loss, output, batch)
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


def _called(loss: Loss, output: Any, batch: Batch) -> Any:
    try:
        return loss(output, batch.labels)
    except FairprunerError:
        raise
    except Exception as error:
        raise FairprunerError(
            f"The loss failed on batch {batch.position}: called with the output {describe(output)} and the"
            f" labels {describe(batch.labels)} it raised {type(error).__name__}: {error}"
        ) from error


def _cross_entropy(output: Any, batch: Batch) -> Tensor:
    logits = logits_of(output)
    if logits is not None and logits.ndim == 3:
        return _token_cross_entropy(logits, batch)
    labels = batch.class_labels()
    if logits is None or logits.ndim != 2 or len(logits) != len(labels):
        raise FairprunerError(
            f"The model returned {describe(output)}, expected logits of shape [{len(labels)}, classes] for"
            " cross-entropy. Pass loss= for other outputs."
        )
    if int(labels.max()) >= logits.shape[1]:
        raise FairprunerError(
            f"Batch {batch.position} has the label {int(labels.max())}, expected class indices below the"
            f" {logits.shape[1]} logits."
        )
    return F.cross_entropy(widened(logits), labels)


def token_losses(output: Any, batch: Batch) -> Tensor | None:
    """The cross-entropy of every position of a batch of texts, [N, T], 0 where nothing is predicted; None
    for other outputs.
    """
    logits, targets = logits_of(output), targets_of(batch.inputs, batch.labels)
    if logits is None or logits.ndim != 3 or targets is None or targets.shape != logits.shape[:2]:
        return None
    return F.cross_entropy(widened(logits).movedim(2, 1), targets, ignore_index=IGNORED, reduction="none")


def _token_cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """The mean over all tokens that have to be predicted; logits [N, T, V]."""
    targets = targets_of(batch.inputs, batch.labels)
    if targets is None or targets.shape != logits.shape[:2]:
        raise FairprunerError(
            f"The model returned logits {list(logits.shape)} and batch {batch.position} has labels"
            f" {describe(batch.labels)}, expected a label for each of its tokens. Pass loss= for other"
            " outputs."
        )
    if bool((targets == IGNORED).all()):
        raise FairprunerError(
            f"Batch {batch.position} has no token to predict: give longer texts, or labels other than"
            f" {IGNORED}."
        )
    # Ignoring what is not predicted is quicker than picking the rest out of the logits, which would copy
    # them.
    return F.cross_entropy(widened(logits).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
