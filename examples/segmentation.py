"""Prune a segmentation network: the labels are maps of classes, and a pixel is a sample.

python examples/segmentation.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fairpruner as fp


class Segmenter(nn.Module):
    """An encoder, a decoder and a skip connection; logits [N, classes, H, W]."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.head = nn.Conv2d(16, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        skip = self.stem(image)
        logits: Tensor = self.head(torch.relu(self.up(self.down(skip)) + skip))
        return logits


def main() -> None:
    torch.manual_seed(0)
    model = Segmenter().eval()
    images = torch.rand(16, 3, 32, 32)
    labels = (images.mean(1) * 4).long()  # [N, H, W]; a real data set marks unlabelled pixels by 255
    data = list(zip(images.split(4), labels.split(4), strict=True))

    scores = fp.score(model, data)
    print(scores.settings["why"])
    plan = fp.allocate(scores, keep=fp.Budget("flops", 0.5))
    small = fp.repair(fp.cut(model, plan), model, plan, data)
    print(f"{plan.share('flops'):.0%} of the FLOPs, logits {list(small(images[:1]).shape)}")


if __name__ == "__main__":
    main()
