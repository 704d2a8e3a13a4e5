"""A rule at work: the dial through all of its plans, and the position of a tolerance or a budget on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from fairpruner.allocation.constraints import (
    MinKeep,
    MultipleOf,
    candidates_of,
    check_constraints,
    multiple_from,
)
from fairpruner.allocation.dial import Dial, Falling, Listed, Way
from fairpruner.allocation.rules import RULES, Ranked
from fairpruner.core.arrays import Ints
from fairpruner.core.budget import Budget, Metric
from fairpruner.core.costs import CostTable
from fairpruner.core.latency import LatencyTable, check_table
from fairpruner.core.plan import Plan
from fairpruner.core.scores import Scores
from fairpruner.core.spaces import KINDS, Kind
from fairpruner.core.tod import check_alpha, conflict_curve, removal_order
from fairpruner.errors import FairprunerError, unknown

MISSING: dict[Metric, str] = {
    "experts": "the scores hold no space of routed experts. Give a budget of params, flops or units.",
    "bytes": (
        "the scores were saved by a version that did not count bytes. Score the model again, or give a budget"
        " of params."
    ),
    "latency_ms": "no latency was measured. Give latency=, a table that latency_table made of this model.",
}


class Allocator:
    """What every plan of one rule shares: orders, curves, the dial and the costs."""

    def __init__(
        self,
        scores: Scores,
        rule: str,
        multiple_of: MultipleOf,
        min_keep: MinKeep,
        latency: LatencyTable | None = None,
        kinds: Sequence[Kind] = KINDS,
    ) -> None:
        if rule not in RULES:
            raise unknown("rule", rule, RULES)
        if not len(scores.spaces):
            raise FairprunerError(
                "The scores hold no space, so there is nothing to remove: see spaces.left_out for the"
                " reasons."
            )
        if latency is not None:
            check_table(latency, scores.spaces)
        multiple_of = multiple_from(multiple_of, latency)
        check_constraints(multiple_of, min_keep)
        self._spaces, self._rule, self._levers = (
            scores.spaces,
            rule,
            {"min_keep": min_keep, "multiple_of": multiple_of},
        )
        orders = [removal_order(scores.removal[space.name], space.groups) for space in scores.spaces]
        self._units = [tuple(order.tolist()) for order in orders]
        self._ranked = [
            Ranked(
                removal=scores.removal[space.name][order],
                tod=conflict_curve(
                    scores.removal[space.name], scores.protection[space.name], space.groups
                ).tod,
                candidates=(
                    candidates_of(space, multiple_of, min_keep)
                    if space.kind in kinds
                    else np.zeros(1, dtype=np.int64)
                ),
            )
            for space, order in zip(scores.spaces, orders, strict=True)
        ]
        self._dial = Dial(RULES[rule](self._ranked))
        self._costs = CostTable(scores.spaces, orders, latency)
        self._original = self._totals(np.zeros(len(orders), dtype=np.int64))

    def for_tolerance(self, alpha: float) -> Plan:
        """Every space at its largest feasible depth."""
        tolerance = check_alpha(alpha)
        if self._rule != "tod":
            raise FairprunerError(
                f"Alpha is a tolerance of the rule 'tod', found rule={self._rule!r}: give keep=Budget(...) in"
                " place of alpha."
            )
        return self._plan(self._dial.depths(self._dial.step_at(tolerance)), tolerance, exact=False)

    def for_budget(self, budget: Budget, exact: bool) -> Plan:
        """The step of the dial nearest to the budget; with `exact`, the nearest point on the way between
        two steps.
        """
        metric = budget.counted_in
        if metric not in self._original:
            raise FairprunerError(
                f"Budget {budget.metric} keep={budget.amount} cannot be met: {MISSING[metric]}"
            )
        original = self._original[metric]
        target = budget.target(original)
        if isinstance(
            original,
            int,
            # a share times a count carries float noise (0.29 * 50 < 14.5): round to the digits that a
            # share
            # can carry
        ):
            target = round(target, max(0, 14 - len(str(original))))
        steps = self._kept(metric, self._dial.depths, self._dial.last)
        below = steps.first_within(target)
        if below > self._dial.last:
            raise self._out_of_reach(budget, steps.least)
        if not exact or below == 0:
            step = steps.nearest(target)
            return self._plan(self._dial.depths(step), self._tolerance(step), exact)
        path = Way(self._ranked, self._dial.depths(below - 1), self._dial.depths(below))
        moves = self._kept(metric, path.depths, path.last).nearest(target)
        return self._plan(
            path.depths(moves), self._tolerance(below if moves == path.last else below - 1), exact
        )

    def _kept(self, metric: Metric, depths: Callable[[int], Ints], last: int) -> Falling:
        """What plans in a row keep of a metric; latency may rise where widths become uneven, so that all
        have to be looked at.
        """
        if metric == "latency_ms":
            return Listed(
                self._costs.milliseconds(
                    np.stack([depths(position) for position in range(last + 1)], axis=1)
                ).tolist()
            )
        return Falling(lambda position: self._costs.totals(metric, depths(position)), last)

    def _tolerance(self, step: int) -> float | None:
        return max(0.0, float(self._dial.levels[step])) if self._rule == "tod" else None

    def _totals(self, depths: Ints) -> dict[str, float]:
        return {metric: self._costs.totals(metric, depths) for metric in self._costs.metrics}

    def _plan(self, depths: Ints, alpha: float | None, exact: bool) -> Plan:
        removed = {
            space.name: units[:depth]
            for space, units, depth in zip(self._spaces, self._units, depths.tolist(), strict=True)
        }
        return Plan(
            self._spaces,
            removed,
            alpha,
            self._rule,
            exact,
            predicted=self._totals(depths),
            original=self._original,
        )

    def _out_of_reach(self, budget: Budget, smallest: float) -> FairprunerError:
        depths = self._dial.depths(self._dial.last)
        amount = smallest / self._original[budget.counted_in] if budget.is_share else smallest
        nearest = (
            str(amount) if isinstance(amount, int) else f"{math.ceil(1000 * amount) / 1000:g}"
        )  # rounded up, so that it is itself within reach
        if all(depth == space.candidates[-1] for depth, space in zip(depths, self._ranked, strict=True)):
            limit, advice = (
                "every space at its minimum",
                [f"lower {name}" for name, value in self._levers.items() if value != 1],
            )
        else:
            limit, advice = (
                f"at tolerance {self._tolerance(self._dial.last):.3g}, the largest below 1",
                ["use rule='uniform'"],
            )
        found = (
            f"Budget {budget.metric} keep={budget.amount} is out of reach: the smallest plan keeps {nearest}"
            f" ({limit})."
        )
        return FairprunerError(f"{found} {', or '.join(['Raise keep', *advice])}.")
