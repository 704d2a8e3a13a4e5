"""A report as one HTML file that contains its styles, scripts, chart library and numbers."""

from __future__ import annotations

import base64
import html
import json
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairpruner.allocation.diagnostics import plan_order
from fairpruner.core.arrays import Floats, Ints
from fairpruner.core.plan import Plan
from fairpruner.core.scores import Scores
from fairpruner.core.sealed import VERSION, Json
from fairpruner.core.tod import conflict_curve, removal_order
from fairpruner.core.trials import COLUMNS
from fairpruner.core.units import UnitSpace
from fairpruner.core.writing import written_whole
from fairpruner.errors import FairprunerError
from fairpruner.reporting.facts import ReportContent

STYLES = ("uPlot.min.css", "style.css")
# In this order, because each script uses those before it.
SCRIPTS = ("uPlot.iife.min.js", "allocation.js", "charts.js", "views.js", "main.js")


def write_page(report: ReportContent, path: str | Path) -> None:
    """Write the page; an interrupted run leaves no partial file."""
    try:
        page = render_page(report).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, as in the name of a file
        strange = error.object[error.start : error.end]
        raise FairprunerError(
            f"The title or a name in the report has {strange!r}, which UTF-8 cannot hold: give another title."
        ) from error
    with written_whole(path) as temporary:
        temporary.write_bytes(page)


def render_page(report: ReportContent) -> str:
    """The HTML text of the page."""
    data = json.dumps(payload(report), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    parts = {
        "title": html.escape(report.title),
        "styles": "\n".join(map(_asset, STYLES)),
        # A "<" inside a script could end it. JSON allows the escape everywhere.
        "data": data.replace("<", "\\u003c"),
        "scripts": "\n".join(f"<script>\n{_asset(name)}</script>" for name in SCRIPTS),
    }
    page = _asset("page.html")
    for name, text in parts.items():
        page = page.replace(f"<!-- {name} -->", text)
    return page


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def payload(report: ReportContent) -> Json:
    """The data that the page computes with: spaces and costs as in a plan's file, rankings and curves."""
    plan, scores = report.plan, report.scores
    content = plan.to_json()
    del content["spaces"]
    content.pop("tried", None)  # plans that are chosen on the page were not searched
    scored = stability = None
    if scores is not None:
        scored = [_ranking(scores, s, removal_order(scores.removal[s.name], s.groups)) for s in scores.spaces]
    if report.diagnosis is not None:
        stability = [[row.removal_stability, row.protection_stability] for row in report.diagnosis.spaces]
    return {
        "title": report.title,
        "version": version("fairpruner"),
        "file": {"format": "fairpruner plan", "version": VERSION},
        "spaces": (plan.spaces if scores is None else scores.spaces).to_json(),
        "plan": content,
        "tried": {"columns": COLUMNS, "rows": [trial.cells for trial in plan.tried]},
        "signals": dict(report.signals),
        "scored": scored,
        "given": _given(plan, scores),
        "stability": stability,
        "latency": None if report.latency is None else report.latency.to_json(),
        "measured": {model: dict(numbers) for model, numbers in report.measured.items()},
    }


def _given(plan: Plan, scores: Scores | None) -> list[Json] | None:
    """Rankings that begin with the plan's units, or None if the removal scores give the same rankings."""
    orders = {space.name: plan_order(plan, space, scores) for space in plan.spaces}
    if scores is None:
        return [{"order": _packed(order, np.int32)} for order in orders.values()]
    by_score = {s.name: removal_order(scores.removal[s.name], s.groups) for s in plan.spaces}
    if all(np.array_equal(orders[name], by_score[name]) for name in orders):
        return None
    return [_ranking(scores, space, orders[space.name]) for space in plan.spaces]


def _ranking(scores: Scores, space: UnitSpace, order: Ints) -> Json:
    """The scores of one space along an order of its units, [J].

    Units and overlaps are exact, because the page makes plans from them. Scores are float32, because the page
    only draws them.
    """
    removal, protection = scores.removal[space.name], scores.protection[space.name]
    halves = scores.halves.get(scores.active[0], {}).get(space.name)
    same = None
    if halves is not None:
        # The overlap of the two halves' removal rankings is also a conflict curve: the units that the second
        # half removes first take the role of the units to protect.
        second = -_places(removal_order(halves[1], space.groups))
        same = _steps(conflict_curve(halves[0], second, space.groups).overlaps)
    return {
        "order": _packed(order, np.int32),
        "removal": _packed(removal[order], np.float32),
        "protection": _packed(protection[order], np.float32),
        "steps": _steps(conflict_curve(_places(order), protection, space.groups).overlaps),
        "same": same,
    }


def _places(order: Ints) -> Floats:
    """The position of each unit in an order of units, [J]; as a score it gives this order."""
    return np.argsort(order).astype(np.float64)


def _steps(overlaps: Ints) -> str:
    """A curve as J digits: its steps of 0, 1 or 2."""
    return "".join(map(str, np.diff(overlaps).tolist()))


def _packed(values: NDArray[Any], dtype: type) -> str:
    """Numbers as base64 of their little-endian bytes."""
    return base64.b64encode(values.astype(np.dtype(dtype).newbyteorder("<")).tobytes()).decode()
