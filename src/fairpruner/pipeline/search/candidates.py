"""The plans that a search tries for a budget: combinations of signals, rules and spaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from fairpruner.allocation import allocate
from fairpruner.core.budget import Budget
from fairpruner.core.costs import predict
from fairpruner.core.plan import Plan
from fairpruner.core.scores import Scores
from fairpruner.core.spaces import Spaces
from fairpruner.core.units import Kind, UnitSpace
from fairpruner.errors import FairprunerError

SEARCHED_RULES = ("global", "tod", "uniform")  # in our benchmarks, `global` was the best most often
MISS = 0.02  # share of the original by which a candidate may be farther from the budget than the nearest
ALL = "all"  # the set of all spaces
STREAM = 3  # a space that this many weights read is a residual stream, or a growing concatenation
MOST_PAIRS = 2**27  # with more pairs of units in all spaces, `reconstruction` is too expensive

Removal = Mapping[Kind, str]  # kind -> signal


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan, and how it was made."""

    removal: str
    rule: str
    spaces: str
    plan: Plan

    @property
    def name(self) -> str:
        return f"{self.removal}, {self.rule}, {self.spaces}"


def useful_removals(spaces: Spaces, *, classes: bool, texts: bool = False) -> list[Removal]:
    """The removal signals to score, the most promising first.

    `classes`: whether samples have classes. `texts`: whether they are texts, where signals of weights alone
    are far behind the others.
    """
    kinds: list[Kind] = list(dict.fromkeys(space.kind for space in spaces))
    few = sum(space.size**2 for space in spaces if space.kind != "expert") <= MOST_PAIRS
    first = "reconstruction" if few else "activation"
    second = "wasserstein" if classes else "surgeon" if few else "activation"
    dense = [second, first] if texts and not classes else [first, second, "l1"]
    by_rank = list(zip(dense, ("reap", "soft_activation", "reap"), strict=False))
    removals = [{kind: _signal_of(kind, other, expert) for kind in kinds} for other, expert in by_rank]
    return [removal for n, removal in enumerate(removals) if removal not in removals[:n]]


def _signal_of(kind: Kind, other: str, expert: str) -> str:
    """The signal for one kind; few can score residual blocks."""
    if kind == "block" and other != "surgeon":
        return "influence"
    return expert if kind == "expert" else other


def make_candidates(
    scores: Scores, keep: Budget, rules: Sequence[str] = SEARCHED_RULES, **limits: Any
) -> list[Candidate]:
    """All distinct plans, the most promising first; `limits` are keyword arguments of `allocate`.

    Signals, rules and sets of spaces are each sorted. The sum of the three places sorts the combinations.
    """
    variants = _variants(scores)
    places = product(range(len(variants)), range(len(scores.removals)), range(len(rules)))
    removals = list(scores.removals)
    found: dict[tuple[tuple[int, ...], ...], Candidate] = {}
    failures: dict[str, FairprunerError] = {}
    for variant, signal, rule in sorted(places, key=sum):
        (name, narrowed), removal = variants[variant], removals[signal]
        try:
            budget = _narrowed(keep, narrowed, scores)
            plan = allocate(narrowed.using(removal), keep=budget, rule=rules[rule], **limits)
        except FairprunerError as failure:  # this variant cannot reach the budget
            failures[name] = failure
            continue
        key = tuple(tuple(sorted(plan.removed.get(space, ()))) for space in scores.spaces.names)
        over_all = _over_all_spaces(plan, scores.spaces)
        found.setdefault(key, Candidate(removal, rules[rule], name, over_all))
    if not found:
        raise failures[ALL]
    return _near_budget(list(found.values()), keep)


def _near_budget(candidates: Sequence[Candidate], keep: Budget) -> list[Candidate]:
    """Those that come about as near to the budget as the nearest one: a larger model is not a better one."""

    def miss(candidate: Candidate) -> float:
        original = candidate.plan.original[keep.counted_in]
        return abs(candidate.plan.predicted[keep.counted_in] - keep.target(original)) / original

    least = min(map(miss, candidates))
    return [candidate for candidate in candidates if miss(candidate) <= least + MISS]


def _variants(scores: Scores) -> list[tuple[str, Scores]]:
    """The sets of spaces that may lose units: all but the streams, all, and each kind alone."""
    streams = [space.name for space in scores.spaces if is_stream(space)]
    kinds = list(dict.fromkeys(space.kind for space in scores.spaces))
    found = [(ALL, scores)]
    if 0 < len(streams) < len(scores.spaces):
        found.insert(0, ("without streams", scores.only(skip=streams)))
    if len(kinds) > 1:
        found += [(f"only {kind}", scores.only(kinds=[kind])) for kind in kinds]
    return found


def is_stream(space: UnitSpace) -> bool:
    """Whether many weights read the space, as with a residual stream."""
    return space.kind == "channel" and len({part.tensor for part in space.slices_of("read")}) >= STREAM


def _narrowed(keep: Budget, narrowed: Scores, scores: Scores) -> Budget:
    """The same budget for some of the spaces.

    A budget of units counts only the units of these spaces; all other metrics count the whole model.
    """
    if keep.metric != "units" or narrowed is scores:
        return keep
    total, inside = (sum(space.size for space in some.spaces) for some in (scores, narrowed))
    left = round(keep.target(total)) - (total - inside)
    if left < 1:
        raise FairprunerError(f"{total - inside} units of other spaces stay, more than the budget allows.")
    return Budget("units", left)


def _over_all_spaces(plan: Plan, spaces: Spaces) -> Plan:
    """The same plan over all spaces; it removes nothing from the added ones."""
    removed = {name: plan.removed.get(name, ()) for name in spaces.names}
    predicted = {**plan.predicted, **predict(spaces, removed)}
    return replace(
        plan,
        spaces=spaces,
        removed=removed,
        predicted=predicted,
        original={**plan.original, **predict(spaces, {})},
    )
