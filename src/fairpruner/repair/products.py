"""Convolutions and matrix products as they are called: every kind seen as one thing, rows of features
times a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fairpruner.core.arrays import Ints
from fairpruner.inputs.tokens import counted_rows
from fairpruner.models.weight_operations import ALIASES, TRANSPOSED_CONVOLUTION, WEIGHT_OPERATIONS

DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}
SUMS = (torch.add, torch.Tensor.add, torch.Tensor.add_)


@dataclass(frozen=True, eq=False)
class Product:
    """One call that multiplies its input with a named weight.

    Seen as a matrix product it has G groups, each of p features (channels times kernel positions) and q
    outputs.
    """

    name: str  # of the weight
    weight: Tensor  # as it is stored; the call may have been given a transposed view
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    read_dim: int  # the weight's dim that reads the input

    @property
    def source(self) -> Tensor:
        source: Tensor = self.arguments["input"]
        return source

    @property
    def bias(self) -> Tensor | None:
        bias = self.arguments.get("bias")
        return bias if isinstance(bias, Tensor) and bias.ndim == 1 else None

    @property
    def groups(self) -> int:
        return int(self.arguments.get("groups", 1))

    @property
    def axis(self) -> int:
        """The channel axis of input and output."""
        return WEIGHT_OPERATIONS[self.function].axis

    @property
    def transposed(self) -> bool:
        return WEIGHT_OPERATIONS[self.function].arguments == TRANSPOSED_CONVOLUTION

    def run(self) -> Tensor:
        names = WEIGHT_OPERATIONS[self.function].arguments
        out: Tensor = self.function(*(self.arguments[name] for name in names))
        return out

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight, as it is stored, as a matrix for each group, [G, c, taps, q]."""
        if weight.ndim == 2:
            return (weight.t() if self.read_dim == 1 else weight)[None, :, None, :]
        if self.transposed:
            split: Tensor = weight.unflatten(0, (self.groups, -1))  # [G, c, q, *kernel]
            return split.flip(tuple(range(3, split.ndim))).flatten(3).transpose(2, 3)
        filters: Tensor = weight.unflatten(0, (self.groups, -1))  # [G, q, c, *kernel]
        return filters.flatten(3).permute(0, 2, 3, 1)

    def stored(self, matrix: Tensor, like: Tensor) -> Tensor:
        """The inverse of `matrix`: the weight in the shape and type of `like`."""
        if like.ndim == 2:
            flat = matrix[0, :, 0]  # [c, q]
            return (flat.t() if self.read_dim == 1 else flat).to(like)
        kernel = like.shape[2:]
        if self.transposed:
            split: Tensor = matrix.transpose(2, 3).unflatten(3, kernel)  # [G, c, q, *kernel]
            return split.flip(tuple(range(3, split.ndim))).flatten(0, 1).to(like)
        filters: Tensor = matrix.permute(0, 3, 1, 2).unflatten(3, kernel)  # [G, q, c, *kernel]
        return filters.flatten(0, 1).to(like)

    def rows(self, of: Tensor, inputs: Any) -> Tensor:
        """The rows of this call's input or output that count, [rows]: all of them, but none of the
        padding of a batch of texts.
        """
        total = of.numel() // of.shape[self.axis]
        return counted_rows(total, inputs if self.axis == -1 else None, self.name).to(of.device)

    def features(self, rows: Tensor) -> Tensor:
        """What the chosen output positions read, [G, rows, c, taps]; `rows` index the flattened batch and
        positions of the output.
        """
        source = self.source
        if self.axis == -1:
            return self.outputs(source, rows)[None, :, :, None]
        dims = self.weight.ndim - 2
        kernel = self.weight.shape[2:]
        stride, dilation = (_tuple(self.arguments.get(name, 1), dims) for name in ("stride", "dilation"))
        if self.transposed:
            source, stride = _spread(source, stride, self.arguments, kernel, dilation), (1,) * dims
        else:
            source = F.pad(source, _padding(self.arguments.get("padding", 0), kernel, dilation))
        windows = source  # [N, C, *positions, *kernel], a view
        for d in range(dims):
            windows = windows.unfold(2 + d, dilation[d] * (kernel[d] - 1) + 1, stride[d])
            windows = windows[..., :: dilation[d]]
        where = torch.unravel_index(rows, (windows.shape[0], *windows.shape[2 : 2 + dims]))
        taken: Tensor = (
            windows.movedim(1, 1 + dims)[where].flatten(2).unflatten(1, (self.groups, -1))
        )  # [rows, G, c, taps]
        return taken.transpose(0, 1)

    def outputs(self, out: Tensor, rows: Tensor) -> Tensor:
        """The same rows of this call's output, or of anything of its shape, [rows, C]."""
        last = out.movedim(self.axis, -1)
        return last[torch.unravel_index(rows, last.shape[:-1])]

    @property
    def write_dim(self) -> int:
        """The weight's dim that writes the output."""
        return 1 - self.read_dim

    def kept_outputs(self, kept: Mapping[tuple[str, int], Ints]) -> Tensor:
        """The channels of the output that a cut leaves, given what it leaves of the weight (this call is
        the original's).
        """
        read, written = self.weight.shape[self.read_dim], self.weight.shape[self.write_dim]
        indices = kept.get((self.name, self.write_dim), np.arange(written))
        if not self.transposed:
            return torch.from_numpy(indices)
        # A transposed weight tells the outputs of one group, and its inputs tell which groups are left.
        groups = np.unique(kept.get((self.name, self.read_dim), np.arange(read)) // (read // self.groups))
        return torch.from_numpy((groups[:, None] * written + indices).reshape(-1))

    def without_input(self) -> Product:
        return replace(
            self, arguments={name: value for name, value in self.arguments.items() if name != "input"}
        )


def _tuple(value: Any, dims: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    return values * dims if len(values) == 1 else values


def _padding(padding: Any, kernel: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """The padding in the order F.pad wants it: last dimension first, before and after."""
    if padding == "valid":
        padding = 0
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(p, p) for p in _tuple(padding, len(kernel))]
    return list(chain.from_iterable(reversed(sides)))


def _spread(
    source: Tensor,
    stride: Sequence[int],
    arguments: Mapping[str, Any],
    kernel: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """The input whose plain convolution with the flipped kernel is the transposed one: zeros between,
    then a rim.
    """
    dims = len(kernel)
    padding, extra = (_tuple(arguments.get(name, 0), dims) for name in ("padding", "output_padding"))
    sizes = [(n - 1) * s + 1 for n, s in zip(source.shape[2:], stride, strict=True)]
    spread = source.new_zeros(*source.shape[:2], *sizes)
    spread[(slice(None), slice(None), *(slice(None, None, s) for s in stride))] = source
    rims = [d * (k - 1) - p for k, d, p in zip(kernel, dilation, padding, strict=True)]
    return F.pad(
        spread,
        list(
            chain.from_iterable(
                (rim, rim + more) for rim, more in reversed(list(zip(rims, extra, strict=True)))
            )
        ),
    )


class Walk(TorchFunctionMode):
    """Sees every product with a named weight, every batch norm and every sum of a forward pass, and may
    change what they give.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(t): name for name, t in chain(model.named_buffers(), model.named_parameters())}
        self.sums = 0

    def product(self, product: Product) -> Tensor:
        return product.run()

    def norm(self, source: Tensor, mean: str | None) -> None:
        """A batch norm's input, and the name of its running mean."""

    def sum(self, position: int, operands: list[Tensor], in_place: bool) -> None:
        """The sum of two tensors of one shape, the position-th of this pass; `operands` may be replaced."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function in WEIGHT_OPERATIONS:
            product = self._product(function, args, kwargs)
            if product is not None:
                return self.product(product)
        if (
            function in SUMS
            and not kwargs
            and len(args) == 2
            and all(isinstance(a, Tensor) for a in args)
            and args[0].shape == args[1].shape
        ):
            operands, self.sums = list(args), self.sums + 1
            self.sum(self.sums - 1, operands, function is torch.Tensor.add_)
            args = operands
        if function is F.batch_norm and len(args) > 1:
            self.norm(args[0], self.names.get(id(args[1])))
        return function(*args, **kwargs)

    def _product(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Product | None:
        operation = WEIGHT_OPERATIONS[function]
        defaults = {name: DEFAULTS[name] for name in operation.arguments if name in DEFAULTS}
        arguments = (
            defaults
            | dict(zip(operation.arguments, args, strict=False))
            | {ALIASES.get(k, k): v for k, v in kwargs.items()}
        )
        weight = arguments.get("weight")
        if not isinstance(weight, Tensor):
            return None
        base = weight if weight._base is None else weight._base
        name = self.names.get(id(base))
        if len(operation.arguments) > 3 and arguments["input"].ndim != weight.ndim:
            return None  # called without a batch dimension
        if (
            name is None
            or base.ndim != weight.ndim
            or base.numel() != weight.numel()
            or "beta" in arguments
            or "alpha" in arguments
        ):
            return None
        turned = (
            weight.ndim == 2 and weight.stride() != base.stride()
        )  # a transposed view reads along the other dim
        return Product(name, base, function, arguments, 1 - operation.dim if turned else operation.dim)
