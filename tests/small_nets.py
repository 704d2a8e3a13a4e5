"""Hand-made nets with hand-written spaces: an oracle for scoring that owes nothing to discovery."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairpruner.core.cost_model import CostModel
from fairpruner.core.spaces import Spaces
from fairpruner.core.units import Role, Slice, UnitSpace
from fairpruner.models.fingerprint import fingerprint

Part = (
    tuple[str, int, Role] | tuple[str, int, Role, Sequence[int]]
)  # tensor, dim, role, owner where it is not 0, 1, 2, …

CLASSES = 3


def space(name: str, size: int, *parts: Part) -> UnitSpace:
    slices = tuple(
        Slice(tensor, dim, np.asarray(owner[0] if owner else np.arange(size), dtype=np.int64), role)
        for tensor, dim, role, *owner in parts
    )
    return UnitSpace(name, "channel", size, slices)


def spaces_of(model: nn.Module, *spaces: UnitSpace) -> Spaces:
    return Spaces(spaces, {}, CostModel((), (), ()), fingerprint(model))


def mlp() -> tuple[nn.Module, Spaces]:
    """5 -> 6 -> 4 -> 3, called with [N, 5]."""
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, CLASSES))
    first = space("0", 6, ("0.weight", 0, "write"), ("0.bias", 0, "carry"), ("2.weight", 1, "read"))
    second = space("2", 4, ("2.weight", 0, "write"), ("2.bias", 0, "carry"), ("4.weight", 1, "read"))
    return model, spaces_of(model, first, second)


def convnet() -> tuple[nn.Module, Spaces]:
    """Two convolutions, a batch norm and a flattened 2 x 2 map, called with [N, 2, 4, 4]."""
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 5, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(20, CLASSES),
    )
    bn = model[1]
    assert isinstance(bn, nn.BatchNorm2d)
    assert bn.running_mean is not None
    assert bn.running_var is not None
    bn.running_mean.uniform_(-0.5, 0.5)
    bn.running_var.uniform_(0.5, 2)
    nn.init.uniform_(bn.weight, 0.5, 2)
    nn.init.uniform_(bn.bias, -0.5, 0.5)
    carried: list[Part] = [
        (f"1.{name}", 0, "carry") for name in ("weight", "bias", "running_mean", "running_var")
    ]
    first = space("0", 4, ("0.weight", 0, "write"), ("0.bias", 0, "carry"), *carried, ("3.weight", 1, "read"))
    second = space(
        "3",
        5,
        ("3.weight", 0, "write"),
        ("3.bias", 0, "carry"),
        ("6.weight", 1, "read", np.repeat(np.arange(5), 4)),
    )
    return model, spaces_of(model, first, second)


class Residual(nn.Module):
    """x + block(x) on a stream of 4 channels, which the block's one convolution both reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 1, bias=False)
        self.block = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.block(x).tanh()
        return self.head(x.mean((2, 3)))


def residual() -> tuple[nn.Module, Spaces]:
    model = Residual()
    stream = space(
        "stem",
        4,
        ("stem.weight", 0, "write"),
        ("block.weight", 1, "read"),
        ("block.weight", 0, "write"),
        ("head.weight", 1, "read"),
    )
    return model, spaces_of(model, stream)


def grouped() -> tuple[nn.Module, Spaces]:
    """6 channels read by a convolution of 2 groups: unit u is channel u and channel u + 3."""
    model = nn.Sequential(
        nn.Conv1d(2, 6, 3), nn.ReLU(), nn.Conv1d(6, 4, 2, groups=2), nn.Flatten(), nn.Linear(8, CLASSES)
    )
    both = space(
        "0",
        3,
        ("0.weight", 0, "write", [0, 1, 2, 0, 1, 2]),
        ("0.bias", 0, "carry", [0, 1, 2, 0, 1, 2]),
        ("2.weight", 1, "read"),
    )
    return model, spaces_of(model, both)


class Functional(nn.Module):
    """Bare parameters in functional calls: conv1d by keyword, then `x @ w`, `addmm` and `x @ w.t()`."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 2, 3))
        self.left = nn.Parameter(torch.randn(4, 5))
        self.middle = nn.Parameter(torch.randn(5, 5))
        self.bias = nn.Parameter(torch.randn(5))
        self.last = nn.Parameter(torch.randn(CLASSES, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv1d(input=x, weight=self.kernel).relu().mean(2)
        x = (x @ self.left).tanh()
        x = torch.addmm(self.bias, x, self.middle).relu()
        return x @ self.last.t()


def functional() -> tuple[nn.Module, Spaces]:
    model = Functional()
    first = space("kernel", 4, ("kernel", 0, "write"), ("left", 0, "read"))
    second = space("left", 5, ("left", 1, "write"), ("middle", 0, "read"))
    third = space("middle", 5, ("middle", 1, "write"), ("bias", 0, "carry"), ("last", 1, "read"))
    return model, spaces_of(model, first, second, third)


def parametrized() -> tuple[nn.Module, Spaces]:
    """The reading weight is computed on the fly, so that only its module can be watched."""
    model = nn.Sequential(
        nn.Linear(5, 6), nn.ReLU(), nn.utils.parametrizations.weight_norm(nn.Linear(6, CLASSES))
    )
    first = space(
        "0",
        6,
        ("0.weight", 0, "write"),
        ("0.bias", 0, "carry"),
        ("2.parametrizations.weight.original1", 1, "read"),
    )
    return model, spaces_of(model, first)


class Shared(nn.Module):
    """One linear map applied twice to 4 units."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 4)
        self.again = nn.Linear(4, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x).relu()
        x = self.again(self.again(x).relu()).relu()
        return self.head(x)


def shared() -> tuple[nn.Module, Spaces]:
    model = Shared()
    one = space(
        "inner",
        4,
        ("inner.weight", 0, "write"),
        ("inner.bias", 0, "carry"),
        ("again.weight", 0, "write"),
        ("again.bias", 0, "carry"),
        ("head.weight", 1, "read"),
        ("again.weight", 1, "read"),
    )
    return model, spaces_of(model, one)


SHAPES = {
    "mlp": (5,),
    "convnet": (2, 4, 4),
    "residual": (2, 4, 4),
    "grouped": (2, 5),
    "functional": (2, 6),
    "parametrized": (5,),
    "shared": (5,),
}
NETS = {
    "mlp": mlp,
    "convnet": convnet,
    "residual": residual,
    "grouped": grouped,
    "functional": functional,
    "parametrized": parametrized,
    "shared": shared,
}


def build(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Spaces]:
    """One of the nets, in eval mode and double precision, with its spaces."""
    torch.manual_seed(1)
    model, spaces = NETS[name]()
    return model.to(dtype).eval(), spaces


def samples(
    name: str, count: int, *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Inputs whose mean depends on the class, and their labels, in random order."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    labels = labels[torch.randperm(count, generator=generator)]
    inputs = torch.randn(count, *SHAPES[name], generator=generator, dtype=torch.float64)
    inputs += labels.reshape(-1, *[1] * len(SHAPES[name])) * 0.5
    return inputs.to(dtype), labels


def batches(name: str, count: int, size: int, **of_samples: int) -> list[tuple[Tensor, Tensor]]:
    inputs, labels = samples(name, count, **of_samples)
    return list(zip(inputs.split(size), labels.split(size), strict=True))
