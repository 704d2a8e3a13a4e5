"""Images of CIFAR-10 and ImageNet: of the shared folder, or downloaded by torchvision where there is none.

Downloads are kept in the cache of the user. torchvision cannot download ImageNet. In its place comes
Imagenette, which has ten of the 1,000 classes.
"""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.torchvision_shim import torchvision
from torch import Tensor, nn

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fairpruner-benchmarks"
MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
IMAGENETTE = (0, 217, 482, 491, 497, 566, 569, 571, 574, 701)  # its classes among those of ImageNet
SIDE = 256  # pixels of an image of the ImageNet sample


@lru_cache(maxsize=2)
def cifar10(split: str, shared: Path) -> tuple[Tensor, Tensor]:
    """Normalised images [N, 3, 32, 32] and labels [N] of `test`, `train10k` or `train`."""
    reader = _reader(shared)
    images, labels = reader.cifar10(split) if reader else _downloaded_cifar10(split)
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    return (pixels - MEAN) / STD, torch.tensor(labels, dtype=torch.int64)


def imagenet_sample(shared: Path) -> tuple[Tensor, Tensor]:
    """1,000 images [N, 3, 256, 256] of bytes, and labels [N], class by class."""
    reader = _reader(shared)
    images, labels = reader.imagenet_sample()[:2] if reader else _downloaded_imagenette()
    return torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels)


def some(
    data: tuple[Tensor, Tensor], count: int, batch: int = 250, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Batches of `count` samples drawn at random."""
    chosen = torch.randperm(len(data[1]), generator=torch.Generator().manual_seed(seed))[:count]
    return list(zip(data[0][chosen].split(batch), data[1][chosen].split(batch), strict=True))


def top1(model: nn.Module, data: tuple[Tensor, Tensor], batch: int = 250) -> float:
    """Accuracy in percent.

    A model with batch norms is frozen first, which merges them into convolutions: it computes the same,
    faster. Others gain nothing, and traced transformers are not freed again.
    """
    run: Any = model.eval()
    with torch.no_grad():
        if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
            traced = torch.jit.trace(run, data[0][:batch])
            run = torch.jit.optimize_for_inference(torch.jit.freeze(traced))
        right = sum(
            int((run(x).argmax(1) == y).sum())
            for x, y in zip(data[0].split(batch), data[1].split(batch), strict=True)
        )
    return 100 * right / len(data[1])


def _reader(shared: Path) -> Any:
    """The functions that read the shared folder, or None if there is no such folder."""
    path = shared / "data" / "load.py"
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location("load", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _downloaded_cifar10(split: str) -> tuple[Any, Any]:
    """Images [N, 32, 32, 3] and labels [N]; `train10k` has the first 1,000 of each class."""
    data = torchvision.datasets.CIFAR10(CACHE / "torchvision", train=split != "test", download=True)
    labels = np.array(data.targets)
    chosen = np.arange(len(labels))
    if split == "train10k":
        chosen = np.sort(np.concatenate([np.flatnonzero(labels == label)[:1000] for label in range(10)]))
    return data.data[chosen], labels[chosen]


def _downloaded_imagenette() -> tuple[Any, Any]:
    """The first 100 training images of each class, their middle squares [N, 256, 256, 3], and labels [N]."""
    data = torchvision.datasets.Imagenette(
        CACHE / "torchvision",
        size="320px",
        download=True,
        transform=torchvision.transforms.Compose(
            [torchvision.transforms.Resize(SIDE), torchvision.transforms.CenterCrop(SIDE)]
        ),
        target_transform=IMAGENETTE.__getitem__,
    )
    of_files = np.array([label for _, label in data._samples])
    chosen = np.concatenate([np.flatnonzero(of_files == label)[:100] for label in range(len(IMAGENETTE))])
    images, labels = zip(*(data[place] for place in chosen), strict=True)
    return np.stack([np.asarray(image) for image in images]), np.array(labels)
