"""Signals for routed experts: how much routers use them, what they add, and the loss change without them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from fairpruner.core.arrays import Floats
from fairpruner.core.units import Kind
from fairpruner.errors import FairprunerError
from fairpruner.scoring.processes import Processes
from fairpruner.scoring.signals.base import (
    ROUTED,
    Accumulator,
    BatchInfo,
    Context,
    Observation,
    Result,
    Signal,
)
from fairpruner.scoring.signals.protection import HalvedMeans, absolute


@dataclass(frozen=True)
class RoutingShare(Signal):
    """One tally of `RouterOutput.tally`, divided by another, for each expert."""

    name: str
    amount: str
    per: str
    kinds: ClassVar[frozenset[Kind]] = ROUTED
    needs: ClassVar[frozenset[Observation]] = frozenset({"routing"})

    def start(self, context: Context) -> Accumulator:
        return _ShareAccumulator(self, context)


class _ShareAccumulator(Accumulator):
    def __init__(self, signal: RoutingShare, context: Context) -> None:
        self._signal, self._spaces, self._means = signal, context.spaces, HalvedMeans()

    def see_routing(self, tallies: Mapping[str, Mapping[str, Tensor]], info: BatchInfo) -> None:
        self._means.count(info)
        for space in self._spaces:
            for quantity in (self._signal.amount, self._signal.per):
                if quantity not in tallies[space.name]:
                    raise FairprunerError(
                        f"Signal {self._signal.name!r} cannot score space {space.name!r}, whose router does"
                        " not show its logits: use removal='soft_activation'."
                    )
                self._means.add((space.name, quantity), tallies[space.name][quantity], info)

    def join(self, processes: Processes) -> None:
        self._means.join(processes)

    def result(self) -> Result:
        values = {space.name: self._of(space.name, space.size) for space in self._spaces}
        return Result(
            {name: rows[0] for name, rows in values.items()},
            {name: rows[1:] for name, rows in values.items() if len(rows) == 3},
        )

    def _of(self, space: str, size: int) -> Floats:
        # [1 or 3, E] each; the number of tokens is one for all experts, [1 or 3, 1]
        amount, per = (
            self._means.of((space, quantity), size) for quantity in (self._signal.amount, self._signal.per)
        )
        return np.divide(amount, per, out=np.zeros_like(amount), where=per > 0)


SOFT_ACTIVATION = RoutingShare("soft_activation", "weight", "tokens")
SOFT_ACTIVATION_ALL = RoutingShare("soft_activation_all", "softmax", "tokens")
FREQUENCY = RoutingShare("frequency", "selected", "tokens")
REAP = RoutingShare("reap", "output", "selected")


@dataclass(frozen=True)
class RoutedTaylor(Signal):
    """The paper's routing-weighted R-Score: |mean over tokens of g <gradient, weights of the expert>|.

    g is the router weight of the token that uses the expert.
    """

    name: str = "routed_taylor"
    kinds: ClassVar[frozenset[Kind]] = ROUTED
    needs: ClassVar[frozenset[Observation]] = frozenset({"routed_gradients"})
    term: ClassVar[str] = "weighted_term"

    def start(self, context: Context) -> Accumulator:
        return TermAccumulator(self.term, context)


@dataclass(frozen=True)
class RoutedTaylorExact(RoutedTaylor):
    """The paper's equation as written: g is the router weight of the token whose loss is differentiated.

    It takes a backward pass for every position of a text.
    """

    name: str = "routed_taylor_exact"
    needs: ClassVar[frozenset[Observation]] = frozenset({"routed_losses"})
    term: ClassVar[str] = "exact_term"


class TermAccumulator(Accumulator):
    """The absolute mean of a signed tally."""

    def __init__(self, term: str, context: Context) -> None:
        self._term, self._spaces, self._means = term, context.spaces, HalvedMeans()

    def see_routing(self, tallies: Mapping[str, Mapping[str, Tensor]], info: BatchInfo) -> None:
        self._means.count(info)
        for space in self._spaces:
            self._means.add(space.name, tallies[space.name][self._term], info)

    def join(self, processes: Processes) -> None:
        self._means.join(processes)

    def result(self) -> Result:
        return absolute({space.name: self._means.of(space.name, space.size) for space in self._spaces})
