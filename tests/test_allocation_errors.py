import pytest
from hand_spaces import hand_scores, random_scores

from fairpruner.allocation import allocate, shuffled, sweep
from fairpruner.core.budget import Budget
from fairpruner.core.scores import Scores
from fairpruner.errors import FairprunerError

SCORES = random_scores([20, 30], seed=0)
OPPOSED = hand_scores([[1, 2, 3, 4], [1, 2, 3, 4]], [[4, 3, 2, 1], [1, 2, 3, 4]])


@pytest.mark.parametrize("alpha", [-0.1, 1, 1.5, float("nan"), True, "x"])
def test_bad_tolerances_are_refused(alpha: object) -> None:
    with pytest.raises(FairprunerError, match=r"Alpha .*\[0, 1\)"):
        allocate(SCORES, alpha=alpha)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "amount", [0, 0.0, 1.5, -3, -0.5, float("nan"), float("inf"), True, "half", None, 51]
)
def test_bad_budgets_are_refused(amount: object) -> None:
    with pytest.raises(FairprunerError, match=r"Budget units keep="):
        sweep(SCORES, "units", [amount])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "either a tolerance or a budget, .* found alpha=None, keep=None"),
        (
            {"alpha": 0.1, "keep": Budget("units", 0.5)},
            "either a tolerance or a budget, .* found alpha=0.1, keep=Budget",
        ),
        (
            {"alpha": 0.1, "exact": True},
            "exact=True needs a budget; found alpha=0.1, keep=None",
        ),
        ({"keep": 0.5}, r"keep is 0.5, expected a budget: for example keep=Budget\('flops', 0.5\)"),
        ({"alpha": 0.1, "rule": "uniform"}, "found rule='uniform': give keep=Budget"),
        ({"alpha": 0.1, "rule": "uniformly"}, "Unknown rule 'uniformly': did you mean 'uniform'\\?"),
        ({"alpha": 0.1, "multiple_of": 0}, "multiple_of=0"),
        ({"alpha": 0.1, "multiple_of": 2.0}, "multiple_of=2.0"),
        ({"alpha": 0.1, "min_keep": 0}, "min_keep is 0"),
        ({"alpha": 0.1, "min_keep": 1.0}, "min_keep is 1.0"),
        ({"alpha": 0.1, "min_keep": True}, "min_keep is True"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(FairprunerError, match=says):
        allocate(SCORES, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scores", "options", "says"),
    [
        (
            SCORES,
            {},
            (
                r"Budget units keep=0.03 is out of reach: the smallest plan keeps 0.04 (every space at its"
                r" minimum). Raise keep."
            ),
        ),
        (
            SCORES,
            {"min_keep": 8},
            (
                r"Budget units keep=0.03 is out of reach: the smallest plan keeps 0.32 (every space at its"
                r" minimum). Raise keep, or lower min_keep."
            ),
        ),
        (
            SCORES,
            {"multiple_of": 8, "rule": "global"},
            "the smallest plan keeps 0.32 (every space at its minimum). Raise keep, or lower multiple_of.",
        ),
        (
            OPPOSED,
            {},
            (
                "the smallest plan keeps 0.625 (at tolerance 0.667, the largest below 1). Raise keep, or use"
                " rule='uniform'."
            ),
        ),
    ],
)
def test_a_budget_out_of_reach_says_what_is_within(
    scores: Scores, options: dict[str, object], says: str
) -> None:
    with pytest.raises(FairprunerError) as error:
        allocate(scores, keep=Budget("units", 0.03), **options)  # type: ignore[arg-type]
    assert str(error.value).endswith(says)


def test_the_amount_named_as_smallest_is_within_reach() -> None:
    scores = random_scores([7, 6], seed=0)  # 2 of 13 units: 0.1538…
    with pytest.raises(FairprunerError, match=r"smallest plan keeps 0.154 "):
        allocate(scores, keep=Budget("units", 0.15))
    with pytest.raises(FairprunerError, match=r"keep=1 is out of reach: the smallest plan keeps 2 "):
        allocate(scores, keep=Budget("units", 1))
    assert allocate(scores, keep=Budget("units", 0.154)).predicted["units"] == 2


def test_unknown_metric_no_space_and_bad_seed_are_refused() -> None:
    with pytest.raises(FairprunerError, match="Unknown metric 'flop': did you mean 'flops'"):
        sweep(SCORES, "flop", [0.5])  # type: ignore[arg-type]
    with pytest.raises(FairprunerError, match="no space"):
        allocate(random_scores([], seed=0), alpha=0.1)
    with pytest.raises(FairprunerError, match="seed=-1"):
        shuffled(allocate(SCORES, alpha=0.1), -1)
