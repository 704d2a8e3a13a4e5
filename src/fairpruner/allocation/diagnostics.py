"""What the paper's theory and the data's two halves say about a plan, space by space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fairpruner.allocation import allocate
from fairpruner.core.arrays import Floats, Ints
from fairpruner.core.budget import METRICS, Budget
from fairpruner.core.plan import Plan
from fairpruner.core.scores import Scores
from fairpruner.core.spaces import UnitSpace
from fairpruner.core.tod import ConflictCurve, removal_order, spearman
from fairpruner.errors import FairprunerError
from fairpruner.terminal import table_of

if TYPE_CHECKING:
    from rich.console import Group

LEGEND = (
    (
        "Limit: the deepest that any ranking could go at this tolerance. R of bound: protection removed, of"
        " the most that depth and tolerance admit."
    ),
    "Exchange: the last unit removed costs no more protection than the next unit of any space.",
    (
        "Stable U, R: rank correlation of removal and protection between two halves of the data. Same units:"
        " what both halves would remove."
    ),
)


@dataclass(frozen=True)
class SpaceDiagnosis:
    """One space of a plan; what the data or the depth leaves undefined is None."""

    space: str
    size: int  # J
    kept: int
    depth: int  # m
    tod: float  # of the units removed
    # the plan's alpha; the ToD itself where there is none, or an exact plan went beyond it
    tolerance: float
    limit: (
        # the largest depth that any ranking could reach at this tolerance: J / (2 - alpha), rounded down
        int
    )
    mass: float  # R-Score mass removed
    bound: float  # the most that this depth and tolerance admit: the paper's A(m, alpha)
    exchange: bool  # the last unit removed costs no more R-Score than the next unit of any space
    removal_stability: float | None  # rank correlation of the removal scores of the two halves
    protection_stability: float | None
    removed_overlap: float | None  # share of the removed units that both halves would remove


@dataclass(frozen=True)
class Diagnosis:
    """A plan's facts; printing it with rich shows a table."""

    rule: str
    alpha: float | None
    kept: Mapping[str, float]  # metric -> share
    spaces: tuple[SpaceDiagnosis, ...]
    exchange: bool  # the additive exchange condition holds between all spaces
    rising_costs: bool  # R-Scores never fall along any removal order
    cost: float  # R-Score mass removed in all: the paper's additive surrogate C(m) with gamma = 0
    uniform_cost: float  # the same for the uniform plan that keeps as many units

    @property
    def optimal(self) -> bool:
        """Whether no profile of as many units has a lower surrogate cost: the paper's conditional
        optimality under additive exchange.
        """
        return self.exchange and self.rising_costs

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for `json.dumps`."""
        return {**asdict(self), "optimal": self.optimal}

    def __rich__(self) -> Group:
        tolerance = "" if self.alpha is None else f" at tolerance {self.alpha:.3g}"
        shares = ", ".join(f"{share:.1%} of {metric}" for metric, share in self.kept.items())
        against = (
            f"R-Score removed {self.cost:.3g}, by the uniform plan of as many units {self.uniform_cost:.3g}"
        )
        exchange = f"additive exchange {'holds' if self.exchange else 'does not hold'}"
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
        return table_of(title, columns, map(_cells, self.spaces), notes=(f"{against}; {exchange}.", *LEGEND))


def diagnose(scores: Scores, plan: Plan) -> Diagnosis:
    """Hold a plan against the paper's bounds and against the two halves of the data it was scored on.

    >>> from fairpruner.core.spaces import CostModel, Spaces
    >>> spaces = Spaces((UnitSpace("conv", "channel", 4, slices=()),), {}, CostModel((), (), ()), "")
    >>> aligned = {"conv": np.array([0.4, 0.1, 0.2, 0.3])}
    >>> scores = Scores(spaces, {"l1": aligned}, {"taylor": aligned}, samples=1)
    >>> diagnosis = diagnose(scores, allocate(scores, alpha=0.5))
    >>> diagnosis.spaces[0].tod, diagnosis.spaces[0].limit, diagnosis.optimal
    (0.0, 2, True)
    """
    if [(s.name, s.size) for s in scores.spaces] != [
        (s.name, s.size) for s in plan.spaces
    ] or scores.spaces.fingerprint != plan.spaces.fingerprint:
        raise FairprunerError(
            f"The plan ({len(plan.spaces)} spaces) and the scores ({len(scores.spaces)} spaces) belong to"
            " different models or spaces: allocate from these scores."
        )
    # Marginal costs of a space: the R-Scores in the order in which its units go, [J].
    costs = {space.name: scores.protection[space.name][_order(scores, plan, space)] for space in plan.spaces}
    next_cost = min(costs[name][depth] for name, depth in plan.depths.items())
    rows = tuple(_row(scores, plan, space, costs[space.name], next_cost) for space in plan.spaces)
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


def _row(scores: Scores, plan: Plan, space: UnitSpace, costs: Floats, next_cost: float) -> SpaceDiagnosis:
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
        removed_overlap=(
            None if removal is None or depth == 0 else _shared(removal[0], removal[1], depth, space.groups)
        ),
    )


def depth_limit(size: int, alpha: float) -> int:
    """The largest depth that some ranking of `size` units can reach: the paper's feasibility lemma, J /
    (2 - alpha) rounded down.

    >>> depth_limit(17, 0.3)
    10
    """
    # Perfect alignment has the least overlap a depth allows, and its quotients compare exactly where 2 -
    # alpha does not.
    aligned = ConflictCurve(np.maximum(0, 2 * np.arange(size + 1) - size))
    return int(np.flatnonzero(aligned.tod <= alpha)[-1])


def mass_bound(protection: Floats, depth: int, alpha: float) -> float:
    """The most R-Score mass that `depth` of the units, [J], can hold at a tolerance: the paper's sharp
    bound A(m, alpha).

    >>> mass_bound(np.array([1.0, 2.0, 3.0, 4.0]), depth=2, alpha=0.5)
    6.0
    """
    if depth == 0:
        return 0.0
    allowed = (
        int(np.searchsorted(np.arange(depth + 1) / depth, alpha, side="right")) - 1
    )  # floor(alpha m), exactly
    falling = np.sort(protection)[::-1]
    return float(falling[:allowed].sum() + falling[depth : 2 * depth - allowed].sum())


def _order(scores: Scores, plan: Plan, space: UnitSpace) -> Ints:
    """The units that the plan removes, then the kept ones in removal order, [J]."""
    order, gone = (
        removal_order(scores.removal[space.name], space.groups),
        np.array(plan.removed[space.name], dtype=np.int64),
    )
    return np.concatenate([gone, order[~np.isin(order, gone)]])


def _halves(scores: Scores, signal: str, space: str) -> Floats | None:
    return scores.halves.get(signal, {}).get(space)


def _shared(first: Floats, second: Floats, depth: int, groups: int) -> float:
    """The share of the first units to go that two score vectors, [J], have in common."""
    return (
        float(np.isin(removal_order(first, groups)[:depth], removal_order(second, groups)[:depth]).sum())
        / depth
    )


def _shown(number: float | None) -> str:
    return "–" if number is None else f"{number:.2f}"


def _cells(row: SpaceDiagnosis) -> tuple[str, ...]:
    share = f"{row.mass / row.bound:.0%}" if row.bound else "–"
    stability = map(_shown, (row.removal_stability, row.protection_stability, row.removed_overlap))
    return (
        row.space,
        f"{row.kept}/{row.size}",
        f"{row.depth}/{row.limit}",
        _shown(row.tod),
        share,
        "yes" if row.exchange else "no",
        *stability,
    )
