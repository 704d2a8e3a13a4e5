import json
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, product
from math import floor

import numpy as np
import pytest
from hand_spaces import hand_scores, random_scores
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console
from scipy.stats import spearmanr

from fairpruner.allocation import allocate, shuffled
from fairpruner.allocation.bounds import depth_limit, mass_bound
from fairpruner.allocation.diagnostics import diagnose
from fairpruner.core.budget import Budget
from fairpruner.core.correlation import spearman
from fairpruner.core.plan import Plan
from fairpruner.core.scores import Scores
from fairpruner.errors import FairprunerError

TOLERANCES = [
    "0",
    "0.1",
    "0.2",
    "0.25",
    "0.29",
    "0.3",
    "0.34",
    "0.5",
    "0.6",
    "0.67",
    "0.7",
    "0.75",
    "0.8",
    "0.9",
    "0.99",
]


def feasible_sets(size: int, depth: int, alpha: str) -> list[tuple[int, ...]]:
    """The paper's class C(m, alpha), where the units stand by falling R-Score."""
    return [
        chosen
        for chosen in combinations(range(size), depth)
        if sum(unit < depth for unit in chosen) <= floor(Fraction(alpha) * depth)
    ]


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("alpha", TOLERANCES)
def test_the_depth_limit_is_the_largest_depth_with_a_feasible_set(size: int, alpha: str) -> None:
    feasible = [depth for depth in range(size + 1) if feasible_sets(size, depth, alpha)]
    assert feasible == [m for m in range(size + 1) if max(0, 2 * m - size) <= floor(Fraction(alpha) * m)]
    assert depth_limit(size, float(alpha)) == feasible[-1] == floor(size / (2 - Fraction(alpha)))


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("alpha", TOLERANCES)
def test_the_mass_bound_is_attained_by_some_feasible_set_and_exceeded_by_none(size: int, alpha: str) -> None:
    falling = np.sort(np.random.default_rng(size).integers(0, 20, size))[::-1].astype(
        float
    )  # whole numbers: sums are exact
    units = np.random.default_rng(0).permutation(size)
    for depth in range(depth_limit(size, float(alpha)) + 1):
        heaviest = max(sum(falling[unit] for unit in chosen) for chosen in feasible_sets(size, depth, alpha))
        assert mass_bound(falling[units], depth, float(alpha)) == heaviest


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=3),
    st.integers(0, 10**6),
    st.sampled_from(TOLERANCES),
    st.sampled_from(["alpha", "exact", "uniform", "shuffled"]),
)
def test_facts_of_every_kind_of_plan(sizes: list[int], seed: int, alpha: str, kind: str) -> None:
    scores = random_scores(sizes, seed, levels=5 if seed % 2 else None)
    everything = Budget("units", sum(sizes))
    plan = {
        "alpha": lambda: allocate(scores, alpha=float(alpha)),
        "exact": lambda: allocate(
            scores,
            keep=replace(
                everything, amount=max(allocate(scores, alpha=0.999).predicted["units"], sum(sizes) // 2)
            ),
            exact=True,
        ),
        "uniform": lambda: allocate(
            scores, keep=replace(everything, amount=max(len(sizes), sum(sizes) // 2)), rule="uniform"
        ),
        "shuffled": lambda: shuffled(allocate(scores, alpha=float(alpha)), seed),
    }[kind]()
    diagnosis = diagnose(scores, plan)
    for row in diagnosis.spaces:
        removed, r = set(plan.removed[row.space]), scores.protection[row.space]
        protected = sorted(range(row.size), key=lambda j: (-r[j], j))[: row.depth]
        assert (row.kept, row.depth) == (row.size - len(removed), len(removed))
        assert row.tod == len(removed & set(protected)) / max(row.depth, 1) <= row.tolerance
        assert row.mass == pytest.approx(sum(r[j] for j in removed))
        assert row.mass <= row.bound + 1e-12
        assert row.depth <= row.limit
        if kind == "alpha":
            assert row.tolerance == float(alpha)
    assert diagnosis.cost == pytest.approx(sum(row.mass for row in diagnosis.spaces))


def brute_force_minimum(costs: list[list[float]], units: int) -> float:
    profiles = (m for m in product(*(range(len(cost) + 1) for cost in costs)) if sum(m) == units)
    return min(sum(sum(cost[:depth]) for cost, depth in zip(costs, m, strict=True)) for m in profiles)


rising_costs = st.lists(
    st.lists(st.integers(0, 9).map(float), min_size=1, max_size=5).map(sorted), min_size=1, max_size=3
)


@given(rising_costs, st.data())
def test_a_plan_called_optimal_has_the_lowest_cost_of_all_profiles(
    costs: list[list[float]], data: st.DataObject
) -> None:
    depths = [data.draw(st.integers(0, len(cost) - 1)) for cost in costs]
    scores = hand_scores([list(range(len(cost))) for cost in costs], costs)
    diagnosis = diagnose(scores, by_hand(scores, depths))
    assert diagnosis.rising_costs
    assert diagnosis.optimal == diagnosis.exchange
    # For rising costs the exchange condition is not only sufficient, as the paper shows, but necessary:
    # units at either side of a violated pair could be exchanged at a gain.
    assert diagnosis.optimal == (diagnosis.cost == brute_force_minimum(costs, sum(depths)))
    if diagnosis.optimal:
        assert diagnosis.cost <= diagnosis.uniform_cost


@settings(max_examples=50)
@given(rising_costs, st.integers(0, 12))
def test_merged_ranking_by_cost_meets_the_exchange_condition(costs: list[list[float]], units: int) -> None:
    scores = hand_scores(costs, costs)
    largest = sum(len(cost) - 1 for cost in costs)
    plan = allocate(scores, keep=Budget("units", sum(map(len, costs)) - min(units, largest)), rule="global")
    whole_spaces_wanted = any(
        depth == len(cost) - 1 for depth, cost in zip(plan.depths.values(), costs, strict=True)
    )
    # only a minimum kept can stand in the way
    assert diagnose(scores, plan).optimal or whole_spaces_wanted


def by_hand(scores: Scores, depths: list[int]) -> Plan:
    empty = allocate(scores, keep=Budget("units", 1.0))
    removed = {
        name: tuple(np.argsort(scores.removal[name], kind="stable")[:m].tolist())
        for name, m in zip(scores.spaces.names, depths, strict=True)
    }
    return replace(
        empty, removed=removed, predicted={**empty.original, "units": empty.original["units"] - sum(depths)}
    )


@given(st.integers(0, 10**6), st.sampled_from([0.1, 0.3, 0.5]))
def test_ranks_alone_cannot_beat_every_plan_of_the_same_budget(seed: int, alpha: float) -> None:
    scores = random_scores([9, 6], seed)
    tod = allocate(scores, alpha=alpha)
    uniform = allocate(scores, keep=Budget("units", tod.predicted["units"]), rule="uniform", exact=True)
    assume(tod.depths != uniform.depths)
    # Blow up the R-Scores of the space that ToD cuts deeper: all rankings stay, ToD's plan too, and now
    # it is
    # the costlier one.
    deeper = next(name for name in tod.removed if tod.depths[name] > uniform.depths[name])
    protection = {
        name: (1e6 if name == deeper else 1e-6) * (values + 0.1) for name, values in scores.protection.items()
    }
    scaled = Scores(scores.spaces, scores.removals, {"r": protection}, samples=8)
    assert allocate(scaled, alpha=alpha).removed == tod.removed
    assert diagnose(scaled, tod).cost > diagnose(scaled, uniform).cost == diagnose(scaled, tod).uniform_cost


def hand_example() -> Scores:
    # Removal goes by index in both spaces. Protection order of s0: 5, 4, 1, 3, 2, 0; of s1: 3, 2, 1, 0.
    scores = hand_scores([[0, 1, 2, 3, 4, 5], [10, 11, 12, 13]], [[1, 6, 2, 4, 8, 9], [1, 2, 3, 7]])
    halves = {
        "u": {
            "s0": np.array([[0, 1, 2, 3, 4, 5], [0, 3, 2, 1, 4, 5]], dtype=float),
            "s1": np.array([[0, 1, 2, 3], [3, 2, 1, 0]], dtype=float),
        },
        "r": {
            "s0": np.array([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]], dtype=float),
            "s1": np.array([[1, 1, 1, 1], [1, 2, 3, 4]], dtype=float),
        },
    }
    return replace(scores, halves=halves)


def test_hand_computed_diagnosis() -> None:
    diagnosis = diagnose(hand_example(), allocate(hand_example(), alpha=0.4))
    first, second = diagnosis.spaces
    # s0: overlaps 0, 0, 0, 1, 2, 4, 6, so ToD 1/3 at depth 3 is the deepest within 0.4. It removes 1 + 6
    # + 2
    # = 9; one of three may be protected: 9 + (4 + 2) = 15. The limit is floor(6 / 1.6) = 3.
    assert (first.kept, first.depth, first.tod, first.tolerance, first.limit, first.mass, first.bound) == (
        3,
        3,
        1 / 3,
        0.4,
        3,
        9.0,
        15.0,
    )
    # s1: aligned, depth floor(4 / 1.6) = 2, removes 1 + 2; none of two may be protected, so the bound is
    # 2 +
    # 1.
    assert (
        second.kept,
        second.depth,
        second.tod,
        second.tolerance,
        second.limit,
        second.mass,
        second.bound,
    ) == (2, 2, 0.0, 0.4, 2, 3.0, 3.0)
    # The last removed cost 2 and 2, the next would cost 4 and 3; but the costs of s0 do not rise.
    assert (
        first.exchange,
        second.exchange,
        diagnosis.exchange,
        diagnosis.rising_costs,
        diagnosis.optimal,
    ) == (True, True, True, False, False)
    # half of each space is the uniform plan
    assert (diagnosis.cost, diagnosis.uniform_cost) == (12.0, 12.0)
    # Half 1 removes 0, 1, 2 of s0 and half 2 removes 0, 3, 2; of s1 they remove 0, 1 and 3, 2.
    assert (first.removed_overlap, second.removed_overlap) == (2 / 3, 0.0)
    assert first.removal_stability == pytest.approx(1 - 6 * 8 / (6 * 35))
    assert (first.protection_stability, second.removal_stability, second.protection_stability) == (
        1.0,
        -1.0,
        None,
    )


def test_the_uniform_plan_compared_with_has_as_many_units() -> None:
    # Shares of 1/3 remove 2 + 1 units and of 1/2 remove 3 + 2; the fourth unit goes where ToD is lower,
    # in
    # s1.
    diagnosis = diagnose(hand_example(), by_hand(hand_example(), [1, 3]))
    assert (diagnosis.cost, diagnosis.uniform_cost) == (1 + 1 + 2 + 3, 1 + 6 + 1 + 2)


def test_a_violated_exchange_names_the_space() -> None:
    scores = hand_scores([[0, 1, 2], [0, 1, 2]], [[1, 2, 3], [10, 20, 30]])
    diagnosis = diagnose(scores, allocate(scores, keep=Budget("units", 4), rule="uniform"))
    assert [row.exchange for row in diagnosis.spaces] == [
        True,
        False,
    ]  # 10 is removed from s1 where 2 would do in s0
    assert not diagnosis.exchange
    assert diagnosis.cost == diagnosis.uniform_cost == 11


def test_what_was_not_measured_is_none() -> None:
    scores = replace(hand_example(), halves={})
    row = diagnose(scores, allocate(scores, alpha=0.4)).spaces[0]
    assert (row.removal_stability, row.protection_stability, row.removed_overlap) == (None, None, None)
    untouched = diagnose(hand_example(), allocate(hand_example(), keep=Budget("units", 1.0))).spaces[0]
    assert (
        untouched.depth,
        untouched.removed_overlap,
        untouched.exchange,
        untouched.mass,
        untouched.bound,
    ) == (0, None, True, 0.0, 0.0)


@given(
    st.integers(2, 15).flatmap(
        lambda n: st.tuples(*[st.lists(st.integers(0, 4), min_size=n, max_size=n)] * 2)
    )
)
def test_spearman_is_scipys_with_ties(pair: tuple[list[int], list[int]]) -> None:
    a, b = (np.array(values, dtype=float) for values in pair)
    if len(set(pair[0])) == 1 or len(set(pair[1])) == 1:
        assert spearman(a, b) is None
    else:
        assert spearman(a, b) == pytest.approx(spearmanr(a, b).statistic, abs=1e-12)


def test_it_goes_to_json_and_prints_as_a_table() -> None:
    diagnosis = diagnose(hand_example(), allocate(hand_example(), alpha=0.4))
    read = json.loads(json.dumps(diagnosis.to_json()))
    assert (read["alpha"], read["rule"], read["optimal"], read["kept"]["units"]) == (0.4, "tod", False, 0.5)
    assert [(row["space"], row["depth"], row["protection_stability"]) for row in read["spaces"]] == [
        ("s0", 3, 1.0),
        ("s1", 2, None),
    ]
    console = Console(width=80)
    with console.capture() as printed:
        console.print(diagnosis)
    lines = [line.split() for line in printed.get().splitlines()]
    assert ["s0", "3/6", "3/3", "0.33", "60%", "yes", "0.77", "1.00", "0.67"] in lines
    assert ["s1", "2/4", "2/2", "0.00", "100%", "yes", "-1.00", "–", "0.00"] in lines


OTHER_MODEL = replace(
    random_scores([6, 4], seed=0), spaces=replace(hand_example().spaces, fingerprint="another")
)


@pytest.mark.parametrize("other", [random_scores([6], seed=0), random_scores([6, 5], seed=0), OTHER_MODEL])
def test_a_plan_of_other_spaces_is_refused(other: Scores) -> None:
    with pytest.raises(FairprunerError, match="belong to different models"):
        diagnose(hand_example(), allocate(other, alpha=0.4))
