"""The removal signal that knows about repair: in what order units can go with the least error once the
rest compensates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fairpruner.core.arrays import Floats
from fairpruner.core.costs import predict
from fairpruner.core.spaces import Spaces, UnitSpace
from fairpruner.models.observing import positions_of
from fairpruner.scoring.processes import Processes
from fairpruner.scoring.signals.base import Accumulator, Context, Observation, Result, Signal

# share of the units' mean variance that is added to each, so that redundant units leave the covariance
# invertible
DAMPING = 1e-6


@dataclass(frozen=True)
class Reconstruction(Signal):
    """Greedy removal by the least squares error of what consumers compute, the kept units compensating
    (Optimal Brain Surgeon).

    A unit's score is the error summed up to its removal, divided by the FLOPs that one unit of the space
    costs: sorting within a space gives the greedy order, and the rule `global`, which compares spaces,
    spends FLOPs where they count.
    """

    name: str = "reconstruction"
    needs: ClassVar[frozenset[Observation]] = frozenset({"activations"})

    def start(self, context: Context) -> Accumulator:
        return _ReconstructionAccumulator(context)


class _ReconstructionAccumulator(Accumulator):
    def __init__(self, context: Context) -> None:
        self._context = context
        self._moments = {space.name: _Moments(space) for space in context.spaces}

    def see_activation(self, space: UnitSpace, activation: Tensor, labels: Tensor) -> None:
        self._moments[space.name].update(activation)

    def join(self, processes: Processes) -> None:
        for moments in self._moments.values():
            moments.join(processes)

    def result(self) -> Result:
        scores, halves = {}, {}
        for space in self._context.spaces:
            moments = self._moments[space.name]
            weights = reading_gram(space, self._context.model, moments.width) / unit_flops(
                space, self._context.spaces
            )
            scores[space.name] = greedy_errors(moments.covariance((0, 1)), weights, space.size)
            halves[space.name] = np.stack(
                [greedy_errors(moments.covariance((parity,)), weights, space.size) for parity in (0, 1)]
            )
        return Result(scores, halves)


class _Moments:
    """Sums of what consumers read and of its products, over the even and over the odd samples.

    A unit of D features of its own, as the output of a head, fills D rows; positions of one map are
    further samples of one row.
    """

    def __init__(self, space: UnitSpace) -> None:
        self.width = columns(space)  # D
        size = space.size * self.width
        self._products = np.zeros((2, size, size))
        self._sums = np.zeros((2, size))
        self._rows = np.zeros(2)
        self._samples = 0

    def update(self, activation: Tensor) -> None:
        rows = activation.unflatten(2, (self.width, -1)).flatten(1, 2)  # [N, J D, positions]
        for parity in (0, 1):
            own = rows[(parity - self._samples) % 2 :: 2].transpose(0, 1).flatten(1)  # [J D, rows]
            own = own.double() if own.dtype == torch.float64 else own.float()
            self._products[parity] += (own @ own.T).double().cpu().numpy()
            self._sums[parity] += own.sum(1, dtype=torch.float64).cpu().numpy()
            self._rows[parity] += own.shape[1]
        self._samples += len(activation)

    def join(self, processes: Processes) -> None:
        everybody = processes.gathered((self._products, self._sums, self._rows))
        self._products, self._sums, self._rows = (
            np.sum(parts, axis=0) for parts in zip(*everybody, strict=True)
        )

    def covariance(self, parities: tuple[int, ...]) -> Floats:
        """[J D, J D]; zero if there were no samples."""
        chosen = list(parities)
        rows = max(self._rows[chosen].sum(), 1)
        mean = self._sums[chosen].sum(0) / rows
        covariance: Floats = self._products[chosen].sum(0) / rows - np.outer(mean, mean)
        return covariance


def unit_flops(space: UnitSpace, spaces: Spaces) -> int:
    """What the whole model saves by one unit of the space, at least 1."""
    whole, without = (predict(spaces, removed)["flops"] for removed in ({}, {space.name: (0,)}))
    return max(int(whole - without), 1)


def columns(space: UnitSpace) -> int:
    """How many features of its own a unit has where it is observed: a head its size, a channel or hidden
    unit one.
    """
    owner = space.observed.owner
    return int(np.bincount(owner[owner >= 0]).max()) if space.kind == "head" else 1


def reading_gram(space: UnitSpace, model: nn.Module, width: int) -> Floats:
    """Products of the weights that read the units, over all consumers, [J D, J D]."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    gram = np.zeros((space.size * width, space.size * width))
    for part in space.slices_of("read"):
        rows = (
            tensors[part.tensor].detach().movedim(part.dim, 0).flatten(1).double().cpu().numpy()
        )  # [indices, R]
        table = positions_of(part.owner, space.size)  # [J, indices of a unit]
        if table.shape[1] % width:
            continue  # reads the units in another form than the one observed
        for own in table.reshape(space.size, width, -1).transpose(2, 0, 1).reshape(-1, space.size * width):
            values = rows[own] * (own >= 0)[:, None]  # [J D, R]
            gram += values @ values.T
    return gram


def greedy_errors(covariance: Floats, weights: Floats, units: int) -> Floats:
    """The summed error of the consumers' outputs as each unit goes, [J], from [J D, J D] moments of
    inputs and of weights.

    Each step removes the unit whose loss, W_j [C^-1]_jj^-1 W_j', is smallest, and lets the others take
    over its part.
    """
    width = len(covariance) // units
    damping = DAMPING * np.trace(covariance) / len(covariance) or 1.0
    inverse = torch.from_numpy(np.linalg.inv(covariance + damping * np.eye(len(covariance))))
    gram = torch.from_numpy(weights.copy())
    left, alive = (
        np.arange(units),
        np.ones(units, dtype=bool),
    )  # the units whose rows the matrices hold, and which of them have not gone
    score, total = np.zeros(units), 0.0
    for _ in range(units):
        if 4 * alive.sum() <= 3 * alive.size:  # rows of units that have gone cost time in every step
            rows = torch.from_numpy(np.flatnonzero(np.repeat(alive, width)))
            inverse, gram = inverse[rows][:, rows], gram[rows][:, rows]
            left, alive = left[alive], alive[alive]
        own = torch.linalg.inv(_diagonal(inverse, width))  # [units left, D, D]
        errors = torch.where(
            torch.from_numpy(alive), (own * _diagonal(gram, width).mT).sum((1, 2)), torch.inf
        )
        position = int(errors.argmin())
        # Ties are told apart by the last bit, so that the order survives sorting.
        total = max(total + max(float(errors[position]), 0.0), float(np.nextafter(total, np.inf)))
        score[left[position]], alive[position] = total, False
        # What the kept units take over: W_k += gain W_j, with gain = -C^-1_kj [C^-1_jj]^-1.
        gone = slice(position * width, (position + 1) * width)
        gain = -inverse[:, gone] @ own[position]  # [rows, D]
        gain[gone] = -torch.eye(width, dtype=gain.dtype)
        inverse.addmm_(gain, inverse[gone].clone())
        gram.addmm_(
            torch.cat([gain, gram[:, gone] + gain @ gram[gone, gone]], 1), torch.cat([gram[gone], gain.T])
        )
        inverse[gone], inverse[:, gone] = 0.0, 0.0
        inverse[gone, gone] = torch.eye(width, dtype=inverse.dtype)
    return score


def _diagonal(matrix: Tensor, width: int) -> Tensor:
    """The blocks on the diagonal, [J, D, D]."""
    blocks: Tensor = (
        matrix.unflatten(1, (-1, width)).unflatten(0, (-1, width)).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    )
    return blocks
