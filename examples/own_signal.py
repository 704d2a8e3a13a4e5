"""Write your own signals, one from weights and one from activations, and use them with the built-in ones.

python examples/own_signal.py
"""

from __future__ import annotations

import torch
from torch import nn

import fairpruner as fp


@fp.removal_signal("norm_scale")
def norm_scale(space: fp.UnitSpace, model: nn.Module) -> torch.Tensor:
    """Network slimming: the absolute scale of the batch norm after each unit, [J]; small = remove first."""
    return model.get_submodule(f"{space.name}_norm").get_parameter("weight").abs()


@fp.removal_signal("silence")
class Silence:
    """The share of samples on which a unit is not zero; units that are mostly zero are removed first."""

    def __init__(self, space: fp.UnitSpace) -> None:
        self.active, self.samples = torch.zeros(space.size), 0

    def update(self, activation: torch.Tensor, labels: torch.Tensor) -> None:  # [N, J, F], [N]
        self.active += (activation > 0).any(2).sum(0).cpu()  # the activation is on the model's device
        self.samples += len(activation)

    def compute(self) -> torch.Tensor:  # [J]
        return self.active / self.samples


class Net(nn.Module):
    """Two normalised hidden spaces of 16 units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.second, self.second_norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [N, 8] -> [N, 3]
        x = torch.relu(self.first_norm(self.first(x)))
        logits: torch.Tensor = self.head(torch.relu(self.second_norm(self.second(x))))
        return logits


def main() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    for norm in (model.first_norm, model.second_norm):
        nn.init.uniform_(norm.weight, 0, 1)
    data = [(torch.randn(32, 8), torch.arange(32) % 3) for _ in range(4)]

    # All signals share one forward and backward over the data.
    scores = fp.score(model, data, removal=["norm_scale", "silence", "l1"])
    for signal in scores.removals:
        plan = fp.allocate(scores.using(removal=signal), keep=fp.Budget("units", 0.75))
        print(f"{signal} removes {plan.removed}")


if __name__ == "__main__":
    main()
