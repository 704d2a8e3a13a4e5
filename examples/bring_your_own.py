"""Prune your own network, with skip connections and functional calls, without describing its structure.

python examples/bring_your_own.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

import fairpruner as fp

Batch = tuple[torch.Tensor, torch.Tensor]


class SkipNet(nn.Module):
    """A convolutional network that concatenates earlier features, as U-Nets and DenseNets do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.deep = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.mix = nn.Conv2d(32 + 16, 32, 1)
        self.head = nn.Linear(32 * 4 * 4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [N, 1, 8, 8] -> [N, 2]
        early = F.relu(self.stem(x))
        late = F.relu(self.norm(self.deep(early)))
        both = torch.cat([late, F.avg_pool2d(early, 2)], dim=1)
        logits: torch.Tensor = self.head(F.relu(self.mix(both)).flatten(1))
        return logits


def batches(count: int, seed: int) -> list[Batch]:
    """Batches of noisy images with horizontal or vertical stripes, and the direction as the label."""
    noise = torch.Generator().manual_seed(seed)

    def draw() -> Iterator[Batch]:
        stripes = (torch.arange(8) % 2).float().expand(64, 1, 8, 8)
        for _ in range(count):
            y = torch.randint(2, (64,), generator=noise)
            x = torch.where((y == 1)[:, None, None, None], stripes, stripes.mT) + 0.5 * torch.randn(
                64, 1, 8, 8, generator=noise
            )
            yield x, y

    return list(draw())


def accuracy(model: nn.Module, data: list[Batch]) -> float:
    with torch.no_grad():
        return float(torch.cat([model(x).argmax(1) == y for x, y in data]).double().mean())


def main() -> None:
    torch.manual_seed(0)
    model, train, test = SkipNet(), batches(30, seed=1), batches(10, seed=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for x, y in train:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()

    spaces = fp.discover(model, train[0][0][:1])
    for space in spaces:
        print(f"{space.name}: {space.size} units of kind {space.kind}")
    for name, reason in spaces.left_out.items():
        print(f"{name} stays: {reason}")

    scores = fp.score(model, train, spaces=spaces)
    for plan in fp.sweep(scores, "params", [0.75, 0.5, 0.25]):
        small = fp.cut(model, plan)
        print(
            f"{plan.share('params'):.0%} of the params, {plan.share('flops'):.0%} of the FLOPs: accuracy"
            f" {accuracy(model, test):.1%} -> {accuracy(small, test):.1%}"
        )

    with tempfile.TemporaryDirectory() as folder:
        fp.save(small, plan, folder)
        # the architecture is enough: the weights come from the folder
        again = fp.load(folder, build=SkipNet)
        assert torch.equal(again(test[0][0]), small(test[0][0]))
    print(
        f"Saved and loaded again, bit for bit: {fp.count_params(again):,} params of"
        f" {fp.count_params(model):,}."
    )


if __name__ == "__main__":
    main()
