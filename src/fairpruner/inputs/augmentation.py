"""Random changes of training images that keep their class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from fairpruner.errors import FairprunerError, unknown
from fairpruner.models.calling import describe

MARGIN = 8  # a crop moves an image by up to an eighth of its sides


def _crop(image: Tensor) -> Tensor:
    """The image, [C, H, W], moved by a random number of pixels; pixels from outside are zero."""
    height, width = image.shape[1:]
    down, right = height // MARGIN, width // MARGIN
    top, left = int(torch.randint(2 * down + 1, ())), int(torch.randint(2 * right + 1, ()))
    return F.pad(image, (right, right, down, down))[:, top : top + height, left : left + width]


def _flip(image: Tensor) -> Tensor:
    """The image, [C, H, W], or with equal chance its mirror image."""
    return image.flip(2) if torch.rand(()) < 0.5 else image


AUGMENTATIONS: dict[str, Callable[[Tensor], Tensor]] = {"crop": _crop, "flip": _flip}


class Augmented(Dataset[tuple[Tensor, Any]]):
    """A dataset of (image, label) pairs whose images are changed at random, from torch's random state.

    >>> from torch.utils.data import TensorDataset
    >>> images = Augmented(TensorDataset(torch.rand(2, 3, 16, 16), torch.arange(2)), ["crop", "flip"])
    >>> images[1][0].shape, int(images[1][1])
    (torch.Size([3, 16, 16]), 1)
    """

    def __init__(self, dataset: Dataset[Any], names: Sequence[str]) -> None:
        for name in names:
            if name not in AUGMENTATIONS:
                raise unknown("augmentation", name, AUGMENTATIONS)
        self._dataset, self._changes = dataset, [AUGMENTATIONS[name] for name in names]

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __getitem__(self, position: int) -> tuple[Tensor, Any]:
        image, label = self._dataset[position]
        if image.ndim != 3:
            raise FairprunerError(
                f"Sample {position} is {describe(image)}, expected an image of shape [channels, height,"
                " width] to augment: leave out --augment."
            )
        for change in self._changes:
            image = change(image)
        return image, label
