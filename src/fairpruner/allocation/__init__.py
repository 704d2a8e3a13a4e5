"""The allocate stage: scores and a tolerance or a budget in, a plan out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from fairpruner.allocation.allocator import Allocator
from fairpruner.allocation.constraints import MinKeep, MultipleOf
from fairpruner.allocation.rules import RULES
from fairpruner.core.budget import Budget, Metric
from fairpruner.core.costs import predict
from fairpruner.core.latency import LatencyTable
from fairpruner.core.plan import Plan
from fairpruner.core.scores import Scores
from fairpruner.core.spaces import KINDS, Kind
from fairpruner.core.tod import removal_order
from fairpruner.errors import FairprunerError

__all__ = ["RULES", "allocate", "shuffled", "sweep"]

COUNTED: dict[Metric, tuple[Kind, ...]] = {
    "experts": ("expert",)
}  # metrics that count units of some kinds: a budget of one leaves other spaces whole


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
    """The plan for a tolerance (the paper's algorithm FAIR-Pruner) or for a budget (its target-budget
    selection of the ToD level).

    `min_keep` is a count, or a share in (0, 1), of every space, or a mapping from kinds to those; the
    channels or hidden units kept of a space that loses any are a multiple of `multiple_of`. `exact=True`
    then moves single spaces to hit the budget itself. A budget of `experts` leaves all other units alone.
    `latency` is a table of `latency_table`: plans then tell their milliseconds, a budget may be one of
    `latency` or `latency_ms`, and `multiple_of="auto"` takes the table's.

    >>> from fairpruner.core.spaces import CostModel, Spaces, UnitSpace
    >>> spaces = Spaces((UnitSpace("conv", "channel", 4, slices=()),), {}, CostModel((), (), ()), "")
    >>> aligned = {"conv": np.array([0.4, 0.1, 0.2, 0.3])}
    >>> scores = Scores(spaces, {"l1": aligned}, {"taylor": aligned}, samples=1)
    >>> allocate(scores, alpha=0.0).removed
    {'conv': (1, 2)}
    >>> allocate(scores, keep=Budget("units", 0.25)).alpha
    0.6666666666666666
    """
    if keep is not None and alpha is None:
        if not isinstance(keep, Budget):
            raise FairprunerError(
                f"keep is {keep!r}, expected a budget: for example keep=Budget('flops', 0.5)."
            )
        return Allocator(
            scores, rule, multiple_of, min_keep, latency, COUNTED.get(keep.metric, KINDS)
        ).for_budget(keep, exact)
    if alpha is not None and keep is None and not exact:
        return Allocator(scores, rule, multiple_of, min_keep, latency).for_tolerance(alpha)
    found = f"found alpha={alpha}, keep={keep} and exact={exact}"
    raise FairprunerError(
        f"A plan needs either a tolerance or a budget, and exact=True a budget, {found}: for example"
        " alpha=0.1 or keep=Budget('flops', 0.5)."
    )


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

    >>> from fairpruner.core.spaces import CostModel, Spaces, UnitSpace
    >>> spaces = Spaces((UnitSpace("conv", "channel", 4, slices=()),), {}, CostModel((), (), ()), "")
    >>> aligned = {"conv": np.array([0.4, 0.1, 0.2, 0.3])}
    >>> scores = Scores(spaces, {"l1": aligned}, {"taylor": aligned}, samples=1)
    >>> [plan.depths for plan in sweep(scores, "units", [1.0, 0.75, 2])]
    [{'conv': 0}, {'conv': 1}, {'conv': 2}]
    """
    allocator = Allocator(scores, rule, multiple_of, min_keep, latency, COUNTED.get(metric, KINDS))
    return [allocator.for_budget(Budget(metric, amount), exact) for amount in amounts]


def shuffled(plan: Plan, seed: int) -> Plan:
    """The plan's depths with units drawn at random: the paper's ablation of the removal ranking.

    >>> from fairpruner.core.spaces import CostModel, Spaces, UnitSpace
    >>> spaces = Spaces((UnitSpace("conv", "channel", 4, slices=()),), {}, CostModel((), (), ()), "")
    >>> plan = Plan(spaces, {"conv": (0, 1)}, alpha=0.0, rule="tod", exact=False, predicted={}, original={})
    >>> shuffled(plan, seed=0).depths, shuffled(plan, seed=0).rule
    ({'conv': 2}, 'tod+random')
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise FairprunerError(f"The seed is {seed!r}, expected a whole number of at least 0.")
    rng = np.random.default_rng(seed)
    removed = {
        space.name: tuple(
            removal_order(np.argsort(rng.permutation(space.size)), space.groups)[
                : plan.depths[space.name]
            ].tolist()
        )
        for space in plan.spaces
    }
    return replace(plan, removed=removed, rule=f"{plan.rule}+random", predicted=predict(plan.spaces, removed))
