"""The removal signal `surgeon`: how much the loss grows, to second order, if the kept units compensate.

`reconstruction` gives every squared error of the consumers' outputs the same weight. Here errors are weighted
by their effect on the loss. Let g be the gradient of a sample's loss for x, the input of a consumer. An error
e of x changes the loss by g·e to first order, and by about (g·e)² / 2 on average (the Fisher information).
With errors that are independent of gradients (as in K-FAC), the mean of (g·e)² is tr(G E) with G the mean of
g g' and E that of e e'. This is `reconstruction` with G instead of W W'. So the numbers of all spaces are
changes of one loss, and can be compared: between layers, and between hidden units, heads and whole blocks.

A residual block that adds d to its stream changes the loss by the mean of (g·d)² if it is removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fairpruner.core.arrays import Floats
from fairpruner.core.costs import unit_savings
from fairpruner.core.units import Kind, UnitSpace
from fairpruner.models.devices import in_float64
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
from fairpruner.scoring.signals.reconstruction import CovarianceSums, greedy_errors, groups_within

# In the moments that are held at once; each pass over the data fills as many. One space of 11,008 hidden
# units has nearly as many.
MOST_NUMBERS = 2**28


@dataclass(frozen=True)
class Surgeon(Signal):
    """The growth of the loss by each removal in the greedy order, per FLOP that it saves.

    Within a space, growth never falls: a unit that is removed later scores at least as much.
    """

    name: str = "surgeon"
    kinds: ClassVar[frozenset[Kind]] = DENSE | RESIDUAL
    needs: ClassVar[frozenset[Observation]] = frozenset({"activations", "slopes"})

    def start(self, context: Context) -> Accumulator:
        return _SurgeonAccumulator(context)


class _SurgeonAccumulator(Accumulator):
    """Scores spaces one group after the other; the moments of a group are held during one pass."""

    def __init__(self, context: Context) -> None:
        self._context = context
        dense = [space for space in context.spaces if space.kind in DENSE]
        self._groups = groups_within(MOST_NUMBERS, dense, matrices=2, context=context)
        self._savings = unit_savings(context.spaces, "flops")
        self._scores: dict[str, Floats] = {}
        self._begin()

    def _begin(self) -> None:
        """Take the next group of spaces; what is not of a space is summed anew in every pass."""
        self._read = {space.name: CovarianceSums(space, 1) for space in self._groups[0]}
        self._slopes = {space.name: CovarianceSums(space, 1) for space in self._groups[0]}
        blocks = (space for space in self._context.spaces if space.kind == "block")
        self._blocks = {
            space.name: torch.zeros(space.size, dtype=torch.float64, device="cpu") for space in blocks
        }
        self._samples = np.zeros(1)  # whose losses were summed

    def see_activation(self, space: UnitSpace, activation: Tensor, labels: Tensor | None) -> None:
        if space.name in self._read:
            self._read[space.name].update(activation)

    def see_gradients(self, gradients: object, info: BatchInfo) -> None:
        self._samples += info.samples

    def see_slope(self, space: UnitSpace, slope: Tensor, info: BatchInfo) -> None:
        if space.name in self._slopes:
            self._slopes[space.name].update(slope)

    def see_block_slope(
        self, space: UnitSpace, unit: int, pair: tuple[Tensor, Tensor], info: BatchInfo
    ) -> None:
        added, slope = (in_float32(rows) for rows in pair)  # [rows, C]
        change = in_float64((added * slope).sum(1)).square().sum()
        self._blocks[space.name][unit] += change.cpu()

    def join(self, processes: Processes) -> None:
        for moments in (*self._read.values(), *self._slopes.values()):
            moments.join(processes)
        self._blocks = {name: processes.summed(sums) for name, sums in self._blocks.items()}
        self._samples = np.sum(processes.gathered(self._samples), axis=0)

    def asks_again(self) -> bool:
        if len(self._groups) < 2:
            return False
        self._score_group()
        self._begin()
        return True

    def result(self) -> Result:
        self._score_group()
        spaces = self._context.spaces
        for name, changes in self._blocks.items():
            self._scores[name] = changes.numpy() / self._sample_count / self._savings[name]["flops"]
        return Result({space.name: self._scores[space.name] for space in spaces})

    @property
    def _sample_count(self) -> float:
        return max(float(self._samples[0]), 1.0)

    def _score_group(self) -> None:
        for space in self._groups.pop(0):
            # Popped, so that a space's moments are freed once it is scored.
            read, felt = self._read.pop(space.name), self._slopes.pop(space.name)
            variation = read.covariance((0,)) if _takes_offset(space, self._context.model) else read.second()
            growth = felt.second() * (felt.rows / self._sample_count)  # summed over the places of a sample
            totals = greedy_errors(variation, growth, space.size)
            self._scores[space.name] = _increases(totals) / self._savings[space.name]["flops"]


def _takes_offset(space: UnitSpace, model: nn.Module) -> bool:
    """Whether a repair can add the mean of what was removed: to a bias, or to a norm behind a convolution."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    weight = space.observed.tensor
    return parameters[weight].ndim != 2 or f"{weight.removesuffix('weight')}bias" in parameters


def _increases(totals: Floats) -> Floats:
    """By how much each removal raised the total, at least as much as all before it, [J].

    >>> _increases(np.array([7.0, 1.0, 4.0, 5.0])).round(4).tolist()
    [3.0, 1.0, 3.0, 3.0]
    """
    order = np.argsort(totals, kind="stable")
    found = np.zeros_like(totals)
    last = 0.0
    for unit, increase in zip(order, np.diff(totals[order], prepend=0.0), strict=True):
        # The last bit keeps the order of removals that raise the total by the same.
        last = found[unit] = max(float(increase), float(np.nextafter(last, np.inf)))
    return found
