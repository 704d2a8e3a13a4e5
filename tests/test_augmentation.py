"""Random changes of training images."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from fairpruner.errors import FairprunerError
from fairpruner.inputs.augmentation import Augmented

IMAGES = torch.arange(1.0, 1 + 2 * 3 * 16 * 24).view(2, 3, 16, 24)


def test_a_flip_is_the_image_or_its_mirror_image() -> None:
    torch.manual_seed(0)
    images = Augmented(TensorDataset(IMAGES, torch.arange(2)), ["flip"])
    found = [images[1][0] for _ in range(40)]
    mirrored = [torch.equal(image, IMAGES[1].flip(2)) for image in found]
    assert all(
        flipped or torch.equal(image, IMAGES[1]) for flipped, image in zip(mirrored, found, strict=True)
    )
    assert 8 < sum(mirrored) < 32


def test_a_crop_moves_by_up_to_an_eighth_and_brings_in_zeros() -> None:
    torch.manual_seed(0)
    images = Augmented(TensorDataset(IMAGES, torch.arange(2)), ["crop"])
    moves = set()
    for _ in range(300):
        image, label = images[0]
        assert (image.shape, int(label)) == (IMAGES[0].shape, 0)
        moves.add(
            next(
                (down, right)
                for down in range(-2, 3)
                for right in range(-3, 4)
                if torch.equal(image, _moved(IMAGES[0], down, right))
            )
        )
    assert moves == {(down, right) for down in range(-2, 3) for right in range(-3, 4)}


def _moved(image: torch.Tensor, down: int, right: int) -> torch.Tensor:
    moved = torch.zeros_like(image)
    height, width = image.shape[1:]
    moved[:, max(down, 0) : height + min(down, 0), max(right, 0) : width + min(right, 0)] = image[
        :, max(-down, 0) : height - max(down, 0), max(-right, 0) : width - max(right, 0)
    ]
    return moved


def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(FairprunerError, match=r"Sample 0 is float32\[5\], expected an image"):
        Augmented(TensorDataset(torch.rand(2, 5), torch.arange(2)), ["flip"])[0]
    with pytest.raises(FairprunerError, match="augmentation"):
        Augmented(TensorDataset(torch.rand(2, 5), torch.arange(2)), ["shear"])
