"""How the weights of a model lie in its forward pass: where an offset can go, and into which sum an
output runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairpruner.core.arrays import Ints
from fairpruner.core.plan import Plan
from fairpruner.inputs.batches import Batch, forward
from fairpruner.models.narrowing import kept_indices
from fairpruner.repair.products import Product, Walk

SAMPLES = 4  # of the data that are run to find the wiring
# share of the variance that a channel-wise straight line may leave unexplained by rounding
STRAIGHT = 1e-6


class Offset(NamedTuple):
    """The tensor that takes a constant added to an output: a bias (+1), or the running mean of the batch
    norm behind it (-1).
    """

    tensor: str
    sign: int


class Sum(NamedTuple):
    """The position-th sum of a forward pass, and which of its two operands."""

    position: int
    side: int


@dataclass(frozen=True)
class Wire:
    """One weight in the forward pass."""

    calls: int
    only_multiplies: bool  # false for an embedding that is also the last layer
    offset: Offset | None
    sum: (
        Sum | None
    )  # where its output, at most scaled and shifted channel by channel, is added to something else


def find_wires(model: nn.Module, first: Batch) -> dict[str, Wire]:
    """The wires of all weights that multiply, in the order they are first called."""
    tracer = _Tracer(model)
    with torch.no_grad(), tracer:
        forward(model, first.rows(0, SAMPLES))
    return tracer.wires()


class _Tracer(Walk):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._products: dict[
            str, list[tuple[Product, Tensor, Tensor]]
        ] = {}  # with their output, and a copy of it that no one changes
        self._means: dict[str, str] = {}  # weight -> running mean
        self._uses: dict[int, int] = {}  # outputs and offsets -> how often they are used
        self._sums: dict[Sum, list[str]] = {}

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = super().__torch_function__(function, types, args, kwargs)
        if isinstance(out, Tensor):  # reading a shape is no use
            for tensor in (*args, *(kwargs or {}).values()):
                self._uses[id(tensor)] = self._uses.get(id(tensor), 0) + 1
        return out

    def product(self, product: Product) -> Tensor:
        out = product.run()
        self._uses[id(out)] = 0  # the id may have been another's
        self._products.setdefault(product.name, []).append((product, out, out.clone()))
        return out

    def norm(self, source: Tensor, mean: str | None) -> None:
        for name, calls in self._products.items():
            if mean is not None and calls[-1][1] is source:
                self._means[name] = mean

    def sum(self, position: int, operands: list[Tensor], in_place: bool) -> None:
        for name, calls in self._products.items():
            product, _, out = calls[-1]
            for side, operand in enumerate(operands):
                if operand.shape == out.shape and _is_straight(
                    _by_channel(out, product.axis), _by_channel(operand, product.axis)
                ):
                    self._sums.setdefault(Sum(position, side), []).append(name)

    def wires(self) -> dict[str, Wire]:
        sums: dict[str, Sum] = {}
        for position in sorted({place.position for place in self._sums}):
            # Of two outputs that meet in a sum, the one with more features can make up for more of the
            # other's error.
            claims = [
                (place, name)
                for place, names in self._sums.items()
                if place.position == position
                for name in names
                if name not in sums
            ]
            if claims:
                place, name = max(claims, key=lambda claim: self._features(claim[1]))
                sums[name] = place
        return {
            name: Wire(
                len(calls),
                self._uses[id(calls[0][0].weight)] == len(calls),
                self._offset(name),
                sums.get(name) if len(calls) == 1 else None,
            )
            for name, calls in self._products.items()
        }

    def _features(self, name: str) -> int:
        product, out, _ = self._products[name][0]
        return product.weight.numel() // out.shape[product.axis]

    def _offset(self, name: str) -> Offset | None:
        """A bias or a running mean that serves this weight alone."""
        product, out, _ = self._products[name][0]
        if product.bias is not None:
            tensor, sign, calls = id(product.bias), 1, len(self._products[name])
        elif name in self._means and self._uses[id(out)] == 1:
            tensor, sign, calls = (
                next(t for t, found in self.names.items() if found == self._means[name]),
                -1,
                1,
            )
        else:
            return None
        return (
            Offset(self.names[tensor], sign)
            if tensor in self.names and self._uses[tensor] == calls == len(self._products[name])
            else None
        )


def _by_channel(tensor: Tensor, axis: int) -> Tensor:
    return tensor.movedim(axis, -1).reshape(-1, tensor.shape[axis]).to("cpu", torch.float64)  # [rows, C]


def _is_straight(out: Tensor, operand: Tensor) -> bool:
    """Whether each channel of the operand is the output's channel, scaled and shifted, [rows, C]."""
    slope, rest = straight_line(out, operand)
    return (
        out.shape[0] > 3
        and bool(rest.square().sum() <= STRAIGHT * (operand - operand.mean(0)).square().sum())
        and bool(slope.any())
    )


def straight_line(out: Tensor, operand: Tensor) -> tuple[Tensor, Tensor]:
    """The slope of each channel of `operand` over that of `out`, [C], zero where the output is constant,
    and what it leaves, [rows, C].
    """
    x, y = out - out.mean(0), operand - operand.mean(0)
    spread = x.square().sum(0)
    slope = torch.where(spread > 0, (x * y).sum(0) / spread.clamp_min(torch.finfo(x.dtype).tiny), 0.0)
    return slope, y - slope * x


def kept_by_place(plan: Plan) -> dict[tuple[str, int], Ints]:
    """Which indices a cut leaves along each dim of each tensor that loses some."""
    return {
        (tensor, dim): kept
        for tensor, dims in kept_indices(plan.spaces, plan.removed).items()
        for dim, kept in dims.items()
    }


def tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}
