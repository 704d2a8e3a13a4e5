"""Convolutions and matrix products, all seen as one thing: rows of features times a matrix.

Take a 3x3 convolution of 5 channels, stride 1, padding 1, on 8x8 maps. Its output has one row for each
sample and position. Row r of sample n at position (2, 0) reads the 9 input positions (1, -1) … (3, 1), of
which those in column -1 are padding. So the row has 9 taps of 5 channels, 45 features, and the output is
features [rows, 45] times the kernel as a matrix [45, outputs]. A linear layer is the same with one tap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairpruner.inputs.batches import Batch
from fairpruner.inputs.tokens import counted_rows
from fairpruner.models.torch_private import base_of
from fairpruner.models.weight_operations import ALIASES, TRANSPOSED_CONVOLUTION, WEIGHT_OPERATIONS
from fairpruner.repair.regression import in_first_half
from fairpruner.repair.tensors import KeptByDim

_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}


@dataclass(frozen=True, eq=False)
class Rows:
    """Chosen rows of a product's output; the first `fitted` of them belong to the samples that are fitted."""

    index: Tensor  # [rows], into the flattened batch and positions
    fitted: int
    # What a convolution reads for these rows, by its geometry: neighbouring layers often have the same.
    reads: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Product:
    """One call that multiplies its input with a named weight.

    As a matrix product it has G groups, each of c channels times taps features and q outputs.
    """

    name: str  # of the weight
    weight: Tensor  # as it is stored; the call may have been given a transposed view
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    read_dim: int  # the weight's dim that reads the input

    @staticmethod
    def of_call(
        names: Mapping[int, str], function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Product | None:
        """The product that a call is, or None; `names` are those of the model's tensors by id."""
        operation = WEIGHT_OPERATIONS.get(function)
        if operation is None:
            return None
        arguments: dict[str, Any] = {n: _DEFAULTS[n] for n in operation.arguments if n in _DEFAULTS}
        arguments |= dict(zip(operation.arguments, args, strict=False))
        arguments |= {ALIASES.get(name, name): value for name, value in kwargs.items()}
        weight = arguments.get("weight")
        if not isinstance(weight, Tensor) or "alpha" in arguments or "beta" in arguments:
            return None
        base = base_of(weight)
        name = names.get(id(base))
        if name is None or base.ndim != weight.ndim or base.numel() != weight.numel():
            return None
        if len(operation.arguments) > 3 and arguments["input"].ndim != weight.ndim:
            return None  # called without a batch dimension
        # A transposed view reads along the other dim.
        turned = weight.ndim == 2 and weight.stride() != base.stride()
        return Product(name, base, function, arguments, 1 - operation.dim if turned else operation.dim)

    @property
    def source(self) -> Tensor:
        """The input."""
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
    def places(self) -> tuple[int, ...]:
        """The sizes of the input without its channel axis: what the rows are numbered by."""
        sizes = list(self.source.shape)
        del sizes[self.axis]
        return tuple(sizes)

    @property
    def transposed(self) -> bool:
        """Whether this is a transposed convolution."""
        return WEIGHT_OPERATIONS[self.function].arguments == TRANSPOSED_CONVOLUTION

    @property
    def write_dim(self) -> int:
        """The weight's dim that writes the output."""
        return 1 - self.read_dim

    def without_input(self) -> Product:
        return replace(self, arguments={k: v for k, v in self.arguments.items() if k != "input"})

    def run(self) -> Tensor:
        names = WEIGHT_OPERATIONS[self.function].arguments
        out: Tensor = self.function(*(self.arguments[name] for name in names))
        return out

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight, as it is stored, as a matrix for each group, [G, c, taps, q]."""
        if weight.ndim == 2:
            return (weight.t() if self.read_dim == 1 else weight)[None, :, None, :]
        split: Tensor = weight.unflatten(0, (self.groups, -1)).flatten(3)
        # A transposed convolution stores [G, c, q, taps], any other [G, q, c, taps].
        return split.transpose(2, 3) if self.transposed else split.permute(0, 2, 3, 1)

    def stored(self, matrix: Tensor, like: Tensor) -> Tensor:
        """The inverse of `matrix`: the weight in the shape, type and device of `like`."""
        if like.ndim == 2:
            flat = matrix[0, :, 0]  # [c, q]
            return (flat.t() if self.read_dim == 1 else flat).to(like)
        split = matrix.transpose(2, 3) if self.transposed else matrix.permute(0, 3, 1, 2)
        weight: Tensor = split.unflatten(3, like.shape[2:]).flatten(0, 1)
        return weight.to(like)

    def counted(self, of: Tensor, batch: Batch) -> Tensor:
        """The rows of this call's input or output that count, [rows]: not the padding of texts."""
        total = of.numel() // of.shape[self.axis]
        return counted_rows(total, batch.inputs if self.axis == -1 else None, self.name)

    def split(self, of: Tensor, rows: Tensor, batch: Batch) -> Rows:
        """These rows [rows] of this call's input or output, those to be fitted first."""
        first = in_first_half(rows, of.numel() // of.shape[self.axis], batch.size, batch.position)
        return Rows(torch.cat([rows[first], rows[~first]]).to(of.device), int(first.sum()))

    def features(self, rows: Rows) -> Tensor:
        """What the chosen rows of the output read, [G, rows, taps, c]."""
        channels_last = self.source.movedim(self.axis, -1)  # [N, *positions, C]
        table = channels_last.reshape(-1, channels_last.shape[-1])
        if self.axis == -1:
            return table[rows.index][None, :, None]
        geometry = self._geometry
        if geometry not in rows.reads:
            rows.reads[geometry] = self._read_positions(rows.index)
        read, padding = rows.reads[geometry]
        found = table.index_select(0, read.flatten())  # [rows taps, C]
        found.index_fill_(0, padding, 0.0)
        by_group = found.view(*read.shape, self.groups, -1)  # [rows, taps, G, c]
        return by_group.permute(2, 0, 1, 3)

    def outputs(self, out: Tensor, rows: Rows) -> Tensor:
        """The chosen rows of this call's output, or of anything of its shape, [rows, C]."""
        if self.axis == -1:
            return out.reshape(-1, out.shape[-1])[rows.index]
        by_position = out.flatten(2)  # [N, C, positions]
        positions = by_position.shape[2]
        return by_position[rows.index // positions, :, rows.index % positions]

    def kept_outputs(self, kept: KeptByDim) -> Tensor:
        """The output channels of this call of the original that a cut leaves."""
        read, written = self.weight.shape[self.read_dim], self.weight.shape[self.write_dim]
        indices = kept.get((self.name, self.write_dim), np.arange(written))
        if not self.transposed:
            return torch.from_numpy(indices)
        # A transposed convolution stores the outputs of one group; its inputs show which groups stay.
        groups = np.unique(kept.get((self.name, self.read_dim), np.arange(read)) // (read // self.groups))
        return torch.from_numpy((groups[:, None] * written + indices).reshape(-1))

    def _read_positions(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The input row that each tap of an output row reads, [rows, taps], and which taps are padding."""
        sizes, kernel = self.source.shape[2:], self.weight.shape[2:]
        outs = []
        for size in reversed(self._output_sizes()):
            outs.append(rows % size)
            rows = rows // size
        outs.reverse()
        position = rows.view(-1, *[1] * len(kernel))  # so far the sample, [rows, 1, …]
        padding = torch.zeros_like(position, dtype=torch.bool)
        for dim, (out, size) in enumerate(zip(outs, sizes, strict=True)):
            taps = torch.arange(kernel[dim], device=rows.device)
            where, valid = self._read_coordinates(dim, out[:, None], taps)  # [rows, kernel]
            valid &= (where >= 0) & (where < size)
            shape = [len(rows), *(len(taps) if d == dim else 1 for d in range(len(kernel)))]
            position = position * size + torch.where(valid, where, 0).view(shape)
            padding = padding | ~valid.view(shape)
        return position.flatten(1), padding.flatten().nonzero()[:, 0]

    @property
    def _geometry(self) -> tuple[Any, ...]:
        """All values that determine which positions of the input are read."""
        names = ("stride", "padding", "output_padding", "dilation")
        moving = tuple(str(self.arguments.get(name)) for name in names)
        return self.transposed, *self.source.shape[2:], *self.weight.shape[2:], *moving

    def _read_coordinates(self, dim: int, out: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
        """The input coordinates along one dim that taps read, and whether there is one for each."""
        stride, dilation = self._along("stride", dim), self._along("dilation", dim)
        if not self.transposed:
            where = out * stride - self._padding(dim) + taps * dilation
            return where, torch.ones_like(where, dtype=torch.bool)
        # Input i reaches the outputs i * stride - padding + tap * dilation.
        scaled = out + self._padding(dim) - taps * dilation
        return scaled.div(stride, rounding_mode="floor"), scaled % stride == 0

    def _output_sizes(self) -> list[int]:
        sizes, kernel = self.source.shape[2:], self.weight.shape[2:]
        found = []
        for dim, size in enumerate(sizes):
            stride, reach = self._along("stride", dim), self._along("dilation", dim) * (kernel[dim] - 1)
            if self.transposed:
                rim = reach - 2 * self._padding(dim) + self._along("output_padding", dim)
                found.append((size - 1) * stride + rim + 1)
            else:
                around = reach if self.arguments["padding"] == "same" else 2 * self._padding(dim)
                found.append((size + around - reach - 1) // stride + 1)
        return found

    def _padding(self, dim: int) -> int:
        """How far the padding reaches before the first position."""
        if self.arguments["padding"] == "same":
            return self._along("dilation", dim) * (self.weight.shape[2 + dim] - 1) // 2
        return 0 if self.arguments["padding"] == "valid" else self._along("padding", dim)

    def _along(self, name: str, dim: int) -> int:
        """An argument of a convolution along one of its dims."""
        value = self.arguments[name]
        values = tuple(value) if isinstance(value, Sequence) else (value,)
        return int(values[dim if len(values) > 1 else 0])
