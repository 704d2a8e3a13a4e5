"""The removal signal `influence` of residual blocks: how much a block changes the direction of its stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from fairpruner.core.spaces import Spaces
from fairpruner.core.units import Kind, UnitSpace
from fairpruner.models.devices import in_float64
from fairpruner.models.precision import in_float32
from fairpruner.scoring.processes import Processes
from fairpruner.scoring.signals.base import (
    RESIDUAL,
    Accumulator,
    BatchInfo,
    Context,
    Observation,
    Result,
    Signal,
)
from fairpruner.scoring.signals.protection import HalvedMeans, signed


@dataclass(frozen=True)
class Influence(Signal):
    """One minus the cosine of the stream before and after a block: the block influence of ShortGPT.

    It is the mean over tokens, or over positions of maps.
    """

    name: str = "influence"
    kinds: ClassVar[frozenset[Kind]] = RESIDUAL
    needs: ClassVar[frozenset[Observation]] = frozenset({"blocks"})

    def start(self, context: Context) -> Accumulator:
        return _InfluenceAccumulator(context.spaces)


class _InfluenceAccumulator(Accumulator):
    def __init__(self, spaces: Spaces) -> None:
        self._spaces, self._means = spaces, HalvedMeans()

    def see_block(self, space: UnitSpace, unit: int, streams: tuple[Tensor, Tensor], info: BatchInfo) -> None:
        before, after = (in_float32(stream) for stream in streams)  # [rows, C]
        turned = 1 - in_float64(F.cosine_similarity(before, after, dim=1)).mean()
        self._means.add((space.name, unit), turned.reshape(1) * info.samples, info)
        if unit == 0:
            self._means.count(info)

    def join(self, processes: Processes) -> None:
        self._means.join(processes)

    def result(self) -> Result:
        found = {
            space.name: np.concatenate(
                [self._means.of((space.name, unit), 1) for unit in range(space.size)], axis=1
            )
            for space in self._spaces
        }
        return signed(found)
