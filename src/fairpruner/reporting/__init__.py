"""The report stage: scores, a plan and measurements in, one value out that is a table, JSON and an
interactive page.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fairpruner.allocation import allocate
from fairpruner.allocation.diagnostics import diagnose
from fairpruner.core.costs import predict
from fairpruner.core.latency import LatencyTable, check_table
from fairpruner.core.plan import Plan
from fairpruner.core.scores import Scores
from fairpruner.errors import FairprunerError
from fairpruner.files import PLAN, REPORT
from fairpruner.reporting.facts import Report, SpaceFacts
from fairpruner.reporting.measured import Measured, measured_from, read_json

TOLERANCE = 0.1  # that a report of scores alone begins with

__all__ = ["Report", "SpaceFacts", "report"]


def report(
    source: Scores | str | Path,
    plan: Plan | str | Path | None = None,
    *,
    measured: Measured | str | Path | None = None,
    latency: LatencyTable | str | Path | None = None,
    title: str | None = None,
) -> Report:
    """Gather what there is to know about scores, a plan and what was measured.

    `source` is scores or their file, from which the page lets its reader choose any plan, or the folder
    of a pruned model, which tells about that model's plan alone. `plan` is the one to begin with: a
    value, a file or a folder. `measured` holds numbers by model, or is a JSON file of them: {"cut":
    {"accuracy": 0.91, "flops": 62e6, "latency_ms": 3.1}}. `latency` is a table of `latency_table` or its
    file: every plan then tells its predicted milliseconds.

    >>> from fairpruner.core.spaces import CostModel, Spaces, UnitSpace
    >>> import numpy as np
    >>> spaces = Spaces((UnitSpace("conv", "channel", 4, slices=()),), {}, CostModel((), (), ()), "")
    >>> aligned = {"conv": np.array([0.4, 0.1, 0.2, 0.3])}
    >>> told = report(Scores(spaces, {"l1": aligned}, {"taylor": aligned}, samples=1))
    >>> told.spaces[0].kept, told.diagnosis.optimal
    (2, True)
    """
    scores = source if isinstance(source, Scores) else None if Path(source).is_dir() else Scores.load(source)
    name = title or ("Scores" if isinstance(source, Scores) else Path(source).name)
    numbers = measured_from(measured or {})
    table = LatencyTable.load(latency) if isinstance(latency, (str, Path)) else latency
    if scores is not None:
        chosen = _timed(allocate(scores, alpha=TOLERANCE) if plan is None else _plan(plan), table)
        return Report(name, chosen, scores, diagnose(scores, chosen), numbers, table)
    if plan is not None:
        raise FairprunerError(
            f"Folder {source} holds a plan of its own, and a second one was given: give the scores first to"
            " compare plans."
        )
    folder = Path(str(source))
    return Report(
        name, _timed(_plan(folder), table), measured={**_measured_at_saving(folder), **numbers}, latency=table
    )


def _plan(plan: Plan | str | Path) -> Plan:
    if isinstance(plan, Plan):
        return plan
    return Plan.load(Path(plan) / PLAN if Path(plan).is_dir() else plan)


def _timed(plan: Plan, table: LatencyTable | None) -> Plan:
    """The plan with its predicted milliseconds, where there is a table to predict them from."""
    if table is None:
        return plan
    check_table(table, plan.spaces)
    return replace(
        plan, predicted=predict(plan.spaces, plan.removed, table), original=predict(plan.spaces, {}, table)
    )


def _measured_at_saving(folder: Path) -> Measured:
    """What the folder's own report says."""
    if not (folder / REPORT).is_file():
        return {}
    return measured_from({folder.name: read_json(folder / REPORT).get("measured", {})})
