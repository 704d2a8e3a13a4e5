"""Diagnostics of a plan, space by space: the paper's bounds, and how stable its rankings are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fairpruner.allocation import allocate
from fairpruner.allocation.bounds import depth_limit, mass_bound
from fairpruner.core.arrays import Floats, Ints
from fairpruner.core.budget import METRICS, Budget
from fairpruner.core.correlation import spearman
from fairpruner.core.plan import Plan, check_plan
from fairpruner.core.scores import Scores
from fairpruner.core.tod import removal_order
from fairpruner.core.units import UnitSpace
from fairpruner.errors import FairprunerError
from fairpruner.terminal.tables import table_of

if TYPE_CHECKING:
    from rich.console import Group

# Notes below the table.
LIMITS = (
    "Limit: the largest depth that any two rankings allow at this tolerance. R of bound: the removed"
    " protection scores, as a share of the largest sum possible at this depth and tolerance."
)
EXCHANGE = "Exchange: the last unit removed has no larger protection score than the next unit of any space."
STABILITY = (
    "Stable U, R: rank correlation of the removal and of the protection scores from two halves of the data."
    " Same units: the share of the removed units that both halves would remove."
)


@dataclass(frozen=True)
class SpaceDiagnosis:
    """The facts of one space; None where the scores hold no halves or the depth is 0."""

    space: str
    size: int  # J
    kept: int
    depth: int  # m
    tod: float  # of the removed units
    tolerance: float  # the plan's alpha, or the ToD if that is larger or the plan has no alpha
    limit: int  # the largest depth that any two rankings allow: floor(J / (2 - alpha))
    mass: float  # sum of the removed R-Scores
    bound: float  # the largest such sum at this depth and tolerance: the paper's A(m, alpha)
    exchange: bool  # the last unit removed has no larger R-Score than the next unit of any space
    removal_stability: float | None  # rank correlation of the removal scores of the two halves
    protection_stability: float | None  # the same of the protection scores
    removed_overlap: float | None  # share of the removed units that both halves would remove


@dataclass(frozen=True)
class Diagnosis:
    """The facts of a plan; rich prints it as a table."""

    rule: str
    alpha: float | None
    kept: Mapping[str, float]  # metric -> share
    spaces: tuple[SpaceDiagnosis, ...]
    exchange: bool  # the additive exchange condition holds between all spaces
    rising_costs: bool  # R-Scores never fall along any removal order
    cost: float  # sum of all removed R-Scores: the paper's additive surrogate C(m) with gamma = 0
    uniform_cost: float  # the same sum for the uniform plan that keeps as many units

    @property
    def optimal(self) -> bool:
        """Whether no profile that removes as many units has a lower surrogate cost.

        This is the paper's conditional optimality under additive exchange.
        """
        return self.exchange and self.rising_costs

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for `json.dumps`."""
        return {**asdict(self), "optimal": self.optimal}

    def __rich__(self) -> Group:
        tolerance = "" if self.alpha is None else f" at tolerance {self.alpha:.3g}"
        shares = ", ".join(f"{share:.1%} of {metric}" for metric, share in self.kept.items())
        cost = (
            f"Removed R-Score: {self.cost:.3g}; the uniform plan with as many units removes"
            f" {self.uniform_cost:.3g}."
        )
        exchange = f"The additive exchange condition {'holds' if self.exchange else 'does not hold'}."
        columns = (
            "space",
            "kept",
            "removed\n/limit",
            "ToD",
            "R of\nbound",
            "exchange",
            "stable\nU",
            "stable\nR",
            "same\nunits",
        )
        title = f"{self.rule}{tolerance} keeps {shares}"
        notes = (f"{cost} {exchange}", LIMITS, EXCHANGE, STABILITY)
        return table_of(title, columns, map(_cells, self.spaces), notes=notes)


def diagnose(scores: Scores, plan: Plan) -> Diagnosis:
    """Compare a plan with the paper's bounds, and with the rankings from two halves of the data.

    >>> from fairpruner.core.cost_model import CostModel
    >>> from fairpruner.core.spaces import Spaces
    >>> spaces = Spaces((UnitSpace("conv", "channel", 4, slices=()),), {}, CostModel((), (), ()), "")
    >>> aligned = {"conv": np.array([0.4, 0.1, 0.2, 0.3])}
    >>> scores = Scores(spaces, {"l1": aligned}, {"taylor": aligned}, samples=1)
    >>> diagnosis = diagnose(scores, allocate(scores, alpha=0.5))
    >>> diagnosis.spaces[0].tod, diagnosis.spaces[0].limit, diagnosis.optimal
    (0.0, 2, True)
    """
    check_plan(plan)
    scored, planned = (
        (spaces.fingerprint, [(space.name, space.size) for space in spaces])
        for spaces in (scores.spaces, plan.spaces)
    )
    if scored != planned:
        raise FairprunerError(
            f"The plan ({len(plan.spaces)} spaces) and the scores ({len(scores.spaces)} spaces) belong to"
            " different models or spaces: allocate from these scores."
        )
    # Marginal costs of a space: its R-Scores in the order in which its units are removed, [J].
    costs = {s.name: scores.protection[s.name][plan_order(plan, s, scores)] for s in plan.spaces}
    next_cost = min(costs[name][depth] for name, depth in plan.depths.items())
    rows = tuple(
        _row(scores, plan, space, costs=costs[space.name], next_cost=next_cost) for space in plan.spaces
    )
    uniform = allocate(scores, keep=Budget("units", plan.predicted["units"]), rule="uniform", exact=True)
    return Diagnosis(
        rule=plan.rule,
        alpha=plan.alpha,
        kept={metric: plan.share(metric) for metric in (*METRICS, "experts") if metric in plan.predicted},
        spaces=rows,
        exchange=all(row.exchange for row in rows),
        rising_costs=all(bool((np.diff(cost) >= 0).all()) for cost in costs.values()),
        cost=sum(row.mass for row in rows),
        uniform_cost=sum(
            float(scores.protection[name][list(units)].sum()) for name, units in uniform.removed.items()
        ),
    )


def _row(scores: Scores, plan: Plan, space: UnitSpace, *, costs: Floats, next_cost: float) -> SpaceDiagnosis:
    """The facts of one space; `next_cost` is the lowest cost of removing one more unit from any space."""
    name, size, depth = space.name, space.size, plan.depths[space.name]
    protected = removal_order(-scores.protection[name])[:depth]  # the paper's P(m), by (-R, j)
    tod = np.isin(protected, plan.removed[name]).sum() / max(depth, 1)
    tolerance = max(plan.alpha or 0.0, float(tod))
    removal, protection = (_halves(scores, signal, name) for signal in scores.active)
    return SpaceDiagnosis(
        space=name,
        size=size,
        kept=size - depth,
        depth=depth,
        tod=float(tod),
        tolerance=tolerance,
        limit=depth_limit(size, tolerance),
        mass=float(costs[:depth].sum()),
        bound=mass_bound(scores.protection[name], depth, tolerance),
        exchange=depth == 0 or bool(costs[depth - 1] <= next_cost),
        removal_stability=None if removal is None else spearman(removal[0], removal[1]),
        protection_stability=None if protection is None else spearman(protection[0], protection[1]),
        removed_overlap=None if removal is None else _removed_overlap(removal, depth, space.groups),
    )


def plan_order(plan: Plan, space: UnitSpace, scores: Scores | None) -> Ints:
    """The units that the plan removes, then the others in removal order, [J]; by index without scores."""
    if scores is None:
        order = np.arange(space.size)
    else:
        order = removal_order(scores.removal[space.name], space.groups)
    removed = np.array(plan.removed[space.name], dtype=np.int64)
    return np.concatenate([removed, order[~np.isin(order, removed)]])


def _halves(scores: Scores, signal: str, space: str) -> Floats | None:
    return scores.halves.get(signal, {}).get(space)


def _removed_overlap(halves: Floats, depth: int, groups: int) -> float | None:
    """The share of the first `depth` removed units that the scores of both halves, [2, J], have in common."""
    if depth == 0:
        return None
    first, second = (removal_order(scores, groups)[:depth] for scores in halves)
    return float(np.isin(first, second).sum()) / depth


def _decimal(number: float | None) -> str:
    return "–" if number is None else f"{number:.2f}"


def _cells(row: SpaceDiagnosis) -> tuple[str, ...]:
    share = f"{row.mass / row.bound:.0%}" if row.bound else "–"
    stability = map(_decimal, (row.removal_stability, row.protection_stability, row.removed_overlap))
    return (
        row.space,
        f"{row.kept}/{row.size}",
        f"{row.depth}/{row.limit}",
        _decimal(row.tod),
        share,
        "yes" if row.exchange else "no",
        *stability,
    )
