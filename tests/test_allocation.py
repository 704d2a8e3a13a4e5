from dataclasses import replace
from fractions import Fraction
from math import ceil

import numpy as np
import pytest
from hand_spaces import hand_scores, random_scores
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fairpruner.allocation import allocate, shuffled, sweep
from fairpruner.core.budget import METRICS, Budget, Metric
from fairpruner.core.cost_model import CostModel, Factor, Term
from fairpruner.core.costs import predict
from fairpruner.core.plan import Plan
from fairpruner.core.scores import Scores
from fairpruner.core.spaces import Spaces
from fairpruner.core.tod import conflict_curve, removal_order
from fairpruner.core.units import UnitSpace
from fairpruner.errors import FairprunerError, FairprunerWarning

RULES = ("tod", "uniform", "global")
HUNDREDTHS = [round(k / 100, 2) for k in range(100)]
RAGGED = {"s0": [1, 2, 3, 1, 5, 1, 2, 2, 1]}  # units that own different numbers of indices

sizes = st.lists(st.integers(1, 14), min_size=1, max_size=4)
scores_with_ties = st.builds(
    lambda sizes, seed, noise, levels: random_scores(sizes, seed, noise=noise, levels=levels),
    sizes,
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.3, 1.0, 10.0]),
    st.sampled_from([None, 3]),
)
min_keeps = st.one_of(st.integers(1, 6), st.sampled_from([0.1, 0.3, 0.5]))


def candidates(size: int, multiple_of: int, min_keep: float) -> list[int]:
    least = ceil(Fraction(str(min_keep)) * size) if isinstance(min_keep, float) else min_keep
    return [m for m in range(size) if m == 0 or (size - m >= least and (size - m) % multiple_of == 0)]


def overlaps(scores: Scores, name: str) -> list[int]:
    return conflict_curve(scores.removal[name], scores.protection[name]).overlaps.tolist()


def depths_at(scores: Scores, dial: Fraction, multiple_of: int = 1, min_keep: float = 1) -> list[int]:
    """Brute force, in fractions: the largest allowed depth with ToD <= dial; for a dial below 0, that
    share of the way to tolerance 0.
    """
    found = []
    for space in scores.spaces:
        o, allowed = overlaps(scores, space.name), candidates(space.size, multiple_of, min_keep)
        free = max(m for m in allowed if o[m] == 0)
        found.append(max(m for m in allowed if (o[m] <= dial * m if dial >= 0 else m <= free * (1 + dial))))
    return found


def all_dials(scores: Scores) -> list[Fraction]:
    """Every breakpoint: ToD values below 1, and k / m - 1 for every k <= m."""
    dials = {Fraction(-1), Fraction(0)}
    for space in scores.spaces:
        dials |= {Fraction(o, m) for m, o in enumerate(overlaps(scores, space.name)) if m and o < m}
        dials |= {Fraction(k, m) - 1 for m in range(1, space.size) for k in range(m)}
    return sorted(dials)


def plan_depths(plan: Plan) -> list[int]:
    return list(plan.depths.values())


def kept(scores: Scores, depths: list[int], metric: Metric) -> int:
    removed = {
        space.name: removal_order(scores.removal[space.name])[:m].tolist()
        for space, m in zip(scores.spaces, depths, strict=True)
    }
    return predict(scores.spaces, removed)[metric]


@given(scores_with_ties, st.sampled_from(HUNDREDTHS), st.integers(1, 4), min_keeps)
def test_tolerance_gives_the_deepest_allowed_prefixes(
    scores: Scores, alpha: float, multiple_of: int, min_keep: float
) -> None:
    plan = allocate(scores, alpha=alpha, multiple_of=multiple_of, min_keep=min_keep)
    assert plan_depths(plan) == depths_at(scores, Fraction(str(alpha)), multiple_of, min_keep)
    assert (plan.alpha, plan.rule, plan.exact) == (alpha, "tod", False)
    for name, units in plan.removed.items():
        assert units == tuple(removal_order(scores.removal[name]).tolist()[: len(units)])
        assert all(type(unit) is int for unit in units)


@given(scores_with_ties, st.sampled_from(HUNDREDTHS), st.sampled_from(HUNDREDTHS))
def test_removed_sets_are_nested_and_kept_amounts_fall_as_the_tolerance_rises(
    scores: Scores, one: float, other: float
) -> None:
    gentle, harsh = allocate(scores, alpha=min(one, other)), allocate(scores, alpha=max(one, other))
    assert all(set(gentle.removed[name]) <= set(harsh.removed[name]) for name in gentle.removed)
    assert all(gentle.predicted[metric] >= harsh.predicted[metric] for metric in METRICS)


@given(scores_with_ties)
def test_budgets_change_at_breakpoints_only(scores: Scores) -> None:
    breakpoints = [float(dial) for dial in all_dials(scores) if dial >= 0]
    for here, following in zip(breakpoints, [*breakpoints[1:], 1.0], strict=True):
        depths = plan_depths(allocate(scores, alpha=here))
        assert (
            depths
            == plan_depths(allocate(scores, alpha=(here + following) / 2))
            == plan_depths(allocate(scores, alpha=float(np.nextafter(following, 0))))
        )


@settings(max_examples=60)
@given(scores_with_ties, st.sampled_from(METRICS), st.integers(1, 99), st.integers(1, 3), st.integers(1, 3))
def test_budget_is_the_nearest_of_all_breakpoints_and_keeps_more_on_a_tie(
    scores: Scores, metric: Metric, percent: int, multiple_of: int, min_keep: int
) -> None:
    reachable = {
        kept(scores, depths_at(scores, dial, multiple_of, min_keep), metric) for dial in all_dials(scores)
    }
    target = Fraction(percent, 100) * max(reachable)
    assume(min(reachable) <= target)
    plan = allocate(scores, keep=Budget(metric, percent / 100), multiple_of=multiple_of, min_keep=min_keep)
    assert plan.predicted[metric] == min(reachable, key=lambda amount: (abs(amount - target), -amount))
    assert plan.predicted == {m: kept(scores, plan_depths(plan), m) for m in METRICS}
    assert plan.original == {m: kept(scores, [0] * len(scores.spaces), m) for m in METRICS}
    at_its_tolerance = allocate(scores, alpha=plan.alpha, multiple_of=multiple_of, min_keep=min_keep).depths
    assert plan.depths == at_its_tolerance or (
        plan.alpha == 0 and all(depth <= at_its_tolerance[name] for name, depth in plan.depths.items())
    )


@pytest.mark.slow
@settings(max_examples=50)
@given(scores_with_ties, st.sampled_from(RULES), st.integers(1, 3))
def test_every_reachable_share_and_count_is_given_back(scores: Scores, rule: str, multiple_of: int) -> None:
    original = kept(scores, [0] * len(scores.spaces), "units")
    for count in range(1, original + 1):
        try:
            plan = allocate(
                scores, keep=Budget("flops", count / original), rule=rule, multiple_of=multiple_of
            )
        except FairprunerError:
            continue
        for (
            metric
            # a plan's own share or count, asked for again, is within reach and gives that amount
        ) in METRICS:
            again = [
                allocate(scores, keep=Budget(metric, amount), rule=rule, multiple_of=multiple_of)
                for amount in (plan.share(metric), plan.predicted[metric])
            ]
            assert [p.predicted[metric] for p in again] == [plan.predicted[metric]] * 2


def test_the_share_of_an_unknown_metric_is_refused() -> None:
    with pytest.raises(FairprunerError, match="Unknown metric 'flop': did you mean 'flops'"):
        allocate(random_scores([6], seed=0), alpha=0.1).share("flop")


def test_shares_are_read_as_decimals() -> None:
    assert 0.29 * 50 < 14.5
    assert (
        allocate(random_scores([50], seed=0), keep=Budget("units", 0.29), rule="global").predicted["units"]
        == 15
    )  # a tie: keep more
    assert 1 / 49 * 49 < 1
    assert (
        allocate(random_scores([49], seed=0), keep=Budget("units", 1 / 49)).predicted["units"] == 1
    )  # within reach


def test_constraints_come_before_the_maximum() -> None:
    # ToD at depths 0..8: the deepest with ToD <= 0.4 is 5, which keeps 3. Rounding that to an even count
    # afterwards would keep 4 at ToD 1/2 > 0.4; the right answer is the depth 2 at ToD 0.
    scores = hand_scores([list(range(8))], [[6, 1, 2, 8, 3, 4, 5, 7]])
    tod = conflict_curve(scores.removal["s0"], scores.protection["s0"]).tod
    assert tod.tolist() == [0, 0, 0, 1 / 3, 2 / 4, 2 / 5, 4 / 6, 6 / 7, 1]
    assert plan_depths(allocate(scores, alpha=0.4)) == [5]
    assert plan_depths(allocate(scores, alpha=0.4, multiple_of=2)) == [2]
    assert plan_depths(allocate(scores, alpha=0.4, min_keep=4)) == [3]
    assert plan_depths(allocate(scores, alpha=0.4, min_keep=0.55)) == [3]


def test_least_kept_is_the_largest_of_space_count_and_share() -> None:
    scores = random_scores([10, 4], seed=0, noise=0.0, min_keep=3)
    assert plan_depths(allocate(scores, alpha=0.99)) == [7, 1]
    assert plan_depths(allocate(scores, alpha=0.99, min_keep=5)) == [5, 0]
    assert plan_depths(allocate(scores, alpha=0.99, min_keep=0.7)) == [3, 1]


def test_gentle_budgets_are_reachable_where_tolerance_0_removes_half() -> None:
    scores = random_scores([40, 40, 40], seed=1, noise=0.0)
    assert plan_depths(allocate(scores, alpha=0.0)) == [20, 20, 20]
    for amount in (0.95, 0.9, 0.7):
        plan = allocate(scores, keep=Budget("units", amount))
        assert plan.share("units") == amount
        assert plan.alpha == 0.0
    assert plan_depths(allocate(scores, keep=Budget("units", 1.0))) == [0, 0, 0]


@given(scores_with_ties, st.sampled_from(RULES), st.sampled_from(METRICS))
def test_keeping_everything_is_the_empty_plan(scores: Scores, rule: str, metric: Metric) -> None:
    assert not any(plan_depths(allocate(scores, keep=Budget(metric, 1.0), rule=rule)))


@given(scores_with_ties, st.integers(1, 99), st.integers(1, 3))
def test_uniform_removes_the_same_share_everywhere(scores: Scores, percent: int, min_keep: int) -> None:
    total = sum(space.size for space in scores.spaces)
    shares = {Fraction(k, space.size) for space in scores.spaces for k in range(space.size)}
    profiles = [
        [
            max(m for m in candidates(space.size, 1, min_keep) if m <= share * space.size)
            for space in scores.spaces
        ]
        for share in shares
    ]
    reachable = {total - sum(profile) for profile in profiles}
    target = Fraction(percent, 100) * total
    assume(min(reachable) <= target)
    plan = allocate(scores, keep=Budget("units", percent / 100), rule="uniform", min_keep=min_keep)
    assert plan.predicted["units"] == min(reachable, key=lambda amount: (abs(amount - target), -amount))
    assert plan.alpha is None
    assert plan_depths(plan) in profiles


@given(scores_with_ties, st.integers(1, 60))
def test_global_takes_the_first_of_one_merged_ranking(scores: Scores, count: int) -> None:
    ranking = []
    for s, space in enumerate(scores.spaces):  # the last unit of a space stays, whatever its score
        values = scores.removal[space.name]
        ranking += [
            (values[unit], s, position, unit)
            for position, unit in enumerate(removal_order(values)[: space.size - 1].tolist())
        ]
    assume(count <= len(ranking))
    total = sum(space.size for space in scores.spaces)
    plan = allocate(scores, keep=Budget("units", total - count), rule="global")
    expected = {
        name: tuple(unit for _, s, _, unit in sorted(ranking)[:count] if scores.spaces[s].name == name)
        for name in scores.spaces.names
    }
    assert plan.removed == expected


def exact_by_hand(scores: Scores, count: int) -> list[int]:
    """The repair as it is described: from the last breakpoint that keeps enough, one unit at a time where
    ToD is lowest next.
    """
    steps = [depths_at(scores, dial) for dial in all_dials(scores)]
    total = sum(space.size for space in scores.spaces)
    above = [depths for depths in steps if total - sum(depths) >= count][-1]
    depths, end = list(above), next((depths for depths in steps if total - sum(depths) < count), above)
    curves = [overlaps(scores, name) for name in scores.spaces.names]
    while total - sum(depths) > count:
        _, s = min((Fraction(curves[s][m + 1], m + 1), s) for s, m in enumerate(depths) if m < end[s])
        depths[s] += 1
    return depths


@settings(max_examples=60)
@given(scores_with_ties, st.data())
def test_exact_hits_every_count_by_the_least_conflict(scores: Scores, data: st.DataObject) -> None:
    total, smallest = (
        sum(space.size for space in scores.spaces),
        sum(space.size for space in scores.spaces) - sum(depths_at(scores, all_dials(scores)[-1])),
    )
    count = data.draw(st.integers(smallest, total))
    plan = allocate(scores, keep=Budget("units", count), exact=True)
    assert plan.predicted["units"] == count
    assert plan.exact
    at_its_tolerance = allocate(scores, alpha=plan.alpha).depths
    assert plan.alpha == 0 or all(depth >= at_its_tolerance[name] for name, depth in plan.depths.items())
    assert plan_depths(plan) == exact_by_hand(scores, count)


@settings(max_examples=60)
@given(scores_with_ties, st.sampled_from(("uniform", "global")))
def test_exact_hits_every_count_with_the_other_rules(scores: Scores, rule: str) -> None:
    counts = range(len(scores.spaces), sum(space.size for space in scores.spaces) + 1)
    assert [
        plan.predicted["units"] for plan in sweep(scores, "units", counts, rule=rule, exact=True)
    ] == list(counts)


@settings(max_examples=60)
@given(scores_with_ties, st.sampled_from(RULES), st.sampled_from(["params", "flops"]), st.integers(20, 99))
def test_exact_is_never_farther_from_the_target(
    scores: Scores, rule: str, metric: Metric, percent: int
) -> None:
    budget = Budget(metric, percent / 100)
    try:
        plain = allocate(scores, keep=budget, rule=rule)
    except FairprunerError:
        assume(False)
    exact, target = (
        allocate(scores, keep=budget, rule=rule, exact=True),
        percent / 100 * plain.original[metric],
    )
    assert abs(exact.predicted[metric] - target) <= abs(plain.predicted[metric] - target) + 1e-9
    assert exact.predicted == {m: kept(scores, plan_depths(exact), m) for m in METRICS}


def test_exact_hits_expert_counts_that_a_shared_tolerance_misses() -> None:
    scores, counts = random_scores([60] * 24, seed=3), range(700, 740)
    plain, exact = (sweep(scores, "units", counts, exact=flag) for flag in (False, True))
    assert [plan.predicted["units"] for plan in exact] == list(counts)
    missed = [p for p, count in zip(plain, counts, strict=True) if p.predicted["units"] != count]
    assert len(missed) > 5
    for before, after in zip(
        exact[1:], exact, strict=False
    ):  # one unit fewer kept is one unit more removed, so the plans are nested
        assert all(set(before.removed[name]) <= set(after.removed[name]) for name in before.removed)


def test_units_that_cost_nothing_stay_where_they_do_not_help() -> None:
    scores = random_scores([8, 8], seed=2)
    free = CostModel((Factor(8, {"s0": np.ones(8, dtype=np.int64)}),), params=(Term(1, (0,)),), flops=())
    scores = replace(scores, spaces=replace(scores.spaces, costs=free))
    steps = [depths_at(scores, dial) for dial in all_dials(scores)]
    for count in np.arange(1, 8, 0.4):  # also between two steps, nearer to either
        plan = allocate(scores, keep=Budget("params", count / 8))
        assert plan_depths(plan) == next(
            depths for depths in steps if 8 - depths[0] == plan.predicted["params"]
        )
    assert plan_depths(allocate(scores, keep=Budget("flops", 0.5))) == [
        0,
        0,
    ]  # a model without FLOPs is at half of them already


def test_costs_of_units_that_own_unequal_parts() -> None:
    scores = random_scores([9, 6, 5], seed=5, owned=RAGGED)
    # w0 is 3 x 18 once, w1 18 x 6 twice, w2 6 x 5 three times, w3 5 x 10 four times.
    assert allocate(scores, alpha=0.3).original == {
        "units": 20,
        "params": 54 + 108 + 30 + 50,
        "flops": 54 + 216 + 90 + 200,
    }
    for plan in sweep(scores, "params", [0.9, 0.6, 0.4, 0.25]):
        assert plan.predicted == predict(scores.spaces, plan.removed)


@pytest.mark.parametrize("rule", RULES)
def test_a_sweep_gives_the_plans_of_single_calls(rule: str) -> None:
    scores, amounts = random_scores([30, 50, 20], seed=7), [0.9, 0.5, 300, 0.3]
    options = {"rule": rule, "exact": True, "multiple_of": 2, "min_keep": 0.2}
    single = [allocate(scores, keep=Budget("params", amount), **options) for amount in amounts]
    assert [plan.removed for plan in sweep(scores, "params", iter(amounts), **options)] == [
        plan.removed for plan in single
    ]


def test_shuffled_keeps_the_depths_and_draws_the_units() -> None:
    scores = random_scores([9, 40, 30], seed=5, owned=RAGGED)
    plan = allocate(scores, alpha=0.2)
    first, again, other = shuffled(plan, 0), shuffled(plan, 0), shuffled(plan, 1)
    assert first.depths == other.depths == plan.depths
    assert first.removed == again.removed
    assert len({str(p.removed) for p in (plan, first, other)}) == 3
    assert (first.rule, first.alpha) == ("tod+random", plan.alpha)
    assert first.predicted == predict(scores.spaces, first.removed)
    assert all(type(unit) is int for units in first.removed.values() for unit in units)
    drawn = np.bincount(
        [unit for seed in range(400) for unit in shuffled(plan, seed).removed["s2"]], minlength=30
    )
    assert drawn.min() > 0.7 * drawn.mean()  # every unit is drawn about as often


def test_a_plan_far_from_its_budget_says_how_to_come_nearer() -> None:
    """Two spaces alike lose a unit at one tolerance, so no plan of the rule keeps three units of four."""
    scores = hand_scores([[0, 1], [0, 1]], [[0, 1], [0, 1]])
    three = Budget("units", 0.75)
    with pytest.warns(FairprunerWarning, match=r"keep=0.75: .* keeps 1.00. To come nearer, give exact=True."):
        allocate(scores, keep=three)
    assert allocate(scores, keep=three, exact=True).predicted["units"] == 3
    pairs = hand_scores([[0, 1, 2, 3]], [[0, 1, 2, 3]])
    with pytest.warns(FairprunerWarning, match=r"keep=3: .* keeps \d. To come nearer, lower multiple_of or"):
        allocate(pairs, keep=Budget("units", 3), exact=True, multiple_of=2)


def two_costs() -> Scores:
    """Two spaces of equal scores: a unit of `wide` has many FLOPs and few parameters, one of `deep` the
    opposite.
    """
    spaces = Spaces(
        tuple(UnitSpace(name, "channel", 8, slices=()) for name in ("wide", "deep")),
        {},
        CostModel(
            factors=(
                Factor(8, {"wide": np.ones(8, dtype=np.int64)}),
                Factor(8, {"deep": np.ones(8, dtype=np.int64)}),
            ),
            params=(Term(10, (0,)), Term(1000, (1,))),
            flops=(Term(9000, (0,)), Term(1000, (1,))),
        ),
        "",
    )
    values = {"wide": np.arange(1.0, 9.0), "deep": np.arange(1.0, 9.0)}
    names = ("l1", "reconstruction", "channel=surgeon")
    return Scores(spaces, dict.fromkeys(names, values), {"taylor": values}, samples=1)


@pytest.mark.parametrize("signal", ["reconstruction", "channel=surgeon"])
def test_scores_per_flop_become_scores_per_what_the_budget_counts(signal: str) -> None:
    scores = two_costs().using(signal)
    by_hand = {"params": {"wide": 9000 / 10, "deep": 1.0}, "units": {"wide": 9000.0, "deep": 1000.0}}
    for metric, factors in by_hand.items():
        removal = {name: scores.removal[name] * factor for name, factor in factors.items()}
        expected = replace(scores, removals={"l1": removal})
        for share in (0.9, 0.6, 0.3):
            keep = Budget(metric, share)
            assert (
                allocate(scores, keep=keep, rule="global").removed
                == allocate(expected, keep=keep, rule="global").removed
            )
            (swept,) = sweep(scores, metric, [share], rule="global")
            assert swept.removed == allocate(scores, keep=keep, rule="global").removed
    # Parameters are saved in `deep`, FLOPs in both.
    assert allocate(scores, keep=Budget("params", 0.5), rule="global").depths == {"wide": 0, "deep": 4}
    assert allocate(scores, keep=Budget("flops", 0.5), rule="global").depths == {"wide": 4, "deep": 4}


def test_other_scores_do_not_depend_on_the_budget() -> None:
    scores = two_costs()
    for name in ("wide", "deep"):
        assert (scores.per("params").removals["l1"][name] == scores.removals["l1"][name]).all()
    assert scores.per("flops") is scores
    assert scores.per("latency_ms") is scores
