"""The report stage: scores, a plan and measurements in; a table, JSON and an interactive page out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import NoneType

from fairpruner.allocation import allocate
from fairpruner.allocation.diagnostics import diagnose
from fairpruner.core.costs import predict
from fairpruner.core.latency import LatencyTable, check_table
from fairpruner.core.plan import Plan
from fairpruner.core.reading import read_plain_json
from fairpruner.core.scores import Scores
from fairpruner.errors import FairprunerError
from fairpruner.files import PLAN, REPORT
from fairpruner.measuring import Measurement
from fairpruner.reporting.facts import SpaceFacts
from fairpruner.reporting.numbers import NumbersByModel, read_numbers
from fairpruner.reporting.output import Report

TOLERANCE = 0.1  # of the first plan that a report of scores alone shows

__all__ = ["Report", "SpaceFacts", "report"]


def report(
    source: Scores | str | Path,
    plan: Plan | str | Path | None = None,
    *,
    measured: NumbersByModel | Measurement | str | Path | None = None,
    latency: LatencyTable | str | Path | None = None,
    title: str | None = None,
) -> Report:
    """Collect the facts about scores, a plan and measured numbers in one report.

    `source` is scores, a scores file, or the folder of a pruned model. With scores, the page lets its reader
    choose any plan; with a folder, it shows the plan of that model only. `plan` is the plan that the page
    shows first: a value, a file or a folder. `measured` is what `measure` returned, or numbers by model, or a
    JSON file of them: {"cut": {"accuracy": 0.91, "flops": 62e6, "latency_ms": 3.1}}. `latency` is a table
    made by `latency_table`, or its file: every plan then also shows its predicted milliseconds.

    >>> from fairpruner.core.cost_model import CostModel
    >>> from fairpruner.core.spaces import Spaces
    >>> from fairpruner.core.units import UnitSpace
    >>> import numpy as np
    >>> spaces = Spaces((UnitSpace("conv", "channel", 4, slices=()),), {}, CostModel((), (), ()), "")
    >>> aligned = {"conv": np.array([0.4, 0.1, 0.2, 0.3])}
    >>> found = report(Scores(spaces, {"l1": aligned}, {"taylor": aligned}, samples=1))
    >>> found.spaces[0].kept, found.diagnosis.optimal
    (2, True)
    """
    _check_types(
        {
            "source": (source, (Scores, str, Path), "scores, their file, or the folder of a pruned model"),
            "plan": (plan, (Plan, str, Path, NoneType), "a plan, its file, or the folder of a pruned model"),
            "latency table": (latency, (LatencyTable, str, Path, NoneType), "a table or its file"),
            "title": (title, (str, NoneType), "text"),
        }
    )
    if isinstance(source, Scores):
        scores: Scores | None = source
        name = title or "Scores"
    else:
        scores = None if Path(source).is_dir() else Scores.load(source)
        name = title or Path(source).name
    numbers = read_numbers(measured.numbers() if isinstance(measured, Measurement) else measured or {})
    table = LatencyTable.load(latency) if isinstance(latency, (str, Path)) else latency
    if scores is not None:
        chosen = _timed(allocate(scores, alpha=TOLERANCE) if plan is None else _plan(plan), table)
        return Report(name, chosen, scores, diagnose(scores, chosen), numbers, table)
    if plan is not None:
        raise FairprunerError(
            f"Folder {source} already holds a plan, and plan= gives a second one: to compare plans,"
            " give the scores instead of the folder."
        )
    folder = Path(str(source))
    numbers = {**_measured_at_saving(folder), **numbers}
    return Report(name, _timed(_plan(folder), table), measured=numbers, latency=table)


def _check_types(arguments: Mapping[str, tuple[object, tuple[type, ...], str]]) -> None:
    """Refuse an argument (name -> value, types, what is expected) of another type."""
    for name, (value, types, expected) in arguments.items():
        if not isinstance(value, types):
            raise FairprunerError(f"The {name} of a report is a {type(value).__name__}, expected {expected}.")


def _plan(plan: Plan | str | Path) -> Plan:
    if isinstance(plan, Plan):
        return plan
    return Plan.load(Path(plan) / PLAN if Path(plan).is_dir() else plan)


def _timed(plan: Plan, table: LatencyTable | None) -> Plan:
    """The plan, with predicted milliseconds if there is a latency table."""
    if table is None:
        return plan
    check_table(table, plan.spaces)
    return replace(
        plan, predicted=predict(plan.spaces, plan.removed, table), original=predict(plan.spaces, {}, table)
    )


def _measured_at_saving(folder: Path) -> NumbersByModel:
    """The measured numbers in the report that was saved with a pruned model."""
    if not (folder / REPORT).is_file():
        return {}
    content = read_plain_json(folder / REPORT)
    if not isinstance(content, dict):
        raise FairprunerError(f"{folder / REPORT} is not a report of fairpruner: restore it, or remove it.")
    return read_numbers({folder.name: content.get("measured", {})})
