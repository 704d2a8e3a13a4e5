"""The CIFAR-10 residual networks of the shared weights, and the images to go with them."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


class CifarBlock(nn.Module):
    """Two 3x3 convolutions; where the width changes, a shortcut that drops every second pixel and pads
    channels (option A).
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.pad = (width - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad)) if self.pad else x
        return F.relu(out + shortcut)


class CifarResNet(nn.Module):
    """He et al.'s network for 32x32 images, of depth 6 blocks + 2."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(CifarBlock(16, 16, 1) for _ in range(blocks)))
        self.layer2 = nn.Sequential(*(CifarBlock(32 if i else 16, 32, 1 if i else 2) for i in range(blocks)))
        self.layer3 = nn.Sequential(*(CifarBlock(64 if i else 32, 64, 1 if i else 2) for i in range(blocks)))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))


def resnet(depth: int, shared: Path) -> nn.Module:
    """ResNet-20 or ResNet-56 with its trained weights."""
    model = CifarResNet((depth - 2) // 6)
    model.load_state_dict(load_file(shared / "weights" / f"cifar10_resnet{depth}.safetensors"))
    return model.eval()


@lru_cache(maxsize=2)
def cifar10(split: str, shared: Path) -> tuple[Tensor, Tensor]:
    """Normalised images [N, 3, 32, 32] and labels [N] of `test`, `train10k` or `train`."""
    spec = importlib.util.spec_from_file_location("load", shared / "data" / "load.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    images, labels = module.cifar10(split)
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    return (pixels - MEAN) / STD, torch.tensor(labels, dtype=torch.int64)


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
