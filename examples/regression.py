"""Prune a network that predicts numbers: the default loss is the mean squared error.

python examples/regression.py
"""

from __future__ import annotations

import torch
from torch import nn

import fairpruner as fp


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)).eval()
    inputs = torch.randn(512, 8)
    targets = torch.stack([inputs[:, :4].sum(1), inputs[:, 4:].square().sum(1)], 1)  # [N, 2] numbers
    data = list(zip(inputs.split(64), targets.split(64), strict=True))

    scores = fp.score(model, data)
    print(scores.settings["why"])
    plan = fp.allocate(scores, keep=fp.Budget("params", 0.4))
    small = fp.repair(fp.cut(model, plan), model, plan, data)
    with torch.no_grad():
        error = (small(inputs) - model(inputs)).square().mean() / model(inputs).var()
    print(f"{plan.share('params'):.0%} of the parameters, {error:.1%} of the outputs' variance lost")


if __name__ == "__main__":
    main()
