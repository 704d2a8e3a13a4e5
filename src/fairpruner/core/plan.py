"""A plan: which units of every space are removed, and what the smaller model costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from fairpruner.core.budget import METRICS
from fairpruner.core.costs import predict
from fairpruner.core.fields import field, listed, mapped, real, text, truth, whole
from fairpruner.core.reading import understanding
from fairpruner.core.sealed import Json, read_json, write_json
from fairpruner.core.spaces import Spaces
from fairpruner.core.trials import Trial
from fairpruner.core.units import UnitSpace
from fairpruner.errors import FairprunerError, unknown
from fairpruner.terminal.text import text_table


@dataclass(frozen=True, eq=False)
class Plan:
    """Which units of every space are removed, and what the smaller model will cost; `cut` needs no more."""

    spaces: Spaces
    removed: Mapping[str, tuple[int, ...]]  # space -> unit indices, in removal order
    alpha: float | None  # None: not made by the ToD rule
    rule: str
    exact: bool  # the last few units were chosen to hit a count, so ToD <= alpha may not hold
    predicted: Mapping[str, float]  # metric -> kept count, or milliseconds
    original: Mapping[str, float]
    tried: tuple[Trial, ...] = ()  # what the search tried that chose this plan; empty without a search

    def __post_init__(self) -> None:
        if set(self.removed) != set(self.spaces.names):
            raise FairprunerError(
                f"The plan removes from the spaces {sorted(self.removed)}, expected"
                f" {sorted(self.spaces.names)}."
            )
        for space in self.spaces:
            units = self.removed[space.name]
            _check_units(space, units)
            if space.size - len(units) < space.min_keep:
                raise FairprunerError(
                    f"The plan keeps {space.size - len(units)} units of space {space.name!r}, expected at"
                    f" least {space.min_keep}."
                )
            group = np.array(units, dtype=np.int64) * space.groups // space.size
            lost = np.bincount(group, minlength=space.groups)
            if (lost != lost[0]).any():
                raise FairprunerError(
                    f"The plan removes {lost.tolist()} units from the groups of space {space.name!r},"
                    " expected equally many from each."
                )

    def __repr__(self) -> str:
        kept = self.kept
        rows = [(s.name, s.kind, f"{s.size:,}", f"{kept[s.name]:,}") for s in self.spaces]
        return f"Plan: {describe_plan(self)}\n{text_table(('space', 'kind', 'units', 'kept'), rows)}"

    @property
    def depths(self) -> dict[str, int]:
        return {name: len(units) for name, units in self.removed.items()}

    @property
    def kept(self) -> dict[str, int]:
        """How many units of each space are left; none of a space inside a removed block."""
        inside = self.spaces.enclosing
        gone = {name for name, (blocks, unit) in inside.items() if unit in self.removed[blocks]}
        return {s.name: 0 if s.name in gone else s.size - len(self.removed[s.name]) for s in self.spaces}

    def share(self, metric: str) -> float:
        """The kept share of a metric."""
        if metric not in self.predicted:
            raise unknown("metric", metric, self.predicted)
        return self.predicted[metric] / (self.original[metric] or 1)

    @staticmethod
    def removing(spaces: Spaces, removed: Mapping[str, Sequence[int]]) -> Plan:
        """A plan that removes exactly these units; spaces that are not named keep all units."""
        for name in removed:
            _ = spaces[str(name)]  # an error that names the space, if there is none of this name
            if not isinstance(name, str):
                raise FairprunerError(
                    f"The space {name!r} is a {type(name).__name__}, expected a name as text."
                )
        units = {space.name: _units(space, removed.get(space.name, ())) for space in spaces}
        return Plan(spaces, units, None, "given", False, predict(spaces, units), predict(spaces, {}))

    def save(self, path: str | Path) -> None:
        """Write the plan to one readable JSON file, which is enough for `cut`."""
        write_json(path, "plan", self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan; a plan without a digest, which people may edit by hand, is accepted."""
        content = read_json(path, "plan")
        with understanding(path):
            return Plan.from_json(content)

    def to_json(self) -> Json:
        """The plan with its spaces as JSON values; what people read comes first."""
        return {
            "rule": self.rule,
            "alpha": None if self.alpha is None else float(self.alpha),
            "exact": bool(self.exact),
            "original": {metric: _plain(amount) for metric, amount in self.original.items()},
            "predicted": {metric: _plain(amount) for metric, amount in self.predicted.items()},
            **({"tried": [trial.to_json() for trial in self.tried]} if self.tried else {}),
            "removed": {name: [int(unit) for unit in units] for name, units in self.removed.items()},
            "spaces": self.spaces.to_json(),
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Plan:
        """The plan that gave this `to_json`; its costs are predicted again, not taken from the file."""
        spaces = Spaces.from_json(field(content, "spaces"))
        removed = {
            name: tuple(
                whole(unit, f"a unit of space {name!r}") for unit in listed(units, "the removed units")
            )
            for name, units in mapped(field(content, "removed"), "removed").items()
        }
        alpha = field(content, "alpha")
        plan = Plan(
            spaces=spaces,
            removed=removed,
            alpha=None if alpha is None else real(alpha, "alpha"),
            rule=text(field(content, "rule"), "rule"),
            exact=truth(field(content, "exact"), "exact"),
            predicted={},
            original={},
            tried=tuple(map(Trial.from_json, listed(content.get("tried", []), "tried"))),
        )
        return replace(
            plan,
            predicted={**predict(spaces, removed), **_latency(content.get("predicted"))},
            original={**predict(spaces, {}), **_latency(content.get("original"))},
        )


def _latency(claimed: Any) -> dict[str, float]:
    """The milliseconds that a file states; without the latency table they cannot be computed again."""
    if not isinstance(claimed, dict) or "latency_ms" not in claimed:
        return {}
    milliseconds = real(claimed["latency_ms"], "latency_ms")
    if milliseconds < 0:
        raise FairprunerError(f"latency_ms is {milliseconds}, expected 0 or more milliseconds.")
    return {"latency_ms": milliseconds}


def _units(space: UnitSpace, given: Any) -> tuple[int, ...]:
    """Units of a space from any sequence of whole numbers."""
    if not isinstance(given, Iterable):
        raise FairprunerError(
            f"The units to remove of space {space.name!r} are {given!r}, expected a sequence of indices."
        )
    units = tuple(_unit(space.name, unit) for unit in given)
    _check_units(space, units)
    return units


def _check_units(space: UnitSpace, units: Sequence[int]) -> None:
    if len(set(units)) != len(units) or any(not 0 <= u < space.size for u in units):
        raise FairprunerError(
            f"The plan's units of space {space.name!r} must be distinct and in [0, {space.size}),"
            f" found {str(units)[:100]}."
        )


def _unit(space: str, given: Any) -> int:
    """A unit's index from an integer of Python, numpy or torch."""
    try:
        number = None if isinstance(given, (bool, np.bool_)) else index(given)
    except TypeError:
        number = None
    if number is None:
        raise FairprunerError(
            f"The units to remove of space {space!r} hold {given!r}, expected whole numbers: the indices of"
            " units, counted from 0."
        )
    return number


def _plain(amount: float) -> float:
    """A count as an int, milliseconds as a float."""
    return float(amount) if isinstance(amount, (float, np.floating)) else int(amount)


def plan_facts(plan: Plan) -> dict[str, Any]:
    """A plan's numbers without its units."""
    shares = {metric: plan.share(metric) for metric in plan.predicted}
    return {
        "rule": plan.rule,
        "alpha": plan.alpha,
        "exact": plan.exact,
        "original": dict(plan.original),
        "predicted": dict(plan.predicted),
        "share": shares,
    }


def describe_plan(plan: Plan) -> str:
    """The rule, the tolerance and the kept shares, in one line."""
    tolerance = "" if plan.alpha is None else f" at tolerance {plan.alpha:.3g}"
    return f"{plan.rule}{tolerance} keeps " + ", ".join(
        f"{plan.share(metric):.1%} of {metric}" for metric in METRICS
    )


def check_plan(plan: object) -> None:
    """Raise unless `plan` is a plan: units alone do not say of which model they are."""
    if not isinstance(plan, Plan):
        raise FairprunerError(
            f"The plan is a {type(plan).__name__}, expected a Plan: from allocate, prune or Plan.load, or"
            " Plan.removing(spaces, units) for units that you choose."
        )
