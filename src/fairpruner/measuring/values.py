"""What was measured: values that print as a table and turn into JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Spread:
    """The median of repeats and the quartiles around it."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Any) -> Spread:
        """
        >>> Spread.of([1.0, 2.0, 3.0, 4.0, 5.0])
        Spread(median=3.0, low=2.0, high=4.0)
        """
        low, median, high = np.percentile(values, [25, 50, 75]).tolist()
        return Spread(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g}–{self.high:.3g})"


@dataclass(frozen=True)
class Quantity:
    """One number of the model, and of what it is compared with; None where it could not be had, and then
    `note` says why.
    """

    name: str
    unit: str
    model: float | None
    against: float | None = None
    note: str = ""

    @staticmethod
    def of(name: str, unit: str, values: Iterable[float], note: str = "") -> Quantity:
        """Of the model, and of what it is compared with, if anything."""
        model, *against = values
        return Quantity(name, unit, model, against[0] if against else None, note)


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a call in one runtime, over interleaved repeats."""

    runtime: str
    what: str  # forward, prefill or decode
    batch_size: int
    model: Spread | None  # None: it could not run, and `note` says why
    against: Spread | None = None
    speedup: Spread | None = None  # of the repeats' own quotients, against / model
    note: str = ""

    @staticmethod
    def of(runtime: str, what: str, batch_size: int, times: Any) -> Timing:
        """From milliseconds [1 or 2, repeats]: of the model, and of what it is compared with in the same
        rounds.
        """
        model, *against = times
        if not against:
            return Timing(runtime, what, batch_size, Spread.of(model))
        return Timing(
            runtime, what, batch_size, Spread.of(model), Spread.of(against[0]), Spread.of(against[0] / model)
        )


@dataclass(frozen=True)
class Measurement:
    """All that `measure` found; its repr is a table, or JSON where rich is not installed."""

    quantities: tuple[Quantity, ...]
    timings: tuple[Timing, ...]
    setting: Mapping[str, Any] = field(default_factory=dict)  # threads, repeats, machine, versions

    @property
    def compared(self) -> bool:
        return any(q.against is not None for q in self.quantities)

    def numbers(self) -> dict[str, dict[str, float]]:
        """Numbers by model, as `fp.report` takes them under `measured`; the latency is that of the first
        timing.
        """
        sides = {"original": "against", "pruned": "model"} if self.compared else {"model": "model"}
        found: dict[str, dict[str, float]] = {}
        for name, side in sides.items():
            values = {q.name.replace(" ", "_"): getattr(q, side) for q in self.quantities}
            spread = getattr(self.timings[0], side) if self.timings else None
            values |= {"latency_ms": spread.median} if spread else {}
            found[name] = {key: value for key, value in values.items() if value is not None}
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for `json.dumps`."""
        return {"format": "fairpruner measurement", "version": 1, **asdict(self)}

    def __rich__(self) -> RenderableType:
        from fairpruner.measuring.table import render

        return render(self)

    def __repr__(self) -> str:
        if find_spec("rich") is None:
            return json.dumps(self.to_json(), indent=1)
        from rich.console import Console

        text = StringIO()
        Console(file=text, width=140, markup=False).print(self)
        return text.getvalue().rstrip()
