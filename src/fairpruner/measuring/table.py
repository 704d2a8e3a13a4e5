"""A measurement in the terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group

from fairpruner.measuring.values import Measurement, Quantity, Timing
from fairpruner.terminal import table_of


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.4g} {unit}"
        value /= 1000
    return f"{value:.4g} GB"


SHOWN: dict[str, Callable[[float], str]] = {"": lambda value: f"{value:,.0f}", "B": _bytes}


def render(measurement: Measurement) -> Group:
    """Counts and sizes, then times: each with what it is compared with, where that was asked for."""
    compared = measurement.compared
    columns = ("original", "pruned", "kept") if compared else ("model",)
    rows = [(q.name, *_quantity(q, compared)) for q in measurement.quantities]
    notes = [f"{q.name}: {q.note}" for q in measurement.quantities if q.note]
    setting = ", ".join(f"{name} {value}" for name, value in measurement.setting.items())
    parts = [table_of("Measured", ("", *columns), rows, notes=notes)]
    if measurement.timings:
        heads = (
            "runtime",
            "what",
            "batch",
            *(("original ms", "pruned ms", "times faster") if compared else ("ms",)),
        )
        timed = [(t.runtime, t.what, t.batch_size, *_timing(t, compared)) for t in measurement.timings]
        failed = dict.fromkeys(t.note for t in measurement.timings if t.note)
        parts.append(table_of("Latency: median (quartiles)", heads, timed, notes=[*failed, setting]))
    return Group(*parts)


def _quantity(q: Quantity, compared: bool) -> tuple[str, ...]:
    def shown(value: float | None) -> str:
        if value is None:
            return "–"
        return SHOWN[q.unit](value) if q.unit in SHOWN else f"{value:.3g} {q.unit}"

    if not compared:
        return (shown(q.model),)
    share = "–" if q.model is None or not q.against else f"{q.model / q.against:.1%}"
    return shown(q.against), shown(q.model), share


def _timing(t: Timing, compared: bool) -> tuple[str, ...]:
    spreads = (t.against, t.model, t.speedup) if compared else (t.model,)
    return tuple("–" if spread is None else str(spread) for spread in spreads)
