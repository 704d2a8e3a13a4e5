"""The result of `measure`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fairpruner.core.marks import MEASUREMENT, mark
from fairpruner.measuring.table import measurement_tables
from fairpruner.measuring.values import Quantity, Timing
from fairpruner.terminal.tables import printed

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Measurement:
    """All that `measure` found; its repr is a table, or JSON where rich is not installed."""

    quantities: tuple[Quantity, ...]
    timings: tuple[Timing, ...]
    setting: Mapping[str, Any] = field(default_factory=dict)  # threads, repeats, machine, versions

    @property
    def compared(self) -> bool:
        """Whether two models were measured."""
        return any(quantity.against is not None for quantity in self.quantities)

    def numbers(self) -> dict[str, dict[str, float]]:
        """The numbers of each model, in the form that `fp.report` takes as `measured`.

        The latency is the median of the first timing.
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
        """Plain values, ready for `json.dumps`; as a file, `report --measured` reads its numbers."""
        return {"format": mark(MEASUREMENT), "version": 1, **asdict(self), "numbers": self.numbers()}

    def __rich__(self) -> RenderableType:
        return measurement_tables(self.quantities, self.timings, self.setting, compared=self.compared)

    def __repr__(self) -> str:
        if find_spec("rich") is None:
            return json.dumps(self.to_json(), indent=1)
        return printed(self)
