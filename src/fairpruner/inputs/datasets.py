"""Calibration data by name: a folder of images, an .npz file, or a function that yields batches.

Image folders are read here and not by torchvision's ImageFolder, which decodes any file without bounds (see
`read_image`) and would make torchvision a requirement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from fairpruner.core.arrays import Ints
from fairpruner.errors import FairprunerError, check_whole_number
from fairpruner.inputs.batches import no_samples, read_batches
from fairpruner.inputs.data_files import MOST_CLASSES, read_arrays, read_image
from fairpruner.inputs.sources import Transform, importable_from, resolve
from fairpruner.models.calling import tensors_of

IMAGES = {".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
ARCHIVED = "__MACOSX"  # the folder that macOS adds to its archives

END = object()  # of a loader


@dataclass(frozen=True)
class Sampling:
    """How many samples to take, in batches of what size, and the seed of the choice."""

    samples: int | None = None  # None: all of them
    batch_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("samples", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise FairprunerError(f"{name} is {value}, expected at least 1.")
        check_whole_number("seed", self.seed, at_least=0)


@dataclass(frozen=True)
class Preprocessing:
    """How images become tensors: resized and cropped to `size`, scaled to [0, 1], then (x - mean) / std."""

    size: int | None = None  # None: images keep their size
    mean: Sequence[float] = (0.0,)  # one number for all channels, or one each
    std: Sequence[float] = (1.0,)

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise FairprunerError(f"size is {self.size}, expected at least 1 pixel.")
        if min(self.std, default=0) <= 0:
            raise FairprunerError(f"std is {list(self.std)}, expected positive numbers.")

    def __call__(self, image: Any) -> torch.Tensor:
        """A PIL image → [3, H, W]: the shorter side becomes `size`, then the centre is cut out."""
        if self.size is not None:
            scale = self.size / min(image.size)
            image = image.resize([max(self.size, round(side * scale)) for side in image.size])
            left, top = ((side - self.size) // 2 for side in image.size)
            image = image.crop((left, top, left + self.size, top + self.size))
        return self.normalise(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None])[0]

    def normalise(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 [N, C, …] → float32 of the same shape."""
        for name, values in (("mean", self.mean), ("std", self.std)):
            if pixels.ndim < 2 or len(values) not in (1, pixels.shape[1]):
                raise FairprunerError(
                    f"{name} has {len(values)} values for data of shape {list(pixels.shape)}, expected 1 or"
                    " one per channel."
                )
        shape = (-1, *[1] * (pixels.ndim - 2))  # [C or 1, 1, …]
        mean, std = (torch.tensor(values, device="cpu").reshape(shape) for values in (self.mean, self.std))
        return (pixels.float() / 255 - mean) / std


def load_data(
    source: str, sampling: Sampling, preprocessing: Preprocessing, *, transform: Transform | None = None
) -> Iterable[Any]:
    """Batches that can be iterated many times, from a source by name.

    The source is a folder with one subfolder of images for each class, an .npz file with arrays x and y, or
    "file.py:function". Images are preprocessed by `transform`, or by `preprocessing` if there is none; uint8
    arrays always by `preprocessing`.
    """
    path = Path(source)
    if path.is_dir():
        return _images(path, sampling, transform or preprocessing)
    if path.suffix == ".npz":
        return _arrays(path, sampling, preprocessing)
    if ":" not in source:
        raise FairprunerError(
            f"Data {source!r} is neither a folder that exists, nor an .npz file, nor a text file for an hf:"
            " model, nor package.module:function or path/to/file.py:function."
        )
    return _Loader(resolve(source), source, sampling.samples)


def draw_balanced(labels: Ints, samples: int | None, seed: int) -> Ints:
    """The positions of `samples` items, taken from the classes in turn, so that classes are balanced.

    >>> sorted(np.array([0, 0, 0, 0, 1])[draw_balanced(np.array([0, 0, 0, 0, 1]), 3, seed=0)].tolist())
    [0, 0, 1]
    """
    mixed = np.random.default_rng(seed).permutation(labels.size)
    grouped = mixed[np.argsort(labels[mixed], kind="stable")]  # [n] class after class
    _, first, size = np.unique(labels[grouped], return_index=True, return_counts=True)
    # [n] 0 for the first item of each class, 1 for the second, …
    turn = np.arange(labels.size) - np.repeat(first, size)
    return grouped[np.argsort(turn, kind="stable")][:samples]


def _batches(dataset: Dataset[Any], labels: Ints, sampling: Sampling) -> Iterable[Any]:
    """Batches of a balanced choice of samples."""
    chosen = draw_balanced(labels, sampling.samples, sampling.seed).tolist()
    return DataLoader(Subset(dataset, chosen), sampling.batch_size, collate_fn=_stack)


def _stack(items: list[tuple[torch.Tensor, Any]]) -> Any:
    """One batch, refused if its samples differ in shape."""
    shapes = sorted({tuple(x.shape) for x, _ in items})
    if len(shapes) > 1:
        raise FairprunerError(
            f"Images of one batch have {len(shapes)} different shapes ({shapes[0]} and {shapes[1]} among"
            " them): give --size to make them equal."
        )
    return default_collate(items)


def _arrays(path: Path, sampling: Sampling, preprocessing: Preprocessing) -> Iterable[Any]:
    """Batches from an .npz file."""
    x, y = read_arrays(path, "x", "y")
    if x.ndim < 1 or y.ndim != 1 or y.dtype.kind not in "iu" or len(y) != len(x) or not len(x):
        raise FairprunerError(
            f"Data {path} has x of shape {list(x.shape)} and y {y.dtype}{list(y.shape)}, expected one"
            " whole-number label for each of at least one sample."
        )
    if int(y.max()) >= MOST_CLASSES or int(y.min()) <= -MOST_CLASSES:
        raise FairprunerError(
            f"Data {path} has labels from {y.min()} to {y.max()}, expected class indices below"
            f" {MOST_CLASSES:,}."
        )
    if x.dtype == np.uint8:
        inputs = preprocessing.normalise(torch.from_numpy(x))
    elif x.dtype.kind == "f":
        if preprocessing != Preprocessing():
            raise FairprunerError(
                f"Data {path} has x of type {x.dtype}, which is used as it is: leave out --mean and --std, or"
                " save x as uint8 in 0..255."
            )
        inputs = torch.from_numpy(x.astype(np.float32))
    else:
        raise FairprunerError(
            f"Data {path} has x of type {x.dtype}, expected numbers with a decimal point (float16, float32,"
            " float64), or uint8 in 0..255."
        )
    labels = y.astype(np.int64)
    return _batches(TensorDataset(inputs, torch.from_numpy(labels)), labels, sampling)


def _images(folder: Path, sampling: Sampling, transform: Transform) -> Iterable[Any]:
    """Batches from a folder; the label of an image is the position of its class among the sorted ones."""
    files = [
        (file, label)
        for label, name in enumerate(class_names(folder))
        for file in sorted((folder / name).rglob("*"))
        if file.suffix.lower() in IMAGES and _is_shown(file.relative_to(folder)) and file.is_file()
    ]
    if not files:
        raise FairprunerError(
            f"Data folder {folder} holds no class subfolder with images ({' '.join(sorted(IMAGES))}):"
            " expected folder/class/image.jpg."
        )
    return _batches(_ImageFiles(files, transform), np.array([label for _, label in files]), sampling)


def class_names(folder: Path) -> list[str]:
    """The sorted names of the class subfolders of an image folder."""
    return sorted(child.name for child in folder.iterdir() if child.is_dir() and _is_shown(Path(child.name)))


def _is_shown(path: Path) -> bool:
    """Whether no part of a path is hidden: tools leave folders such as .ipynb_checkpoints beside classes."""
    return not any(part.startswith(".") or part == ARCHIVED for part in path.parts)


@dataclass(frozen=True)
class _ImageFiles(Dataset[tuple[torch.Tensor, int]]):
    files: Sequence[tuple[Path, int]]  # each with its label
    transform: Transform

    def __getitem__(self, position: int) -> tuple[torch.Tensor, int]:
        file, label = self.files[position]
        return self.transform(read_image(file)), label


@dataclass(frozen=True)
class _Loader:
    """The batches of a user's function, which is called again for every pass.

    A pass ends after the batch with which `samples` samples are reached.
    """

    function: Callable[[], Iterable[Any]]
    source: str
    samples: int | None

    def __iter__(self) -> Iterator[Any]:
        try:
            with importable_from(self.source):
                batches = iter(self.function())
        except Exception as error:
            raise FairprunerError(
                f"Data {self.source!r} gave no batches: {type(error).__name__}: {error}"
            ) from error
        seen = 0
        while True:
            with importable_from(self.source):  # a generator may import modules between its batches
                batch = next(batches, END)
            if batch is END:
                return
            yield batch
            seen += _length(batch)
            if self.samples is not None and seen >= self.samples:
                return


def _length(batch: Any) -> int:
    """The number of samples of a batch."""
    return next((len(tensor) for tensor in tensors_of(batch) if tensor.ndim), 1)


def example_of(data: Iterable[Any], device: torch.device, model: nn.Module | None = None) -> Any:
    """The first sample of the data, as an example for `discover`."""
    first = next(read_batches(data, device, model), None)
    if first is None:
        raise no_samples()
    return first.rows(0, 1).inputs
