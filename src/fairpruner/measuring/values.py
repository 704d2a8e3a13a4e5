"""The values that a measurement consists of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Spread:
    """The median of several repeats, with the quartiles."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Any) -> Spread:
        """The median and the quartiles of some numbers.

        >>> Spread.of([1.0, 2.0, 3.0, 4.0, 5.0])
        Spread(median=3.0, low=2.0, high=4.0)
        """
        low, median, high = np.percentile(values, [25, 50, 75]).tolist()
        return Spread(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g}–{self.high:.3g})"


@dataclass(frozen=True)
class Quantity:
    """One number of the model, and of the model it is compared with.

    A number that could not be measured is None, and `note` has the reason.
    """

    name: str
    unit: str
    model: float | None
    against: float | None = None
    note: str = ""

    @staticmethod
    def of(name: str, unit: str, values: Iterable[float], note: str = "") -> Quantity:
        """A quantity from one value, or from two: of the model, and of the model it is compared with."""
        model, *against = values
        return Quantity(name, unit, model, against[0] if against else None, note)


@dataclass(frozen=True)
class Timing:
    """The milliseconds of a call in one runtime; the two models were called in turn."""

    runtime: str
    what: str  # forward, prefill or decode
    batch_size: int
    model: Spread | None  # None if it could not run; `note` has the reason
    against: Spread | None = None
    speedup: Spread | None = None  # of against / model, computed for each repeat
    note: str = ""

    @staticmethod
    def of(runtime: str, what: str, batch_size: int, times: Any) -> Timing:
        """A timing from milliseconds [1 or 2, repeats]: of the model, and of the one to compare with."""
        model, *against = times
        if not against:
            return Timing(runtime, what, batch_size, Spread.of(model))
        return Timing(
            runtime, what, batch_size, Spread.of(model), Spread.of(against[0]), Spread.of(against[0] / model)
        )
