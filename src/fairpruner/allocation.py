"""The allocate stage: scores and a tolerance or a budget in, a plan out.

Every rule is a table per space: ascending thresholds and the depth reached at each. One dial, shared by
all spaces, then runs through every plan of the rule: each space goes to the depth of its largest
threshold that the dial has passed. A budget is a position of that dial.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from .costs import CostTable, predict
from .errors import FairprunerError, unknown
from .latency import LatencyTable, check_table
from .tod import conflict_curve, removal_order
from .types import KINDS, Budget, Floats, Ints, Kind, Metric, Plan, Scores, UnitSpace, check_alpha

MinKeep = float | Mapping[str, float]  # a count or share of every space, or one for each kind
MultipleOf = int | Literal["auto"]
COUNTED: dict[Metric, tuple[Kind, ...]] = {"experts": ("expert",)}  # metrics that count units of some kinds: a budget of one leaves other spaces whole


def allocate(
    scores: Scores,
    alpha: float | None = None,
    *,
    keep: Budget | None = None,
    rule: str = "tod",
    exact: bool = False,
    multiple_of: MultipleOf = 1,
    min_keep: MinKeep = 1,
    latency: LatencyTable | None = None,
) -> Plan:
    """The plan for a tolerance (the paper's algorithm FAIR-Pruner) or for a budget (its target-budget selection of the ToD level).

    `min_keep` is a count, or a share in (0, 1), of every space, or a mapping from kinds to those; the channels or hidden
    units kept of a space that loses any are a multiple of `multiple_of`. `exact=True` then moves single spaces to hit the
    budget itself. A budget of `experts` leaves all other units alone. `latency` is a table of `latency_table`: plans then tell
    their milliseconds, a budget may be one of `latency` or `latency_ms`, and `multiple_of="auto"` takes the table's.

    >>> from fairpruner.types import CostModel, Spaces
    >>> spaces = Spaces((UnitSpace("conv", "channel", 4, slices=()),), {}, CostModel((), (), ()), fingerprint="")
    >>> aligned = {"conv": np.array([0.4, 0.1, 0.2, 0.3])}
    >>> scores = Scores(spaces, {"l1": aligned}, {"taylor": aligned}, samples=1)
    >>> allocate(scores, alpha=0.0).removed
    {'conv': (1, 2)}
    >>> allocate(scores, keep=Budget("units", 0.25)).alpha
    0.6666666666666666
    """
    if keep is not None and alpha is None:
        _check_budget(keep)
        return _Allocator(scores, rule, multiple_of, min_keep, latency, COUNTED.get(keep.metric, KINDS)).for_budget(keep, exact)
    if alpha is not None and keep is None and not exact:
        return _Allocator(scores, rule, multiple_of, min_keep, latency).for_tolerance(alpha)
    found = f"found alpha={alpha}, keep={keep} and exact={exact}"
    raise FairprunerError(f"A plan needs either a tolerance or a budget, and exact=True a budget, {found}: for example alpha=0.1 or keep=Budget('flops', 0.5).")


def sweep(
    scores: Scores,
    metric: Metric,
    amounts: Iterable[float | int],
    *,
    rule: str = "tod",
    exact: bool = False,
    multiple_of: MultipleOf = 1,
    min_keep: MinKeep = 1,
    latency: LatencyTable | None = None,
) -> list[Plan]:
    """One plan per kept amount of a metric, as `allocate` gives them, from tables that are built once.

    >>> from fairpruner.types import CostModel, Spaces
    >>> spaces = Spaces((UnitSpace("conv", "channel", 4, slices=()),), {}, CostModel((), (), ()), fingerprint="")
    >>> aligned = {"conv": np.array([0.4, 0.1, 0.2, 0.3])}
    >>> scores = Scores(spaces, {"l1": aligned}, {"taylor": aligned}, samples=1)
    >>> [plan.depths for plan in sweep(scores, "units", [1.0, 0.75, 2])]
    [{'conv': 0}, {'conv': 1}, {'conv': 2}]
    """
    allocator = _Allocator(scores, rule, multiple_of, min_keep, latency, COUNTED.get(metric, KINDS))
    return [allocator.for_budget(Budget(metric, amount), exact) for amount in amounts]


def shuffled(plan: Plan, seed: int) -> Plan:
    """The plan's depths with units drawn at random: the paper's ablation of the removal ranking.

    >>> from fairpruner.types import CostModel, Spaces
    >>> spaces = Spaces((UnitSpace("conv", "channel", 4, slices=()),), {}, CostModel((), (), ()), fingerprint="")
    >>> plan = Plan(spaces, {"conv": (0, 1)}, alpha=0.0, rule="tod", exact=False, predicted={}, original={})
    >>> shuffled(plan, seed=0).depths, shuffled(plan, seed=0).rule
    ({'conv': 2}, 'tod+random')
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise FairprunerError(f"The seed is {seed!r}, expected a whole number of at least 0.")
    rng = np.random.default_rng(seed)
    removed = {
        space.name: tuple(removal_order(np.argsort(rng.permutation(space.size)), space.groups)[: plan.depths[space.name]].tolist()) for space in plan.spaces
    }
    return replace(plan, removed=removed, rule=f"{plan.rule}+random", predicted=predict(plan.spaces, removed))


@dataclass(frozen=True, eq=False)
class _Ranked:
    """One space as the rules see it."""

    removal: Floats  # [J] scores along the removal order
    tod: Floats  # [J + 1]
    candidates: Ints  # [C] depths that the constraints allow, ascending from 0


Table = tuple[Floats, Ints]  # ascending thresholds [T] and the depth reached at each [T]; the first is depth 0 at the rule's lowest threshold


def _tod(spaces: Sequence[_Ranked]) -> list[Table]:
    """Thresholds are tolerances: the depth at t is the largest candidate with ToD <= t."""
    return [_frontier(space) for space in spaces]


def _frontier(space: _Ranked) -> Table:
    depths, values = space.candidates, space.tod[space.candidates]
    # Only a depth with less conflict than every deeper one is ever the largest feasible; tolerances stay below 1.
    best = values < np.append(np.minimum.accumulate(values[::-1])[-2::-1], 1.0)
    free, reached, tolerances = depths[best][0], depths[best][1:], values[best][1:]
    # Tolerance 0 may already remove much. Overlaps never fall, so all depths up to that one are as free of
    # conflict: thresholds in [-1, 0] lead there evenly, and gentle budgets stay within reach.
    gentle = depths[depths <= free]
    return np.concatenate([gentle / max(free, 1) - 1, tolerances]), np.concatenate([gentle, reached])


def _uniform(spaces: Sequence[_Ranked]) -> list[Table]:
    """Thresholds are shares removed, the same in every space."""
    return [(space.candidates / space.removal.size, space.candidates) for space in spaces]


def _global(spaces: Sequence[_Ranked]) -> list[Table]:
    """Thresholds are positions in one ranking of all units, merged by (removal score, space, removal order)."""
    values = np.concatenate([space.removal for space in spaces])
    positions = np.empty(values.size)
    positions[np.argsort(values, kind="stable")] = np.arange(1, values.size + 1)  # units stand by space and removal order already
    by_space = np.split(positions, np.cumsum([space.removal.size for space in spaces])[:-1])
    return [(np.append(0, ranks)[space.candidates], space.candidates) for space, ranks in zip(spaces, by_space, strict=True)]


RULES: dict[str, Callable[[Sequence[_Ranked]], list[Table]]] = {"tod": _tod, "uniform": _uniform, "global": _global}


class _Dial:
    """All spaces' tables on one scale: the distinct thresholds, one step each."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.levels, rank = np.unique(np.concatenate([thresholds for thresholds, _ in tables]), return_inverse=True)
        lengths = [thresholds.size for thresholds, _ in tables]
        # Integer ranks instead of values: every space gets its own stretch of keys, and one search serves all, exactly.
        self._starts = np.arange(len(tables)) * self.levels.size
        self._keys = np.repeat(self._starts, lengths) + rank
        self._depths = np.concatenate([depths for _, depths in tables])

    @property
    def last(self) -> int:
        return self.levels.size - 1

    def depths(self, step: int) -> Ints:
        """The depth of every space at a step, [S]."""
        return self._depths[np.searchsorted(self._keys, self._starts + step, side="right") - 1]

    def step_at(self, threshold: float) -> int:
        return int(np.searchsorted(self.levels, threshold, side="right")) - 1


MISSING: dict[Metric, str] = {
    "experts": "the scores hold no space of routed experts. Give a budget of params, flops or units.",
    "bytes": "the scores were saved by a version that did not count bytes. Score the model again, or give a budget of params.",
    "latency_ms": "no latency was measured. Give latency=, a table that latency_table made of this model.",
}


class _Allocator:
    """What every plan of one rule shares: orders, curves, the dial and the costs."""

    def __init__(
        self, scores: Scores, rule: str, multiple_of: MultipleOf, min_keep: MinKeep, latency: LatencyTable | None = None, kinds: Sequence[Kind] = KINDS
    ) -> None:
        if rule not in RULES:
            raise unknown("rule", rule, RULES)
        if not len(scores.spaces):
            raise FairprunerError("The scores hold no space, so there is nothing to remove: see spaces.left_out for the reasons.")
        if latency is not None:
            check_table(latency, scores.spaces)
        multiple_of = _multiple(multiple_of, latency)
        _check_constraints(multiple_of, min_keep)
        self._spaces, self._rule, self._levers = scores.spaces, rule, {"min_keep": min_keep, "multiple_of": multiple_of}
        orders = [removal_order(scores.removal[space.name], space.groups) for space in scores.spaces]
        self._units = [tuple(order.tolist()) for order in orders]
        self._ranked = [
            _Ranked(
                removal=scores.removal[space.name][order],
                tod=conflict_curve(scores.removal[space.name], scores.protection[space.name], space.groups).tod,
                candidates=_candidates(space, multiple_of, min_keep) if space.kind in kinds else np.zeros(1, dtype=np.int64),
            )
            for space, order in zip(scores.spaces, orders, strict=True)
        ]
        self._dial = _Dial(RULES[rule](self._ranked))
        self._costs = CostTable(scores.spaces, orders, latency)
        self._original = self._totals(np.zeros(len(orders), dtype=np.int64))

    def for_tolerance(self, alpha: float) -> Plan:
        """Every space at its largest feasible depth."""
        tolerance = check_alpha(alpha)
        if self._rule != "tod":
            raise FairprunerError(f"Alpha is a tolerance of the rule 'tod', found rule={self._rule!r}: give keep=Budget(...) in place of alpha.")
        return self._plan(self._dial.depths(self._dial.step_at(tolerance)), tolerance, exact=False)

    def for_budget(self, budget: Budget, exact: bool) -> Plan:
        """The step of the dial nearest to the budget; with `exact`, the nearest point on the way between two steps."""
        metric = budget.counted_in
        if metric not in self._original:
            raise FairprunerError(f"Budget {budget.metric} keep={budget.amount} cannot be met: {MISSING[metric]}")
        original = self._original[metric]
        target = budget.target(original)
        if isinstance(original, int):  # a share times a count carries float noise (0.29 * 50 < 14.5): round to the digits that a share can carry
            target = round(target, max(0, 14 - len(str(original))))
        steps = self._kept(metric, self._dial.depths, self._dial.last)
        below = steps.first_within(target)
        if below > self._dial.last:
            raise self._out_of_reach(budget, steps.least)
        if not exact or below == 0:
            step = steps.nearest(target)
            return self._plan(self._dial.depths(step), self._tolerance(step), exact)
        path = _Path(self._ranked, self._dial.depths(below - 1), self._dial.depths(below))
        moves = self._kept(metric, path.depths, path.last).nearest(target)
        return self._plan(path.depths(moves), self._tolerance(below if moves == path.last else below - 1), exact)

    def _kept(self, metric: Metric, depths: Callable[[int], Ints], last: int) -> _Falling:
        """What plans in a row keep of a metric; latency may rise where widths become uneven, so that all have to be looked at."""
        if metric == "latency_ms":
            return _Listed(self._costs.milliseconds(np.stack([depths(position) for position in range(last + 1)], axis=1)).tolist())
        return _Falling(lambda position: self._costs.totals(metric, depths(position)), last)

    def _tolerance(self, step: int) -> float | None:
        return max(0.0, float(self._dial.levels[step])) if self._rule == "tod" else None

    def _totals(self, depths: Ints) -> dict[str, float]:
        return {metric: self._costs.totals(metric, depths) for metric in self._costs.metrics}

    def _plan(self, depths: Ints, alpha: float | None, exact: bool) -> Plan:
        removed = {space.name: units[:depth] for space, units, depth in zip(self._spaces, self._units, depths.tolist(), strict=True)}
        return Plan(self._spaces, removed, alpha, self._rule, exact, predicted=self._totals(depths), original=self._original)

    def _out_of_reach(self, budget: Budget, smallest: float) -> FairprunerError:
        depths = self._dial.depths(self._dial.last)
        amount = smallest / self._original[budget.counted_in] if budget.is_share else smallest
        nearest = str(amount) if isinstance(amount, int) else f"{math.ceil(1000 * amount) / 1000:g}"  # rounded up, so that it is itself within reach
        if all(depth == space.candidates[-1] for depth, space in zip(depths, self._ranked, strict=True)):
            limit, advice = "every space at its minimum", [f"lower {name}" for name, value in self._levers.items() if value != 1]
        else:
            limit, advice = f"at tolerance {self._tolerance(self._dial.last):.3g}, the largest below 1", ["use rule='uniform'"]
        found = f"Budget {budget.metric} keep={budget.amount} is out of reach: the smallest plan keeps {nearest} ({limit})."
        return FairprunerError(f"{found} {', or '.join(['Raise keep', *advice])}.")


class _Path:
    """The way from one step of the dial to the next: one space at a time to its next candidate, the least conflict first."""

    def __init__(self, spaces: Sequence[_Ranked], start: Ints, end: Ints) -> None:
        self._start = start
        movers: list[int] = np.flatnonzero(end > start).tolist()
        moves = [c[(c > start[s]) & (c <= end[s])] for s, c in ((s, spaces[s].candidates) for s in movers)]
        # Always taking the space whose next depth has the lowest ToD is sorting by the highest ToD met on the way.
        conflict = np.concatenate([np.maximum.accumulate(spaces[s].tod[m]) for s, m in zip(movers, moves, strict=True)])
        space = np.repeat(movers, [m.size for m in moves])
        order = np.lexsort((space, conflict))
        self._space, self._depth = space[order], np.concatenate(moves)[order]

    @property
    def last(self) -> int:
        return self._space.size

    def depths(self, moves: int) -> Ints:
        """The depth of every space after so many moves, [S]."""
        depths = self._start.copy()
        np.maximum.at(depths, self._space[:moves], self._depth[:moves])
        return depths


class _Falling:
    """Amounts kept at the positions 0..last, that never rise: found by bisection."""

    def __init__(self, kept: Callable[[int], float], last: int) -> None:
        self.kept, self.last = kept, last

    @property
    def least(self) -> float:
        return self.kept(self.last)

    def first_within(self, amount: float) -> int:
        """The first position that keeps at most an amount; last + 1 if none does."""
        return bisect_left(range(self.last + 1), True, key=lambda position: self.kept(position) <= amount)

    def nearest(self, target: float) -> int:
        """The position that keeps nearest to a target within reach: the first within it or the one before; of equals, the one that removes least."""
        below = self.first_within(target)
        if below == 0 or self.kept(below - 1) - target > target - self.kept(below):
            return below
        return self.first_within(self.kept(below - 1))


class _Listed(_Falling):
    """Amounts that may rise and fall: looked at one after the other."""

    def __init__(self, amounts: Sequence[float]) -> None:
        super().__init__(amounts.__getitem__, len(amounts) - 1)
        self._amounts = amounts

    @property
    def least(self) -> float:
        return min(self._amounts)

    def first_within(self, amount: float) -> int:
        return next((position for position, kept in enumerate(self._amounts) if kept <= amount), self.last + 1)


def _candidates(space: UnitSpace, multiple_of: int, min_keep: MinKeep) -> Ints:
    """The depths that leave enough units in a space, ascending; 0 always, [C]."""
    kept = np.arange(space.size, 0, -1)  # [J], at the depths 0..J - 1
    least = min_keep.get(space.kind, 1) if isinstance(min_keep, Mapping) else min_keep
    # Quotients compare like the fractions they round, so a share of 0.3 keeps 3 of 10.
    enough = kept / space.size >= least if isinstance(least, float) else kept >= least
    even = kept % multiple_of == 0 if space.kind in ("channel", "hidden") else True  # heads and experts are wide enough already
    possible = (kept % space.groups == 0) & (kept % space.multiple == 0)
    return np.flatnonzero((enough & (kept >= space.min_keep) & even & possible) | (kept == space.size))


def _multiple(multiple_of: MultipleOf, latency: LatencyTable | None) -> int:
    if multiple_of != "auto":
        return multiple_of
    if latency is None:
        raise FairprunerError("multiple_of='auto' takes the multiple from a latency table: give latency=, or a whole number.")
    return latency.multiple


def _check_budget(budget: object) -> None:
    if not isinstance(budget, Budget):
        raise FairprunerError(f"keep is {budget!r}, expected a budget: for example keep=Budget('flops', 0.5).")


def _check_constraints(multiple_of: int, min_keep: MinKeep) -> None:
    if isinstance(multiple_of, bool) or not isinstance(multiple_of, (int, np.integer)) or multiple_of < 1:
        raise FairprunerError(f"multiple_of is {multiple_of!r}, expected a whole number of at least 1.")
    for kind, least in min_keep.items() if isinstance(min_keep, Mapping) else [(None, min_keep)]:
        if kind is not None and kind not in KINDS:
            raise unknown("kind", kind, KINDS)
        count = isinstance(least, (int, np.integer)) and not isinstance(least, bool) and least >= 1
        if not count and not (isinstance(least, float) and 0 < least < 1):
            raise FairprunerError(f"min_keep is {least!r}, expected a count of at least 1 or a share in (0, 1) of every space.")
