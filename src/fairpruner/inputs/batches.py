"""Reading calibration data: batches in many forms become inputs, labels and a position."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairpruner.errors import FairprunerError
from fairpruner.inputs.same_order import SameOrder
from fairpruner.inputs.tokens import IGNORED, own_labels, targets_of
from fairpruner.models.calling import call, describe, is_out_of_memory, tensors_of
from fairpruner.models.devices import moved
from fairpruner.models.layer_calls import LayerCall

BOXES = ("img", "batch_idx", "cls", "bboxes")  # the keys of a batch of Ultralytics
LABEL_KEYS = ("labels", "label", "y", "target", "targets", "cls")  # cls: as webdataset names files
Mark = tuple[tuple[tuple[int, ...], float], ...]  # shapes and sums
FORMS = "(input, label), (input, input, label), a dict, or inputs without labels"


@dataclass(frozen=True, eq=False)
class Batch:
    """What the model is called with, the labels of its samples, and the place in the data.

    The labels are a tensor, a list of dicts with the boxes of each image, or None.
    """

    inputs: Any
    labels: Any
    position: int
    start: int = 0  # how many samples of the data come before it

    @property
    def size(self) -> int:
        """The number of samples: of images in a list, or the length of the model's first input tensor."""
        if isinstance(self.labels, list):
            return len(self.labels)
        first = next(tensors_of(self.inputs), None)
        if first is None or first.ndim == 0:
            raise FairprunerError(
                f"Batch {self.position} has {describe(self.inputs)} as its input, expected a tensor whose dim"
                " 0 counts the samples."
            )
        return first.shape[0]

    def rows(self, start: int, stop: int) -> Batch:
        """A batch of the samples from `start` to `stop`."""
        return replace(self.some(torch.arange(self.size, device="cpu")[start:stop]), start=self.start + start)

    def some(self, chosen: Tensor) -> Batch:
        """A batch of the samples with these indices, [n]."""
        size = self.size
        if isinstance(self.labels, list):
            labels = [self.labels[i] for i in chosen.tolist()]
            if isinstance(self.inputs, Tensor):  # images of one size
                return replace(self, inputs=self.inputs[chosen.to(self.inputs.device)], labels=labels)
            return replace(self, inputs=[[self.inputs[0][i] for i in chosen.tolist()]], labels=labels)

        def taken(tensor: Tensor) -> Tensor:
            return tensor[chosen.to(tensor.device)] if tensor.ndim and tensor.shape[0] == size else tensor

        return replace(self, inputs=_map(self.inputs, taken), labels=_map(self.labels, taken))

    @property
    def mark(self) -> Mark:
        """A value by which the inputs of a batch are recognised in a later pass."""
        return tuple((tuple(t.shape), float(t.detach().float().sum())) for t in tensors_of(self.inputs))

    def predicted_tokens(self) -> int:
        """How many tokens the default loss of a language model is the mean over."""
        targets = targets_of(self.inputs, self.labels)
        return 0 if targets is None else int((targets != IGNORED).sum())

    @property
    def has_classes(self) -> bool:
        """Whether the labels are one whole number for each sample."""
        labels = self.labels
        return isinstance(labels, Tensor) and labels.ndim == 1 and not labels.is_floating_point()

    def class_labels(self) -> Tensor:
        """The labels, refused unless they are one class index for each sample, int64 [N]."""
        if not self.has_classes or self.labels.is_complex():
            found = "no labels" if self.labels is None else f"labels {describe(self.labels)}"
            raise FairprunerError(
                f"Batch {self.position} has {found}, expected class indices: integers of shape"
                f" [{self.size}]. Give indices, or choose what needs no classes, for example"
                " removal='activation' and loss='unlabelled'."
            )
        if len(self.labels) != self.size:
            raise FairprunerError(
                f"Batch {self.position} has {len(self.labels)} labels for {self.size} samples, expected one"
                " label for each."
            )
        labels: Tensor = self.labels.long()
        if len(labels) and int(labels.min()) < 0:
            raise FairprunerError(
                f"Batch {self.position} has the label {int(labels.min())}, expected class indices from 0"
                " upwards."
            )
        return labels


def read_batches(
    data: Iterable[Any], device: torch.device | None, model: nn.Module | None = None
) -> Iterator[Batch]:
    """Every batch of `data`, moved to `device`; with None it stays where it is.

    A batch is (input, label), (input, input, label), a dict with the label under one of LABEL_KEYS, a dict of
    Ultralytics with images and boxes, or one of them without the label. The signature of the model's forward
    decides which values are inputs. numpy arrays become tensors, floats in the model's dtype. In a dict of
    tokens without labels, the labels are the tokens, each predicted from those before it.
    """
    arguments = _Arguments.of(model)
    start = 0
    for position, item in enumerate(_reading(data)):
        inputs, labels = _divided(item, arguments, position)
        values = _tensors(inputs, arguments.dtype), _labels(labels, arguments.dtype, position)
        if device is not None:
            values = _map(values, partial(moved, device=device))
        batch = Batch(*values, position, start)
        start += batch.size
        if batch.size:
            yield batch


def with_first(batches: Iterator[Batch]) -> tuple[Batch, Iterator[Batch]]:
    """The first batch, and all batches from the first on."""
    first = next(batches, None)
    if first is None:
        raise no_samples()
    return first, itertools.chain([first], batches)


@dataclass(frozen=True)
class _Arguments:
    """What a model's forward takes."""

    required: int = 1  # positional arguments without a default
    names: frozenset[str] | None = None  # of all arguments; None if it takes any
    dtype: torch.dtype = torch.float32  # of its floating-point parameters

    @staticmethod
    def of(model: nn.Module | None) -> _Arguments:
        if model is None:
            return _Arguments()
        parameters = inspect.signature(model.forward).parameters.values()
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        required = sum(p.default is p.empty for p in positional)
        anything = any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)
        dtypes = (p.dtype for p in model.parameters() if p.is_floating_point())
        names = None if anything else frozenset(p.name for p in parameters)
        return _Arguments(max(required, 1), names, next(dtypes, torch.float32))


def _divided(item: Any, arguments: _Arguments, position: int) -> tuple[Any, Any]:
    """The inputs and the labels of one item of the data; None for no labels."""
    if isinstance(item, Mapping):
        return _divided_dict(item, arguments)
    if isinstance(item, (Tensor, np.ndarray)):
        return item, None
    if not isinstance(item, (tuple, list)) or not item:
        raise FairprunerError(f"Batch {position} is {describe(item)}, expected {FORMS}.")
    numbers = [part for part in item if _holds_numbers(part)]
    item = numbers if len(numbers) > 1 else item  # names and paths beside inputs and labels are left out
    if len(item) == 1:
        return item[0], None
    *inputs, labels = item
    if len(inputs) == 1 and isinstance(inputs[0], (tuple, list)) and _are_images(inputs[0], labels):
        return [list(inputs[0])], [dict(target) for target in labels]  # a list of images is one argument
    if len(inputs) == 1 and isinstance(inputs[0], (tuple, list, Mapping)):
        return inputs[0], labels  # ((input, input), label), as is, or ({name: input}, label)
    if arguments.required >= len(item):
        return list(item), None  # forward requires all of them
    return (inputs[0] if len(inputs) == 1 else inputs), labels


def _divided_dict(item: Mapping[Any, Any], arguments: _Arguments) -> tuple[Any, Any]:
    if all(key in item for key in BOXES):
        return _images_and_boxes(item, arguments.dtype)
    key = next((key for key in LABEL_KEYS if key in item), None)
    # Texts, paths and other columns that are not numbers are not for the model.
    inputs = {k: v for k, v in item.items() if k != key and _holds_numbers(v)}
    labels = own_labels(inputs) if key is None else item[key]
    if arguments.names is not None and len(inputs) == 1 and not arguments.names & set(inputs):
        return next(iter(inputs.values())), labels  # {"image": x, "label": y} for forward(x)
    return inputs, labels


def _images_and_boxes(item: Mapping[Any, Any], dtype: torch.dtype) -> tuple[Tensor, list[dict[str, Any]]]:
    """The images [N, 3, H, W] of a batch of Ultralytics, and for each image the rows of its boxes."""
    images: Tensor = item["img"]
    images = images.to(dtype) / 255 if images.dtype is torch.uint8 else images
    index = item["batch_idx"].flatten()
    rows = {k: v for k, v in item.items() if isinstance(v, Tensor) and k not in ("img", "batch_idx")}
    rows = {k: v for k, v in rows.items() if v.ndim and len(v) == len(index)}
    return images, [{k: v[index == n] for k, v in rows.items()} for n in range(len(images))]


def joined_boxes(batch: Batch) -> dict[str, Any]:
    """The images and boxes of a batch as the dict that a model of Ultralytics computes its losses from."""
    counts = torch.tensor([len(boxes["cls"]) for boxes in batch.labels], device="cpu")
    rows = {key: torch.cat([boxes[key] for boxes in batch.labels]) for key in batch.labels[0]}
    index = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts).float()
    return {"img": batch.inputs, "batch_idx": index.to(batch.inputs.device), **rows}


def _are_images(images: Any, labels: Any) -> bool:
    """Whether a pair is a list of images and a list of dicts with their boxes."""
    listed = isinstance(labels, (tuple, list)) and len(labels) == len(images) > 0
    tensors = all(isinstance(image, (Tensor, np.ndarray)) for image in images)
    return listed and tensors and all(isinstance(target, Mapping) for target in labels)


def _holds_numbers(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_numbers, value))
    return not isinstance(value, (str, bytes)) and value is not None


def _tensors(value: Any, dtype: torch.dtype) -> Any:
    """The same structure with numpy arrays as tensors; numpy's float64 becomes the model's dtype."""
    if isinstance(value, np.ndarray):
        tensor = torch.from_numpy(np.ascontiguousarray(value))
        return tensor.to(dtype) if tensor.is_floating_point() else tensor
    if isinstance(value, Mapping):
        return {k: _tensors(v, dtype) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_tensors(v, dtype) for v in value]
    return value


def _labels(labels: Any, dtype: torch.dtype, position: int) -> Any:
    """The labels as a tensor; a list of dicts with boxes, and None, stay what they are."""
    if labels is None or (isinstance(labels, list) and labels and all(isinstance(t, dict) for t in labels)):
        return labels
    try:
        found = _tensors(labels, dtype) if isinstance(labels, np.ndarray) else labels
        return found if isinstance(found, Tensor) else torch.as_tensor(found, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise FairprunerError(
            f"Batch {position} has labels of type {type(labels).__name__}, expected a tensor: {error}"
        ) from error


def _reading(data: Iterable[Any]) -> Iterator[Any]:
    """The items of the data; a failure of the user's loader is reported with its place."""
    position = 0
    try:
        for item in [data] if isinstance(data, (Tensor, np.ndarray)) else data:  # a tensor is one batch
            yield item
            position += 1
    except FairprunerError:
        raise
    except Exception as error:
        raise FairprunerError(
            f"The data failed at batch {position}: {_type_name(data)} raised {type(error).__name__}: {error}"
        ) from error


def _type_name(data: Any) -> str:
    """The type of the caller's data."""
    return type(data.original if isinstance(data, SameOrder) else data).__name__


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, LayerCall):
        return value.mapped(change)
    if isinstance(value, Mapping):
        return {k: _map(v, change) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_map(v, change) for v in value]
    return value


def check_rereadable(data: Any, reason: str, *, name: str = "data") -> None:
    """Refuse data that can be read only once; `reason` names what reads it again."""
    if isinstance(data, Iterator):
        raise FairprunerError(
            f"The {name} is a {type(data).__name__}, which can be read once, and {reason}: give a loader or a"
            " list of batches."
        )


def check_same_samples(first: int, again: int) -> None:
    """Refuse data that gave other numbers of samples in two passes."""
    if first != again:
        raise read_once(f"{again} of {first}")


def read_once(found: str = "no") -> FairprunerError:
    """The error for data that has fewer samples in a later pass."""
    return FairprunerError(
        f"The data has {found} samples in a later pass, so it can be read only once, like a loader over a"
        " generator: give data that starts anew in every pass, such as a list of batches."
    )


def no_samples(name: str = "data") -> FairprunerError:
    """The error for data that yields no batch."""
    return FairprunerError(
        f"The {name} holds no samples: give a loader, or a list of batches, that yields at least one."
    )


def in_halves(batches: Iterator[Batch]) -> Iterator[tuple[int, Batch]]:
    """Each batch with the half of the data (0 or 1) that it belongs to; a single batch is split in two."""
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
    """The model's output on a batch; a failure is reported in one sentence that shows the batch."""
    try:
        return call(model, batch.inputs)
    except FairprunerError:
        raise
    except Exception as error:
        opening, step = (
            f"Batch {batch.position} does not fit the model",
            "Every item of the data must be a batch: wrap a dataset of single samples in"
            " torch.utils.data.DataLoader.",
        )
        if is_out_of_memory(error):
            opening, step = f"Memory ran out on batch {batch.position}", "Give smaller batches."
        raise FairprunerError(
            f"{opening}: {type(model).__name__} called with {describe(batch.inputs)} raised"
            f" {type(error).__name__}: {error}. {step}"
        ) from error
