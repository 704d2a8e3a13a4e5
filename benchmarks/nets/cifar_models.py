"""The residual networks for CIFAR-10 by He et al."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


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
    """He et al.'s network for 32x32 images, of depth 8, 14, 20, …."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        blocks = (depth - 2) // 6  # of each width
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(CifarBlock(16, 16, 1) for _ in range(blocks)))
        self.layer2 = nn.Sequential(*(CifarBlock(32 if i else 16, 32, 1 if i else 2) for i in range(blocks)))
        self.layer3 = nn.Sequential(*(CifarBlock(64 if i else 32, 64, 1 if i else 2) for i in range(blocks)))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))
