"""A net and data that every process of a test's job builds alike."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 10),
        nn.ReLU(),
        nn.Linear(10, 3),
    ).double()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(12, 1, 8, 8, generator=generator, dtype=torch.float64), torch.arange(12) % 3)
        for _ in range(count)
    ]
