"""A measurement as tables on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fairpruner.measuring.values import Quantity, Timing
from fairpruner.terminal.tables import stacked, table_of

if TYPE_CHECKING:
    from rich.console import Group


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.4g} {unit}"
        value /= 1000
    return f"{value:.4g} GB"


# unit -> how a value in this unit is printed
FORMATS: dict[str, Callable[[float], str]] = {"": lambda value: f"{value:,.0f}", "B": _bytes}


def measurement_tables(
    quantities: Sequence[Quantity], timings: Sequence[Timing], setting: Mapping[str, Any], *, compared: bool
) -> Group:
    """A table of counts and sizes, then a table of times; `compared` adds the columns of a second model."""
    columns = ("original", "pruned", "kept") if compared else ("model",)
    rows = [(q.name, *_quantity(q, compared)) for q in quantities]
    notes = [f"{q.name}: {q.note}" for q in quantities if q.note]
    parts = [table_of("Measured", ("", *columns), rows, notes=notes)]
    if timings:
        times = ("original ms", "pruned ms", "times faster") if compared else ("ms",)
        timed = [(t.runtime, t.what, t.batch_size, *_timing(t, compared)) for t in timings]
        failures = dict.fromkeys(t.note for t in timings if t.note)
        how = ", ".join(f"{name} {value}" for name, value in setting.items())
        heads = ("runtime", "what", "batch", *times)
        parts.append(table_of("Latency: median (quartiles)", heads, timed, notes=[*failures, how]))
    return stacked(*parts)


def _quantity(quantity: Quantity, compared: bool) -> tuple[str, ...]:
    def text(value: float | None) -> str:
        if value is None:
            return "–"
        known = FORMATS.get(quantity.unit)
        return known(value) if known else f"{value:.3g} {quantity.unit}"

    model, against = quantity.model, quantity.against
    if not compared:
        return (text(model),)
    share = "–" if model is None or not against else f"{model / against:.1%}"
    return text(against), text(model), share


def _timing(timing: Timing, compared: bool) -> tuple[str, ...]:
    spreads = (timing.against, timing.model, timing.speedup) if compared else (timing.model,)
    return tuple("–" if spread is None else str(spread) for spread in spreads)
