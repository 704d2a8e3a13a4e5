"""Removal signals that need no classes: norms and distances of weights, activations, or chance."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fairpruner.core.arrays import Floats, Ints
from fairpruner.core.units import KINDS, Kind, UnitSpace
from fairpruner.errors import FairprunerError
from fairpruner.models.precision import wide_dtype
from fairpruner.models.reads import positions_of
from fairpruner.scoring.processes import Processes
from fairpruner.scoring.signals.base import (
    Accumulator,
    ActivationSignal,
    Context,
    Result,
    Signal,
    WeightSignal,
)

GRAM_COLUMNS = 4096  # weights of a unit that are compared at once, which bounds the memory of fpgm


def written(space: UnitSpace, model: nn.Module) -> Iterator[tuple[Tensor, Ints]]:
    """The weights that compute the units: for each tensor its rows, [indices, R], and the unit of each."""
    tensors = {
        **dict(model.named_buffers(remove_duplicate=False)),
        **dict(model.named_parameters(remove_duplicate=False)),
    }
    listed = {part: model.get_submodule(part.tensor) for part in space.slices if part.tensor not in tensors}
    for part, experts in listed.items():
        for same in zip(*(expert.parameters() for expert in experts.children()), strict=True):
            if same[0].ndim > 1:  # biases are left out, as for other units than experts
                yield torch.stack([matrix.detach().flatten() for matrix in same]), part.owner
    parts = (*space.slices_of("write"), *space.slices_of("add"))
    if not parts and not listed:
        raise FairprunerError(
            f"Space {space.name!r} has no weights that write its units, so l1, l2 and fpgm cannot score it:"
            " choose another removal signal."
        )
    for part in parts:
        rows = tensors[part.tensor].detach().movedim(part.dim, 0)
        if part.role == "write" or rows.ndim > 1:  # a block may end in a vector
            yield rows.flatten(1), part.owner


def l1(space: UnitSpace, model: nn.Module) -> Floats:
    """The sum of the absolute weights that compute a unit, [J]."""
    return _per_unit(
        space,
        [(rows.cpu().abs().sum(1, dtype=torch.float64), owner) for rows, owner in written(space, model)],
    )


def l2(space: UnitSpace, model: nn.Module) -> Floats:
    """The Euclidean norm of the weights that compute a unit, [J]."""
    norms = [
        (torch.linalg.vector_norm(rows.cpu(), dim=1, dtype=torch.float64), owner)
        for rows, owner in written(space, model)
    ]
    return np.sqrt(_per_unit(space, [(norm.square(), owner) for norm, owner in norms]))


def _per_unit(space: UnitSpace, parts: Sequence[tuple[Tensor, Ints]]) -> Floats:
    """Values of rows summed over the rows and tensors of each unit, [J]."""
    total = np.zeros(space.size)
    for values, owner in parts:
        np.add.at(total, owner[owner >= 0], values.cpu().numpy()[owner >= 0])
    return total


def fpgm(space: UnitSpace, model: nn.Module) -> Floats:
    """The sum of distances to all other units of the space, [J]: small near their geometric median."""
    if space.kind == "block":
        raise FairprunerError(
            f"Signal 'fpgm' compares units of equal shape, and those of {space.name!r} are residual blocks:"
            " write removal={'block': 'influence', …}."
        )
    gram = np.zeros((space.size, space.size))
    for rows, owner in written(space, model):
        for own in positions_of(owner, space.size).T:  # the first row of each unit, the second, …
            for chunk in rows.split(GRAM_COLUMNS, dim=1):
                values = chunk[own].cpu().double().numpy() * (own >= 0)[:, None]  # [J, columns]
                gram += values @ values.T
    squares = np.diag(gram)
    distances: Floats = np.sqrt((squares[:, None] + squares - 2 * gram).clip(min=0.0)).sum(1)
    return distances


class MeanActivation:
    """The mean absolute value of what consumers read of a unit; even and odd samples are the two halves."""

    def __init__(self, space: UnitSpace) -> None:
        self._sums = np.zeros((2, space.size))
        self._counts = np.zeros((2, 1))

    def update(self, activation: Tensor, labels: Tensor | None) -> None:
        # [N, J]; float64 only on the CPU, since some devices lack it
        means = activation.abs().mean(2, dtype=wide_dtype(activation)).cpu().double().numpy()
        seen = int(self._counts.sum())
        for parity in (0, 1):
            own = means[(parity - seen) % 2 :: 2]
            self._sums[parity] += own.sum(0)
            self._counts[parity] += len(own)

    def join(self, processes: Processes) -> None:
        everybody = processes.gathered((self._sums, self._counts))
        self._sums, self._counts = (np.sum(parts, axis=0) for parts in zip(*everybody, strict=True))

    def compute(self) -> Floats:
        mean: Floats = self._sums.sum(0) / self._counts.sum()
        return mean

    def halves(self) -> Floats:
        return self._sums / np.maximum(self._counts, 1)


@dataclass(frozen=True)
class Random(Signal):
    """Uniform numbers, fixed by the seed, the side and the space's name."""

    name: str = "random"
    kinds: ClassVar[frozenset[Kind]] = frozenset(KINDS)

    def start(self, context: Context) -> Accumulator:
        return _RandomAccumulator(context)


class _RandomAccumulator(Accumulator):
    def __init__(self, context: Context) -> None:
        self._context = context

    def result(self) -> Result:
        context = self._context
        scores = {}
        for space in context.spaces:
            generator = np.random.default_rng(_seed(context.seed, context.side, space.name))
            scores[space.name] = generator.random(space.size)
        return Result(scores)


def _seed(*parts: object) -> int:
    """A seed that is the same in every process, unlike `hash`."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


L1, L2, FPGM = WeightSignal("l1", l1), WeightSignal("l2", l2), WeightSignal("fpgm", fpgm)
ACTIVATION = ActivationSignal("activation", MeanActivation)
