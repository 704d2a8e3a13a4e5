"""Prune a detector of torchvision's form: a list of images and boxes in, a dict of losses in training mode.

Scoring runs the detector with its own losses while its norms stay frozen. This small detector predicts one
box for each cell of a grid; torchvision's Faster R-CNN, RetinaNet, FCOS and SSD are called in the same way.

python examples/detection.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fairpruner as fp

Targets = list[dict[str, Tensor]]


class Detector(nn.Module):
    """An objectness score and a box (x1, y1, x2, y2 in [0, 1]) for each cell of an 8 x 8 grid."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        )
        self.head = nn.Conv2d(32, 5, 1)

    def forward(self, images: list[Tensor], targets: Targets | None = None) -> object:
        batch = torch.stack([F.adaptive_avg_pool2d(image, 32) for image in images])
        cells = self.head(self.backbone(batch)).flatten(2).mT  # [N, 64, 5]
        score, boxes = cells[..., 0], cells[..., 1:].sigmoid()
        if not self.training:
            best = score.argmax(1)
            return [
                {"boxes": boxes[i, cell][None], "scores": score[i, cell].sigmoid()[None]}
                for i, cell in enumerate(best.tolist())
            ]
        assert targets is not None
        wanted = torch.stack([target["boxes"][0] for target in targets])  # [N, 4]
        column, row = ((wanted[:, :2] + wanted[:, 2:]) * 4).long().clamp(max=7).unbind(1)
        cell = row * 8 + column  # the cell of each box's centre
        return {
            "objectness": F.cross_entropy(score, cell),
            "box": F.l1_loss(boxes[torch.arange(len(boxes)), cell], wanted),
        }


def main() -> None:
    torch.manual_seed(0)
    model = Detector().eval()
    data = []
    for _ in range(4):
        images = [torch.rand(3, 48 + 8 * i, 64) for i in range(4)]  # of several sizes
        corners = torch.rand(4, 2) * 0.5
        data.append((images, [{"boxes": torch.cat([c, c + 0.4])[None]} for c in corners]))

    spaces = fp.discover(model, ([torch.rand(3, 64, 64)],))
    scores = fp.score(model, data, spaces=spaces)
    print(scores.settings["why"])
    plan = fp.allocate(scores, keep=fp.Budget("flops", 0.5))
    small = fp.cut(model, plan)
    print(f"{plan.share('flops'):.0%} of the FLOPs, boxes {list(small(data[0][0])[0]['boxes'].shape)}")


if __name__ == "__main__":
    main()
