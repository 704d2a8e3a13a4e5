from fractions import Fraction
from itertools import permutations
from math import comb, floor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairpruner.core.tod import ConflictCurve, conflict_curve, removal_order
from fairpruner.errors import FairprunerError

HUNDREDTHS = [round(k / 100, 2) for k in range(100)]

# Few distinct values, so that most examples have ties.
score_pairs = st.integers(1, 12).flatmap(
    lambda size: st.tuples(*[st.lists(st.integers(-2, 3), min_size=size, max_size=size)] * 2)
)


def overlaps_by_sets(removal: list[int], protection: list[int]) -> list[int]:
    units = range(len(removal))
    first_to_go = sorted(units, key=lambda j: (removal[j], j))
    first_to_stay = sorted(units, key=lambda j: (-protection[j], j))
    return [len(set(first_to_go[:m]) & set(first_to_stay[:m])) for m in range(len(removal) + 1)]


def curves_of_all_rankings(size: int) -> list[ConflictCurve]:
    return [conflict_curve(ranking, np.arange(size)) for ranking in permutations(range(size))]


@given(score_pairs)
def test_overlaps_are_those_of_the_two_sets_with_ties_by_index(pair: tuple[list[int], list[int]]) -> None:
    removal, protection = pair
    curve = conflict_curve(removal, protection)
    assert curve.overlaps.tolist() == overlaps_by_sets(removal, protection)
    assert removal_order(removal).tolist() == sorted(range(len(removal)), key=lambda j: (removal[j], j))


def test_hand_computed_curve() -> None:
    # Removal order 2, 0, 3, 1; protection order 1, 2, 3, 0.
    curve = conflict_curve([0.2, 0.9, 0.1, 0.5], [1.0, 9.0, 5.0, 3.0])
    assert curve.overlaps.tolist() == [0, 0, 1, 2, 4]
    assert curve.tod.tolist() == [0, 0, 1 / 2, 2 / 3, 1]
    assert [curve.depth(alpha) for alpha in (0.0, 0.49, 0.5, 0.66, 0.67, 0.99)] == [1, 1, 2, 2, 3, 3]


def test_ties_go_by_index_in_a_large_space() -> None:
    # An unstable sort would show here: all scores are equal, so both orders are 0, 1, 2, …
    assert conflict_curve(np.zeros(5000), np.zeros(5000)).overlaps.tolist() == list(range(5001))
    assert removal_order(np.zeros(5000)).tolist() == list(range(5000))


@given(score_pairs)
def test_only_the_two_rankings_matter(pair: tuple[list[int], list[int]]) -> None:
    removal, protection = (np.array(values, dtype=float) for values in pair)
    assert (
        conflict_curve(np.exp(removal), 1e6 * protection + 3).overlaps
        == conflict_curve(removal, protection).overlaps
    ).all()


def test_quotients_compare_like_fractions_and_floors_of_products_do_not() -> None:
    overlaps, depths = np.arange(401)[:, None], np.arange(1, 401)[None, :]
    floors_differ = 0
    for hundredths, alpha in enumerate(HUNDREDTHS):
        exact = 100 * overlaps <= hundredths * depths  # integers: no rounding at all
        assert ((overlaps / depths <= alpha) == exact).all()
        floors_differ += int(((overlaps <= np.floor(alpha * depths)) != exact).sum())
    assert floors_differ > 0


@pytest.mark.parametrize("size", range(1, 6))
def test_depth_is_the_largest_feasible_in_exact_arithmetic(size: int) -> None:
    for curve in curves_of_all_rankings(size):
        for alpha in HUNDREDTHS:
            tolerance = Fraction(str(alpha))
            assert curve.depth(alpha) == max(
                m for m, o in enumerate(curve.overlaps.tolist()) if o <= tolerance * m
            )


@given(score_pairs, st.sampled_from(HUNDREDTHS), st.sampled_from(HUNDREDTHS))
def test_depth_never_falls_as_the_tolerance_rises(
    pair: tuple[list[int], list[int]], one: float, other: float
) -> None:
    curve = conflict_curve(*pair)
    assert curve.depth(min(one, other)) <= curve.depth(max(one, other))


@pytest.mark.parametrize("size", range(1, 80))
def test_alignment_reaches_the_feasibility_limit_and_opposition_nothing(size: int) -> None:
    rising = np.arange(size) ** 1.5
    aligned, opposed = conflict_curve(rising, 7 * rising), conflict_curve(rising, -rising)
    assert aligned.tod.tolist() == [0 if 2 * m <= size else (2 * m - size) / m for m in range(size + 1)]
    assert opposed.tod.tolist() == [0] + [1] * size
    for alpha in HUNDREDTHS:
        assert aligned.depth(alpha) == floor(size / (2 - Fraction(str(alpha))))
        assert opposed.depth(alpha) == 0


@pytest.mark.parametrize("size", range(1, 7))
def test_random_rankings_overlap_hypergeometrically_with_mean_tod_m_over_j(size: int) -> None:
    overlaps = np.array([curve.overlaps for curve in curves_of_all_rankings(size)])  # [size!, size + 1]
    for m in range(1, size + 1):
        expected = [
            Fraction(comb(m, h) * comb(size - m, m - h), comb(size, m)) * len(overlaps) for h in range(m + 1)
        ]
        assert np.bincount(overlaps[:, m], minlength=m + 1).tolist() == expected
        assert Fraction(int(overlaps[:, m].sum()), len(overlaps) * m) == Fraction(m, size)


def test_a_curve_with_less_conflict_everywhere_removes_a_larger_share() -> None:
    curves = {
        tuple(curve.overlaps.tolist()): curve
        for size in range(1, 6)
        for curve in curves_of_all_rankings(size)
    }.values()
    grid = np.arange(61)  # x in sixtieths: every step of curves of up to 5 units falls on it

    def on_grid(curve: ConflictCurve) -> np.ndarray:
        return curve.tod[-(-grid * (curve.overlaps.size - 1) // 60)]  # ToD(ceil(x J))

    sampled = [(curve, on_grid(curve)) for curve in curves]
    ordered = [
        (a, b) for a, below in sampled for b, above in sampled if a is not b and (below <= above).all()
    ]
    assert len(ordered) > 100
    for calmer, harsher in ordered:
        for alpha in np.unique(np.concatenate([calmer.tod, harsher.tod])):
            if alpha < 1:
                assert Fraction(calmer.depth(alpha), calmer.overlaps.size - 1) >= Fraction(
                    harsher.depth(alpha), harsher.overlaps.size - 1
                )


@pytest.mark.parametrize(
    ("removal", "protection", "says"),
    [
        ([1.0, 2.0], [1.0], "There are 2 removal scores and 1 protection scores"),
        ([], [], r"shape \[0\]"),
        ([[1.0]], [[1.0]], r"shape \[1, 1\]"),
        (3.0, 3.0, r"shape \[\]"),
        ([1.0, float("nan")], [1.0, 2.0], "Removal scores have 1 NaN or infinite values among 2"),
        (
            [1.0, 2.0],
            [float("inf"), -float("inf")],
            "Protection scores have 2 NaN or infinite values among 2",
        ),
        (["a"], [1.0], "must be numbers"),
        ([[1.0], [1.0, 2.0]], [1.0], "must be numbers"),
    ],
)
def test_bad_scores_are_refused(removal: object, protection: object, says: str) -> None:
    with pytest.raises(FairprunerError, match=says):
        conflict_curve(removal, protection)  # type: ignore[arg-type]


@pytest.mark.parametrize("alpha", [-0.1, 1, 1.5, float("nan"), True, "x", None])
def test_bad_tolerances_are_refused(alpha: object) -> None:
    with pytest.raises(FairprunerError, match="Alpha"):
        conflict_curve([1, 2], [1, 2]).depth(alpha)  # type: ignore[arg-type]
