"""A report as tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fairpruner.core.plan import describe_plan
from fairpruner.core.trials import COLUMNS, Trial
from fairpruner.reporting.facts import ReportContent
from fairpruner.terminal.tables import amount, stacked, table_of

if TYPE_CHECKING:
    from rich.console import Group, RenderableType


def report_tables(report: ReportContent) -> Group:
    """All tables of a report, from totals to measured numbers, and below them the spaces left out."""
    parts: list[RenderableType] = [_totals(report), _spaces(report)]
    if report.plan.tried:
        parts.append(trials_table(report.plan.tried))
    if report.diagnosis is not None:
        parts.append(report.diagnosis)
    if report.measured:
        parts.append(_measured(report))
    return stacked(
        *parts, *(f"Left out {name}: {reason}" for name, reason in report.plan.spaces.left_out.items())
    )


def trials_table(trials: Sequence[Trial]) -> Group:
    """The trials of a search, with a mark on the chosen one."""
    return table_of(
        f"Tried {len(trials)} repaired cuts",
        COLUMNS,
        [trial.cells for trial in trials],
        notes=[
            "Distance: from the original's outputs, on samples that no repair used (on all, if fewer than 5)."
        ],
    )


def _totals(report: ReportContent) -> Group:
    rows = [
        (m, amount(report.before[m]), amount(kept), f"{report.plan.share(m):.1%}")
        for m, kept in report.after.items()
    ]
    return table_of(
        f"{report.title}: {describe_plan(report.plan)}",
        ("", "before", "after", "kept"),
        rows,
        notes=["FLOPs are multiply-accumulates (MACs)."],
    )


def _spaces(report: ReportContent) -> Group:
    rows = [(r.space, r.kind, r.size, r.kept, *map(_change, (r.params, r.flops))) for r in report.spaces]
    sums = [
        sum(column)
        for column in zip(*((r.size, r.kept, *r.params, *r.flops) for r in report.spaces), strict=True)
    ]
    total = ("total", "", sums[0], sums[1], _change((sums[2], sums[3])), _change((sums[4], sums[5])))
    return table_of(
        "Spaces",
        ("space", "kind", "units", "kept", "params", "FLOPs"),
        [*rows, total],
        notes=["A cost that depends on two spaces counts half to each."],
    )


def _measured(report: ReportContent) -> Group:
    numbers = list(dict.fromkeys(name for values in report.measured.values() for name in values))
    rows = [
        (model, *(_number(values.get(name)) for name in numbers)) for model, values in report.measured.items()
    ]
    return table_of("Measured", ("", *numbers), rows)


def _change(pair: tuple[float, float]) -> str:
    # One decimal shows the halves of costs that two spaces share, so that columns add up.
    return " → ".join(f"{value:,.1f}".removesuffix(".0") for value in pair)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
