"""Small networks for the topics that Torch-Pruning's own tests cover beside torchvision's models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def _conv(into: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(into, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())


class Concat(nn.Module):
    """Three branches are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(_conv(3, width) for width in (8, 12, 16))
        self.join, self.head = _conv(36, 10), nn.Conv2d(10, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.join(torch.cat([branch(x) for branch in self.branches], 1)))


class CascadedConcat(nn.Module):
    """A concatenation is a part of another one, and a layer reads each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = _conv(3, 8), _conv(8, 8), _conv(16, 12), _conv(28, 8)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        first = torch.cat([a, self.b(a)], 1)
        return self.head(self.d(torch.cat([first, self.c(first)], 1)))


class ConcatSplit(nn.Module):
    """What was concatenated is split at other places."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = _conv(3, 8), _conv(3, 16)
        self.sizes = [6, 8, 10]
        self.parts = nn.ModuleList(_conv(width, 8) for width in self.sizes)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.cat([self.a(x), self.b(x)], 1).split(self.sizes, 1)
        return self.head(sum(layer(part) for layer, part in zip(self.parts, parts, strict=True)))


class OwnLayer(nn.Module):
    """A layer with parameters of its own kind: a scale and a shift, and a weight used through einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(10, 4)
        self.scale, self.shift = nn.Parameter(torch.randn(12)), nn.Parameter(torch.randn(12))
        self.weight = nn.Parameter(torch.randn(10, 12))

    def forward(self, x: Tensor) -> Tensor:
        x = (self.first(x) * self.scale + self.shift).tanh()
        return self.last(torch.einsum("nc,oc->no", x, self.weight).relu())


class SeveralInputsAndOutputs(nn.Module):
    """Two inputs of different widths, and a dict of two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.both = nn.Linear(6, 16), nn.Linear(5, 16), nn.Linear(16, 12)
        self.logits, self.value = nn.Linear(12, 3), nn.Linear(12, 1)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        both = self.both((self.left(left) + self.right(right)).relu()).relu()
        return {"logits": self.logits(both), "value": self.value(both)}


class ConcatOfTokens(nn.Module):
    """A concatenation along tokens, not along channels, and a parameter that is one more token."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 12))
        self.embed, self.hidden, self.head = nn.Linear(6, 12), nn.Linear(12, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1)
        return self.head(self.hidden(x).relu()).mean(1)


class Reshaped(nn.Module):
    """Maps become rows in another order of dimensions before a linear layer reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.hidden, self.head = _conv(3, 8), nn.Linear(8 * 16, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = x.view(len(x), -1, 4, 2, 4, 2).mean((3, 5)).permute(0, 2, 3, 1)
        return self.head(self.hidden(x.reshape(len(x), -1)).relu())


class OneChannel(nn.Module):
    """A layer with one output channel between wider ones: a mask that scales all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.mask, self.head = _conv(3, 12), nn.Conv2d(12, 1, 1), nn.Conv2d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        return self.head(x * self.mask(x).sigmoid())


class Split(nn.Module):
    """Two halves take different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right, self.head = (
            _conv(3, 16),
            _conv(8, 8),
            _conv(8, 8),
            nn.Conv2d(8, 2, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.stem(x).chunk(2, 1)
        return self.head(self.left(left) + self.right(right))


class Unused(nn.Module):
    """Holds a layer and a parameter that its forward pass does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.spare = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 16)
        self.unused = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


class Unwrapped(nn.Module):
    """Parameters of the model itself: a scale of every channel, and a product with a square matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.mixing = nn.Parameter(torch.randn(1, 12, 1, 1)), nn.Parameter(torch.randn(12, 12))
        self.features, self.head = _conv(3, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = (self.features(x) * self.scale).mean((2, 3))
        return self.head((x @ self.mixing).relu())


def _linear() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 3))


def _image() -> Tensor:
    return torch.randn(2, 3, 8, 8)


TOPICS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "fully_connected": (_linear, lambda: torch.randn(4, 8)),
    "concat": (Concat, _image),
    "cascaded_concat": (CascadedConcat, _image),
    "concat_split": (ConcatSplit, _image),
    "own_layer": (OwnLayer, lambda: torch.randn(4, 8)),
    "several_inputs_and_outputs": (SeveralInputsAndOutputs, lambda: (torch.randn(4, 6), torch.randn(4, 5))),
    "concat_of_tokens": (ConcatOfTokens, lambda: torch.randn(2, 5, 6)),
    "reshape": (Reshaped, _image),
    "one_channel": (OneChannel, _image),
    "split": (Split, _image),
    "unused_parameters": (Unused, lambda: torch.randn(4, 8)),
    "unwrapped_parameters": (Unwrapped, _image),
}
