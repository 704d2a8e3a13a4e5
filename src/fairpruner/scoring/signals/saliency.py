"""The removal signal `saliency`: the absolute products of weights and gradients, summed over each unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from fairpruner.core.arrays import Floats
from fairpruner.core.costs import unit_savings
from fairpruner.scoring.processes import Processes
from fairpruner.scoring.signals.base import Accumulator, BatchInfo, Context, Observation, Result, Signal
from fairpruner.scoring.signals.protection import HalvedMeans, by_owner, signed, sums_of_products


@dataclass(frozen=True)
class Saliency(Signal):
    """The mean over batches of |gradient x weight|, summed over the weights of a unit, per FLOP of a unit.

    `taylor` sums the same products with their signs, so that large ones cancel. The division lets the rule
    `global` compare units of different sizes, as for `reconstruction`.
    """

    name: str = "saliency"
    needs: ClassVar[frozenset[Observation]] = frozenset({"gradients"})

    def start(self, context: Context) -> Accumulator:
        return _SaliencyAccumulator(context)


class _SaliencyAccumulator(Accumulator):
    def __init__(self, context: Context) -> None:
        self._spaces = context.spaces
        self._weights = dict(context.model.named_parameters(remove_duplicate=False))
        parts = [part for space in context.spaces for part in space.slices if part.tensor in self._weights]
        self._dims: dict[str, dict[int, None]] = {}  # tensor -> the dims along which units own slices
        for part in parts:
            self._dims.setdefault(part.tensor, {})[part.dim] = None
        self._means = HalvedMeans()

    def see_gradients(self, gradients: Mapping[str, Tensor], info: BatchInfo) -> None:
        self._means.count(info)
        for tensor, dims in self._dims.items():
            if tensor in gradients:
                slope, weight = (t[tensor].detach() for t in (gradients, self._weights))
                for dim, sums in sums_of_products(slope, weight, dims, absolute=True).items():
                    self._means.add((tensor, dim), sums * info.samples, info)

    def join(self, processes: Processes) -> None:
        self._means.join(processes)

    def result(self) -> Result:
        found: dict[str, Floats] = {}
        savings = unit_savings(self._spaces, "flops")
        for space in self._spaces:
            rows = [
                by_owner(self._means.of((part.tensor, part.dim), part.owner.size), part.owner, space.size)
                for part in space.slices
                if part.tensor in self._weights
            ]
            found[space.name] = np.sum(rows, axis=0) / savings[space.name]["flops"]
        return signed(found)
