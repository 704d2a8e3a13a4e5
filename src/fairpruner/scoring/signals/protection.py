"""Protection signals: the change of the loss without a unit, to first order, to second order, or exactly."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairpruner.core.arrays import Floats, Ints
from fairpruner.core.spaces import Spaces
from fairpruner.core.units import KINDS, Kind, Slice, UnitSpace
from fairpruner.models.precision import in_float32
from fairpruner.scoring.processes import Processes
from fairpruner.scoring.signals.base import (
    DENSE,
    RESIDUAL,
    Accumulator,
    BatchInfo,
    Context,
    Observation,
    Result,
    Signal,
)

MOST_PRODUCTS = 2**24  # of a gradient with its weight that are in memory at once


class HalvedMeans:
    """Means over the samples of several vectors, summed in float64, for each half of the data separately."""

    def __init__(self) -> None:
        self._sums: dict[Hashable, Floats] = {}  # [2, size] each
        self._counts = np.zeros((2, 1))

    def count(self, info: BatchInfo) -> None:
        self._counts[info.half] += info.samples

    def add(self, key: Hashable, total: Tensor, info: BatchInfo) -> None:
        """Add the sum over the samples of a batch, [size]."""
        vector = total.cpu().to(torch.float64).numpy()
        self._sums.setdefault(key, np.zeros((2, vector.size)))[info.half] += vector

    def join(self, processes: Processes) -> None:
        """Add the sums of all processes in the order of ranks, so that all end with the same numbers."""
        everybody = processes.gathered((self._sums, self._counts))
        self._counts = np.sum([counts for _, counts in everybody], axis=0)
        keys = dict.fromkeys(key for sums, _ in everybody for key in sums)
        self._sums = {
            key: np.sum([sums[key] for sums, _ in everybody if key in sums], axis=0) for key in keys
        }

    def of(self, key: Hashable, size: int) -> Floats:
        """The mean over all samples, and over each half if both have samples: [1 or 3, size]."""
        sums = self._sums.get(key, np.zeros((2, size)))
        whole = sums.sum(0, keepdims=True) / self._counts.sum()
        return np.concatenate([whole, sums / self._counts]) if self._counts.all() else whole


def absolute(means: Mapping[str, Floats]) -> Result:
    """Scores from signed means [1 or 3, J]: the absolute value comes last, as in Algorithm 2."""
    return signed({name: np.abs(rows) for name, rows in means.items()})


def signed(means: Mapping[str, Floats]) -> Result:
    """Scores from signed means [1 or 3, J], as they are."""
    halves = {name: rows[1:] for name, rows in means.items() if len(rows) == 3}
    return Result({name: rows[0] for name, rows in means.items()}, halves)


@dataclass(frozen=True)
class Taylor(Signal):
    """The paper's R-Score (Algorithm 2): |mean over samples of <gradient, weights>| of what a unit owns.

    For a residual block, of the weights that end it.
    """

    name: str = "taylor"
    kinds: ClassVar[frozenset[Kind]] = DENSE | RESIDUAL
    needs: ClassVar[frozenset[Observation]] = frozenset({"gradients"})

    def start(self, context: Context) -> Accumulator:
        return _TaylorAccumulator(context)


class _Crossing(NamedTuple):
    """Elements of one tensor that a unit owns along dim 0 and along dim 1; they must count once."""

    tensor: str
    rows: Ints  # [n] indices along dim 0
    columns: Ints  # [n] indices along dim 1
    units: Ints  # [n]


class _TaylorAccumulator(Accumulator):
    def __init__(self, context: Context) -> None:
        self._spaces = context.spaces
        self._parameters = dict(context.model.named_parameters(remove_duplicate=False))
        self._dims: dict[str, set[int]] = {}  # tensor -> the dims along which units own slices
        for part in (
            part for space in context.spaces for part in _counted(space) if part.tensor in self._parameters
        ):
            self._dims.setdefault(part.tensor, set()).add(part.dim)
        self._crossings = {space.name: _crossings(space) for space in context.spaces}
        self._means = HalvedMeans()

    def see_gradients(self, gradients: Mapping[str, Tensor], info: BatchInfo) -> None:
        self._means.count(info)
        crossings = [(space, crossing) for space, found in self._crossings.items() for crossing in found]
        for tensor, dims in self._dims.items():
            if tensor not in gradients:
                continue
            gradient, weight = gradients[tensor].detach(), self._parameters[tensor].detach()
            for dim, sums in sums_of_products(gradient, weight, dims).items():
                # The gradient of the mean loss times the number of samples is the sum over the samples.
                self._means.add((tensor, dim), sums * info.samples, info)
            for space, crossing in crossings:
                if crossing.tensor == tensor:
                    places = crossing.rows, crossing.columns
                    shared = in_float32(gradient[places]) * in_float32(weight[places])  # [n, ...]
                    self._means.add((space, tensor), sums_along(shared, 0) * info.samples, info)

    def join(self, processes: Processes) -> None:
        self._means.join(processes)

    def result(self) -> Result:
        return absolute({space.name: self._of(space) for space in self._spaces})

    def _of(self, space: UnitSpace) -> Floats:
        """Signed means of <gradient, weights> of each unit, [1 or 3, J]."""
        parts = [
            (self._means.of((p.tensor, p.dim), p.owner.size), p.owner)
            for p in _counted(space)
            if p.tensor in self._parameters
        ]
        parts += [
            (-self._means.of((space.name, c.tensor), c.units.size), c.units)
            for c in self._crossings[space.name]
        ]
        total: Floats = np.sum([by_owner(means, owner, space.size) for means, owner in parts], axis=0)
        return total


def _counted(space: UnitSpace) -> tuple[Slice, ...]:
    """The slices over which the terms of a unit are summed."""
    return space.slices_of("add") if space.kind == "block" else space.slices


def sums_of_products(
    gradient: Tensor, weight: Tensor, dims: Iterable[int], *, absolute: bool = False
) -> dict[int, Tensor]:
    """For each of these dims, the products of gradient and weight summed over all other dims, [size].

    The products of a large tensor, such as all experts of a layer, are computed part by part along dim 0.
    """
    rows = max(1, MOST_PRODUCTS * len(weight) // max(1, weight.numel()))
    found: dict[int, list[Tensor]] = {dim: [] for dim in dims}
    for slopes, values in zip(gradient.split(rows), weight.split(rows), strict=True):
        products = in_float32(slopes) * in_float32(values)
        if absolute:
            products = products.abs_()
        for dim, parts in found.items():
            parts.append(sums_along(products, dim))
    return {dim: torch.stack(parts).sum(0) if dim else torch.cat(parts) for dim, parts in found.items()}


def sums_along(product: Tensor, dim: int) -> Tensor:
    """The sum over all dims but one, [size]."""
    if product.ndim > 1 and not product.is_contiguous():  # such as a convolution's gradient
        return product.sum([other for other in range(product.ndim) if other != dim])
    if dim:  # two sums of flattened dims are quicker than one of many
        product = product.flatten(0, dim - 1).sum(0)
    return product.flatten(1).sum(1) if product.ndim > 1 else product


def by_owner(means: Floats, owner: Ints, size: int) -> Floats:
    """Values of indices, [R, indices], summed over the indices of each unit, [R, J]."""
    owned = owner >= 0
    return np.stack([np.bincount(owner[owned], weights=row[owned], minlength=size) for row in means])


def _crossings(space: UnitSpace) -> list[_Crossing]:
    """For each tensor that units own along both dims, the elements in a row and a column of one unit."""
    owners: dict[str, dict[int, Ints]] = {}
    for part in space.slices:
        owners.setdefault(part.tensor, {})[part.dim] = part.owner
    found = []
    for tensor, by_dim in owners.items():
        if {0, 1} <= set(by_dim):
            rows, columns = np.nonzero((by_dim[0][:, None] == by_dim[1]) & (by_dim[1] >= 0))
            found.append(_Crossing(tensor, rows, columns, by_dim[0][rows]))
    return found


@dataclass(frozen=True)
class Taylor2(Signal):
    """The loss change without a unit to second order: |-mean c + mean c² / 2|.

    c is a sample's <gradient, activation> where consumers read the unit: to first order, setting the unit to
    zero changes that sample's loss by -c. c² is the curvature of Gauss-Newton (the empirical Fisher).
    """

    name: str = "taylor2"
    needs: ClassVar[frozenset[Observation]] = frozenset({"gates"})

    def start(self, context: Context) -> Accumulator:
        return _Taylor2Accumulator(context.spaces)


class _Taylor2Accumulator(Accumulator):
    def __init__(self, spaces: Spaces) -> None:
        self._spaces, self._means = spaces, HalvedMeans()

    def see_gates(self, terms: Mapping[str, Tensor], info: BatchInfo) -> None:
        self._means.count(info)
        for name, term in terms.items():
            exact = term.cpu().to(torch.float64)  # [N, J]
            self._means.add(name, (-exact + exact.square() / 2).sum(0), info)

    def join(self, processes: Processes) -> None:
        self._means.join(processes)

    def result(self) -> Result:
        return absolute({space.name: self._means.of(space.name, space.size) for space in self._spaces})


@dataclass(frozen=True)
class Deletion(Signal):
    """The exact change of the mean loss when one unit is removed; a forward pass for each unit and batch.

    As a removal signal it keeps its sign: a unit without which the loss falls is removed first.
    """

    name: str = "deletion"
    # Without a channel of the stream, norms change, too: zeroing what consumers read is not enough.
    kinds: ClassVar[frozenset[Kind]] = frozenset(KINDS) - {"stream"}
    needs: ClassVar[frozenset[Observation]] = frozenset({"deletions"})

    def start(self, context: Context) -> Accumulator:
        return _DeletionAccumulator(context.spaces, signed=context.side == "removal")


class _DeletionAccumulator(Accumulator):
    def __init__(self, spaces: Spaces, *, signed: bool) -> None:
        self._spaces, self._means, self._signed = spaces, HalvedMeans(), signed

    def see_deletions(self, loss_change: Callable[[UnitSpace, int], float], info: BatchInfo) -> None:
        self._means.count(info)
        for space in self._spaces:
            changes = torch.tensor(
                [loss_change(space, unit) for unit in range(space.size)], dtype=torch.float64, device="cpu"
            )
            self._means.add(space.name, changes * info.samples, info)

    def join(self, processes: Processes) -> None:
        self._means.join(processes)

    def result(self) -> Result:
        means = {space.name: self._means.of(space.name, space.size) for space in self._spaces}
        return signed(means) if self._signed else absolute(means)
