"""The allocator: one rule applied to one set of scores, for any number of tolerances and budgets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from fairpruner.allocation.constraints import (
    MinKeep,
    MultipleOf,
    candidates_of,
    check_constraints,
    multiple_from,
)
from fairpruner.allocation.profiles import ProfilesBetween, RuleProfiles
from fairpruner.allocation.rules import RULES, RankedSpace
from fairpruner.allocation.searching import BisectionSearch, LinearSearch
from fairpruner.core.arrays import Ints
from fairpruner.core.budget import Budget, Metric
from fairpruner.core.costs import CostTable
from fairpruner.core.latency import LatencyTable, check_table
from fairpruner.core.plan import Plan
from fairpruner.core.scores import Scores
from fairpruner.core.tod import check_alpha, conflict_curve, removal_order
from fairpruner.core.units import KINDS, Kind
from fairpruner.errors import FairprunerError, unknown

MISSING: dict[Metric, str] = {
    "experts": "the scores hold no space of routed experts. Give a budget of params, flops or units.",
    "bytes": (
        "the scores were saved by a version that did not count bytes. Score the model again, or give a budget"
        " of params."
    ),
    "inner_params": "the model has no embeddings, so that all its parameters are inner ones. Give a budget of"
    " params.",
    "active_params": "the model has no routed experts of a known top-k. Give a budget of params.",
    "cache_bytes": "the model returned no cache of keys and values. Give a budget of params, flops or units.",
    "latency_ms": "no latency was measured. Give latency=, a table that latency_table made of this model.",
}


def cannot_be_met(budget: Budget) -> FairprunerError:
    """The error for a budget of a metric that the model does not have."""
    return FairprunerError(
        f"Budget {budget.metric} keep={budget.amount} cannot be met: {MISSING[budget.counted_in]}"
    )


TIMED_TOGETHER = 2**13  # profiles, so that memory does not grow with their number


class Allocator:
    """What all plans of one rule share: removal orders, ToD, the rule's profiles, and the costs."""

    def __init__(
        self,
        scores: Scores,
        rule: str,
        *,
        multiple_of: MultipleOf,
        min_keep: MinKeep,
        latency: LatencyTable | None = None,
        kinds: Sequence[Kind] = KINDS,
    ) -> None:
        if not isinstance(rule, str) or rule not in RULES:
            raise unknown("rule", rule, RULES)
        if not len(scores.spaces):
            raise FairprunerError(
                "The scores hold no space, so nothing can be removed: spaces.left_out has the reasons."
            )
        if latency is not None:
            check_table(latency, scores.spaces)
        multiple_of = multiple_from(multiple_of, latency)
        check_constraints(multiple_of, min_keep)
        self._spaces, self._rule = scores.spaces, rule
        self._constraints = {"min_keep": min_keep, "multiple_of": multiple_of}
        orders = [removal_order(scores.removal[space.name], space.groups) for space in scores.spaces]
        self._units = [tuple(order.tolist()) for order in orders]
        self._ranked = []
        for space, order in zip(scores.spaces, orders, strict=True):
            removal, protection = scores.removal[space.name], scores.protection[space.name]
            candidates = np.zeros(1, dtype=np.int64)  # only depth 0 for kinds that are not removed
            if space.kind in kinds:
                candidates = candidates_of(space, multiple_of, min_keep)
            tod = conflict_curve(removal, protection, space.groups).tod
            self._ranked.append(RankedSpace(removal[order], tod, candidates))
        self.profiles = RuleProfiles(RULES[rule](self._ranked))
        self._costs = CostTable(scores.spaces, orders, latency)
        self._original = self._totals(np.zeros(len(orders), dtype=np.int64))

    def for_tolerance(self, alpha: float) -> Plan:
        """The plan in which every space has its largest depth with ToD <= alpha."""
        tolerance = check_alpha(alpha)
        if self._rule != "tod":
            raise FairprunerError(
                f"Alpha is a tolerance of the rule 'tod', found rule={self._rule!r}: give keep=Budget(...) in"
                " place of alpha."
            )
        return self._plan(self.profiles.depths(self.profiles.step_at(tolerance)), tolerance, exact=False)

    def for_budget(self, budget: Budget, exact: bool) -> Plan:
        """The plan of the rule's profile nearest to the budget.

        With `exact`, the profiles between two neighbouring steps of the rule are candidates, too.
        """
        metric, target = budget.counted_in, self._target(budget)
        steps = self._search(metric, self.profiles)
        below = steps.first_within(target)
        if below > self.profiles.last:
            raise self._out_of_reach(budget, steps.least)
        if not exact or below == 0:
            step = steps.nearest(target)
            return self._plan(self.profiles.depths(step), self._tolerance(step), exact)
        between = ProfilesBetween(self._ranked, self.profiles.depths(below - 1), self.profiles.depths(below))
        moves = self._search(metric, between).nearest(target)
        step = below if moves == between.last else below - 1
        return self._plan(between.depths(moves), self._tolerance(step), exact)

    def _target(self, budget: Budget) -> float:
        """The amount to keep of the budget's metric."""
        if budget.counted_in not in self._original:
            raise cannot_be_met(budget)
        original = self._original[budget.counted_in]
        target = budget.target(original)
        if isinstance(original, int):
            # A share times a count has rounding errors: 0.29 * 50 is slightly below 14.5. A float64 has 15
            # significant digits, and those beyond are dropped.
            target = round(target, max(0, 14 - len(str(original))))
        return target

    def _search(self, metric: Metric, profiles: RuleProfiles | ProfilesBetween) -> BisectionSearch:
        """A search over what profiles keep of a metric."""
        if metric == "latency_ms":
            return self._by_latency if profiles is self.profiles else self._all_timed(profiles)
        return BisectionSearch(
            lambda position: self._costs.totals(metric, profiles.depths(position)), profiles.last
        )

    @cached_property
    def _by_latency(self) -> LinearSearch:
        return self._all_timed(self.profiles)

    def _all_timed(self, profiles: RuleProfiles | ProfilesBetween) -> LinearSearch:
        """The predicted latency of every profile."""
        steps = np.arange(profiles.last + 1)
        pieces = np.split(steps, range(TIMED_TOGETHER, steps.size, TIMED_TOGETHER))
        found = [self._costs.milliseconds(profiles.many(piece)) for piece in pieces]
        return LinearSearch(np.concatenate(found).tolist())

    def _tolerance(self, step: int) -> float | None:
        """The tolerance of a step of the rule 'tod'; None for other rules."""
        return max(0.0, float(self.profiles.thresholds[step])) if self._rule == "tod" else None

    def _totals(self, depths: Ints) -> dict[str, float]:
        """What a profile keeps of each metric."""
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
        """The error that names the smallest budget in reach, what limits it, and what would help."""
        depths = self.profiles.depths(self.profiles.last)
        amount = smallest / self._original[budget.counted_in] if budget.is_share else smallest
        # Rounded up, so that the amount named is itself in reach.
        nearest = str(amount) if isinstance(amount, int) else f"{math.ceil(1000 * amount) / 1000:g}"
        if all(depth == space.candidates[-1] for depth, space in zip(depths, self._ranked, strict=True)):
            limit = "every space at its minimum"
            advice = [f"lower {name}" for name, value in self._constraints.items() if value != 1]
        else:
            limit = f"at tolerance {self._tolerance(self.profiles.last):.3g}, the largest below 1"
            advice = ["use rule='uniform'"]
        found = (
            f"Budget {budget.metric} keep={budget.amount} is out of reach: the smallest plan keeps {nearest}"
            f" ({limit})."
        )
        return FairprunerError(f"{found} {', or '.join(['Raise keep', *advice])}.")
