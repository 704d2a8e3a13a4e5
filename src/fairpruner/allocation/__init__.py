"""The allocate stage: scores and a tolerance or a budget in, a plan out."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from fairpruner.allocation.allocator import Allocator, cannot_be_met
from fairpruner.allocation.constraints import MinKeep, MultipleOf
from fairpruner.allocation.rules import RULES
from fairpruner.core.budget import Budget, Metric, check_budget
from fairpruner.core.costs import predict
from fairpruner.core.latency import LatencyTable
from fairpruner.core.plan import Plan
from fairpruner.core.scores import Scores, check_are_scores
from fairpruner.core.tod import removal_order
from fairpruner.core.units import KINDS, Kind
from fairpruner.errors import FairprunerError, FairprunerWarning, check_whole_number

__all__ = ["RULES", "allocate", "cannot_be_met", "shuffled", "sweep"]

# A budget of one of these metrics only removes units of these kinds.
KINDS_OF_METRIC: dict[Metric, tuple[Kind, ...]] = {"experts": ("expert",)}

# `allocate` warns if a plan misses its budget by more than this share of the original.
FAR = 0.05


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
    """The plan for a tolerance (the paper's algorithm FAIR-Pruner) or for a budget.

    For a budget, the tolerance is found as in the paper's target-budget selection of the ToD level.

    `min_keep` is the least that every space keeps: a count, a share in (0, 1), or a mapping from kinds to
    counts or shares. `multiple_of` applies to channels and hidden units: a space that loses some of them
    keeps a multiple of this number. `exact=True` moves single spaces further to hit the budget exactly. A
    budget of `experts` removes only experts. `latency` is a table made by `latency_table`. With it, plans
    also predict milliseconds, budgets of `latency` and `latency_ms` are possible, and `multiple_of="auto"`
    takes the multiple from the table.

    >>> from fairpruner.core.cost_model import CostModel
    >>> from fairpruner.core.spaces import Spaces
    >>> from fairpruner.core.units import UnitSpace
    >>> spaces = Spaces((UnitSpace("conv", "channel", 4, slices=()),), {}, CostModel((), (), ()), "")
    >>> aligned = {"conv": np.array([0.4, 0.1, 0.2, 0.3])}
    >>> scores = Scores(spaces, {"l1": aligned}, {"taylor": aligned}, samples=1)
    >>> allocate(scores, alpha=0.0).removed
    {'conv': (1, 2)}
    >>> allocate(scores, keep=Budget("units", 0.25)).alpha
    0.6666666666666666
    """
    check_are_scores(scores)
    if keep is not None and alpha is None:
        check_budget(keep)
        kinds = KINDS_OF_METRIC.get(keep.metric, KINDS)
        allocator = Allocator(
            scores.per(keep.counted_in),
            rule,
            multiple_of=multiple_of,
            min_keep=min_keep,
            latency=latency,
            kinds=kinds,
        )
        plan = allocator.for_budget(keep, exact)
        advice = [] if exact else ["give exact=True"]
        advice += ["lower multiple_of or min_keep"] if multiple_of != 1 or min_keep != 1 else []
        warn_if_far(plan, keep, ", or ".join(advice or ["try another rule"]))
        return plan
    if alpha is not None and keep is None and not exact:
        allocator = Allocator(scores, rule, multiple_of=multiple_of, min_keep=min_keep, latency=latency)
        return allocator.for_tolerance(alpha)
    raise FairprunerError(
        "A plan needs either a tolerance or a budget, and exact=True needs a budget; found"
        f" alpha={alpha}, keep={keep} and exact={exact}. Give for example alpha=0.1 or"
        " keep=Budget('flops', 0.5)."
    )


@contextmanager
def without_miss_warnings() -> Iterator[None]:
    """Inside, plans that are far from their budgets are not warned about: they are steps on the way."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Budget .* the nearest plan of rule", FairprunerWarning)
        yield


def warn_if_far(plan: Plan, keep: Budget, advice: str) -> None:
    """Warn that the nearest plan is far from the budget, and name what would bring it nearer."""
    original, found = plan.original[keep.counted_in], plan.predicted[keep.counted_in]
    if abs(found - keep.target(original)) > FAR * original:
        amount = f"{found / original:.2f}" if keep.is_share else f"{found:.15g}"
        warnings.warn(
            f"Budget {keep.metric} keep={keep.amount}: the nearest plan of rule {plan.rule!r} keeps {amount}."
            f" To come nearer, {advice}.",
            FairprunerWarning,
            stacklevel=3,
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
    """One plan for each amount to keep of a metric, the same as from `allocate`, but faster for many.

    >>> from fairpruner.core.cost_model import CostModel
    >>> from fairpruner.core.spaces import Spaces
    >>> from fairpruner.core.units import UnitSpace
    >>> spaces = Spaces((UnitSpace("conv", "channel", 4, slices=()),), {}, CostModel((), (), ()), "")
    >>> aligned = {"conv": np.array([0.4, 0.1, 0.2, 0.3])}
    >>> scores = Scores(spaces, {"l1": aligned}, {"taylor": aligned}, samples=1)
    >>> [plan.depths for plan in sweep(scores, "units", [1.0, 0.75, 2])]
    [{'conv': 0}, {'conv': 1}, {'conv': 2}]
    """
    check_are_scores(scores)
    if not isinstance(amounts, Iterable):
        raise FairprunerError(f"amounts is {amounts!r}, expected several: for example [0.75, 0.5, 0.25].")
    kinds = KINDS_OF_METRIC.get(metric, KINDS)
    allocator = Allocator(
        scores.per(metric), rule, multiple_of=multiple_of, min_keep=min_keep, latency=latency, kinds=kinds
    )
    return [allocator.for_budget(Budget(metric, amount), exact) for amount in amounts]


def shuffled(plan: Plan, seed: int) -> Plan:
    """A plan with the same depths and randomly drawn units: the paper's ablation of the removal ranking.

    >>> from fairpruner.core.cost_model import CostModel
    >>> from fairpruner.core.spaces import Spaces
    >>> from fairpruner.core.units import UnitSpace
    >>> spaces = Spaces((UnitSpace("conv", "channel", 4, slices=()),), {}, CostModel((), (), ()), "")
    >>> plan = Plan(spaces, {"conv": (0, 1)}, alpha=0.0, rule="tod", exact=False, predicted={}, original={})
    >>> shuffled(plan, seed=0).depths, shuffled(plan, seed=0).rule
    ({'conv': 2}, 'tod+random')
    """
    check_whole_number("seed", seed, at_least=0)
    rng = np.random.default_rng(seed)
    removed = {}
    for space in plan.spaces:
        order = removal_order(np.argsort(rng.permutation(space.size)), space.groups)
        removed[space.name] = tuple(order[: plan.depths[space.name]].tolist())
    return replace(plan, removed=removed, rule=f"{plan.rule}+random", predicted=predict(plan.spaces, removed))
