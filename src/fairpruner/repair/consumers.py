"""The weights that read prunable units, and second moments of what they read.

A removed channel is predicted from the kept ones at the same position, x_r ≈ A x_k + b. A consumer with the
weights W = [W_k W_r] gives W_k x_k + W_r x_r. After the cut it reads x_k only and misses W_r x_r, so a change
of W_k is fitted to that. With C the products of all pairs of channels, summed over rows, the normal equations
for any choice of kept channels are

    XᵀX = C_kk,     XᵀY = C_kr W_rᵀ,     |Y|² = trace(W_r C_rr W_rᵀ).

So C and the sums of the channels serve every plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from fairpruner.core.arrays import Ints
from fairpruner.core.units import Slice, UnitSpace
from fairpruner.inputs.batches import Batch
from fairpruner.models.gram import gram_matrix
from fairpruner.models.precision import in_float32, without_autocast
from fairpruner.models.reads import positions_of
from fairpruner.repair.products import Product
from fairpruner.repair.regression import Halves, NormalEquations, float64


@dataclass(frozen=True, eq=False)
class Consumer:
    """One weight that reads units: whose they are, and how its columns belong to them."""

    name: str
    parts: tuple[tuple[UnitSpace, Slice], ...]
    is_matrix: bool

    @cached_property
    def columns(self) -> Tensor | None:
        """Where a channel was flattened into several columns: the columns of each unit, [J, F].

        One prediction of channels then serves all F. The columns of a head are different features, which are
        predicted one by one.
        """
        space, part = self.parts[0]
        table = positions_of(part.owner, space.size)
        flattened = table.shape[1] > 1 and table.min() >= 0 and table.size == part.owner.size
        shared = self.is_matrix and len(self.parts) == 1 and space.kind != "head" and flattened
        return torch.from_numpy(table) if shared else None

    @property
    def channels(self) -> int:
        """How many channels are predicted from one another."""
        return self.parts[0][1].owner.size if self.columns is None else len(self.columns)

    def by_unit(self, matrix: Tensor) -> Tensor:
        """A matrix [1, C, 1, q] with the columns of a unit as its taps, [1, J, F, q]; others stay."""
        return matrix if self.columns is None else matrix[0, self.columns, 0][None]

    def by_column(self, matrix: Tensor) -> Tensor:
        """The inverse of `by_unit`."""
        if self.columns is None:
            return matrix
        whole = matrix.new_zeros(1, self.columns.numel(), 1, matrix.shape[3])
        whole[0, self.columns, 0] = matrix[0]
        return whole

    def kept_in_group(self, kept: Ints, product: Product) -> Tensor | None:
        """The channels of every group, or the units, that a cut leaves; None if groups differ in this."""
        if self.columns is not None:
            return torch.from_numpy(np.flatnonzero(np.isin(self.columns[:, 0].numpy(), kept)))
        if not product.transposed:
            return torch.from_numpy(kept)  # the weight has the channels of one group, which all share
        channels = product.weight.shape[0] // product.groups
        first = kept[kept < channels]
        same = np.array_equal(kept, (np.arange(product.groups)[:, None] * channels + first).reshape(-1))
        return torch.from_numpy(first) if same else None


def consumers_of(spaces: Iterable[UnitSpace], model: nn.Module) -> list[Consumer]:
    """All weights of the model that read units of these spaces."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, list[tuple[UnitSpace, Slice]]] = {}
    for space in spaces:
        for part in space.slices_of("read"):
            found.setdefault(part.tensor, []).append((space, part))
    return [Consumer(name, tuple(parts), weights[name].ndim == 2) for name, parts in found.items()]


@dataclass(frozen=True, eq=False)
class _Sums:
    """Sums over rows, separately for G groups, in float64 on the CPU."""

    rows: int
    pairs: Tensor  # products of all pairs of channels, [G, c, c]
    channels: Tensor  # [G, c]

    def __iadd__(self, other: _Sums) -> _Sums:
        """Add to the sums where they are: wide ones take as long to copy as to compute."""
        if not (self.rows and other.rows):
            return self if self.rows else other
        self.pairs.add_(other.pairs)
        self.channels.add_(other.channels)
        return replace(self, rows=self.rows + other.rows)


class Moments:
    """Second moments of what one consumer reads, for each half of the samples."""

    def __init__(self, consumer: Consumer, product: Product) -> None:
        self.consumer, self.product = consumer, product.without_input()
        self._halves: list[_Sums] | None = None

    def add(self, product: Product, batch: Batch) -> None:
        """Add one batch's input."""
        source = product.source
        rows = product.split(source, product.counted(source, batch), batch)
        values = in_float32(product.outputs(source, rows))  # [rows, C]
        with without_autocast(values.device):
            new = [self._sums(values[: rows.fitted]), self._sums(values[rows.fitted :])]
        if self._halves is None:
            self._halves = new
        else:
            for half, sums in enumerate(new):
                self._halves[half] += sums

    def _sums(self, values: Tensor) -> _Sums:
        if self.consumer.columns is not None:
            columns = self.consumer.columns.to(values.device)
            channels = values[:, columns].transpose(1, 2).flatten(0, 1)[None]  # [1, rows F, J]
        else:
            channels = values.unflatten(1, (self.product.groups, -1)).transpose(0, 1)  # [G, rows, c]
        if not channels.shape[1]:  # a batch of one sample leaves a half without rows: nothing is allocated
            groups, _, size = channels.shape
            zero = torch.zeros((), dtype=torch.float64, device="cpu")
            return _Sums(0, zero.expand(groups, size, size), zero.expand(groups, size))
        return _Sums(channels.shape[1], float64(gram_matrix(channels)), float64(channels.sum(1)))

    def equations(self, matrix: Tensor, keep: Tensor) -> Halves:
        """Fit what the lost channels gave through the weights [G, c, taps, q] by the kept channels."""
        gone = torch.ones(matrix.shape[1], dtype=torch.bool, device="cpu")
        gone[keep] = False
        lost = matrix[:, gone].flatten(2)  # [G, r, taps q]

        def of(sums: _Sums) -> NormalEquations:
            kept_rows, lost_rows = sums.pairs[:, keep], sums.pairs[:, gone]
            return NormalEquations(
                sums.rows,
                gram=kept_rows[:, :, keep],
                cross=kept_rows[:, :, gone] @ lost,
                square=(lost * (lost_rows[:, :, gone] @ lost)).sum(1),
                features=sums.channels[:, keep],
                targets=(sums.channels[:, None, gone] @ lost)[:, 0],
            )

        assert self._halves is not None
        return Halves(of(self._halves[0]), of(self._halves[1]))
