"""The Wasserstein signals against scipy and plain loops, and the bounded summary against the exact
distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import wasserstein_distance
from small_nets import space, spaces_of
from torch import Tensor, nn

from fairpruner.core.arrays import Floats
from fairpruner.errors import FairprunerError
from fairpruner.scoring.signals import Context, Result, Wasserstein, WassersteinPooled
from fairpruner.scoring.signals.quantiles import ClassQuantiles, quantile_cells, sort_, sorted_with_places
from fairpruner.scoring.signals.wasserstein import SMALLEST, STATE_BYTES, capacity, diameter, quantile_points

UNITS = 4


def measure(
    activation: Tensor,
    labels: Tensor,
    *,
    signal: Wasserstein | None = None,
    batch: int | None = None,
    classes: int = 3,
    seed: int = 0,
) -> Result:
    """What a signal reads from activations [N, J, F] shown in batches; `classes` decides how many samples
    are kept.
    """
    model = nn.Linear(1, activation.shape[1], dtype=activation.dtype)
    spaces = spaces_of(model, space("s", activation.shape[1], ("weight", 0, "write")))
    accumulator = (signal or Wasserstein()).start(Context(model, spaces, "removal", classes, seed))
    for part, own in zip(
        activation.split(batch or len(labels)), labels.split(batch or len(labels)), strict=True
    ):
        accumulator.see_activation(spaces["s"], part, own)
    return accumulator.result()


def draw(
    counts: Sequence[int], features: int, *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Activations [N, J, F] of classes of these sizes, each with its own shift and spread, in random
    order.
    """
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    values = rng.normal(size=(labels.size, UNITS, features)) * (1 + 0.3 * labels[:, None, None])
    values += rng.normal(size=(len(counts), UNITS, features))[labels]
    return torch.from_numpy(values).to(dtype), torch.from_numpy(labels)


def sliced(activation: Tensor, labels: Tensor, directions: Floats) -> Floats:
    """Algorithm 1 as written: loops over units, class pairs and directions, with scipy's W1."""
    values, classes = activation.double().numpy(), labels.numpy()
    scores = np.zeros(values.shape[1])
    for unit in range(values.shape[1]):
        for a, b in combinations(np.unique(classes), 2):
            of_a, of_b = (
                values[classes == a, unit] @ directions,
                values[classes == b, unit] @ directions,
            )  # [n, P]
            mean = np.mean([wasserstein_distance(of_a[:, p], of_b[:, p]) for p in range(directions.shape[1])])
            scores[unit] = max(scores[unit], mean)
    return scores


@given(st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=12), min_size=2, max_size=5))
def test_the_diameter_of_quantile_points_is_the_largest_w1(classes: list[list[float]]) -> None:
    points = quantile_points(
        [torch.tensor([sorted(values)], dtype=torch.float64) for values in classes], projections=1
    )
    expected = max(wasserstein_distance(a, b) for a, b in combinations(classes, 2))
    assert diameter(points).item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(count=st.integers(2, 70), size=st.integers(1, 9), pair=st.data())
def test_the_diameter_finds_the_farthest_pair_wherever_it_stands(
    count: int, size: int, pair: st.DataObject
) -> None:
    """Few and many points in few and many dimensions: all three rules."""
    points = torch.rand(3, count, size, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    first, second = pair.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    away = torch.tensor(pair.draw(st.lists(st.sampled_from([-10.0, 10.0]), min_size=size, max_size=size)))
    points[1, first] += away
    points[1, second] -= away
    expected = (points[:, :, None] - points[:, None]).abs().sum(3).amax((1, 2))
    torch.testing.assert_close(diameter(points), expected)


def test_spaces_get_directions_of_their_own() -> None:
    model = nn.Linear(1, UNITS)
    spaces = spaces_of(
        model, space("a", UNITS, ("weight", 0, "write")), space("b", UNITS, ("weight", 0, "write"))
    )
    accumulator = Wasserstein(projections=3).start(Context(model, spaces, "removal", 2, 0))
    activation, labels = draw((10, 10), 6)
    for one in spaces:
        accumulator.see_activation(one, activation, labels)
    scores = accumulator.result().scores
    assert not np.array_equal(scores["a"], scores["b"])


def test_unequal_class_sizes_are_exact() -> None:
    rng = np.random.default_rng(0)
    few, many = rng.normal(size=3), rng.normal(2, 3, size=32)
    activation = torch.from_numpy(np.concatenate([few, many]))[:, None, None]
    labels = torch.tensor([0] * 3 + [1] * 32)
    assert measure(activation, labels).scores["s"][0] == pytest.approx(
        wasserstein_distance(few, many), rel=1e-12
    )


@pytest.mark.parametrize(
    ("counts", "features"), [((20, 20, 20), 1), ((3, 32, 17), 1), ((20, 20, 20), 9), ((1, 30, 7), 9)]
)
def test_algorithm_1(counts: tuple[int, ...], features: int) -> None:
    activation, labels = draw(counts, features)
    signal = Wasserstein(projections=5)
    # seeded by the seed and the position of the space
    directions = signal.directions(features, 5, (7, 0))
    assert directions.shape == (features, 5 if features > 1 else 1)
    assert np.linalg.norm(directions, axis=0) == pytest.approx(1)
    np.testing.assert_allclose(
        measure(activation, labels, signal=signal, seed=7).scores["s"],
        sliced(activation, labels, directions),
        rtol=1e-10,
    )


def test_pooled_is_the_w1_of_the_means() -> None:
    activation, labels = draw((10, 20, 30), 6)
    expected = sliced(activation.mean(2, keepdim=True), labels, np.ones((1, 1)))
    np.testing.assert_allclose(
        measure(activation, labels, signal=WassersteinPooled()).scores["s"], expected, rtol=1e-10
    )


def test_halves_are_the_even_and_odd_samples_of_each_class() -> None:
    activation, labels = draw((20, 21), 1)
    place = torch.zeros_like(labels)
    for label in (0, 1):
        place[labels == label] = torch.arange(int((labels == label).sum()))
    halves = measure(activation, labels).halves["s"]
    for parity in (0, 1):
        own = place % 2 == parity
        np.testing.assert_allclose(
            halves[parity], sliced(activation[own], labels[own], np.ones((1, 1))), rtol=1e-10
        )


def test_a_single_sample_is_a_class_but_gives_no_second_half() -> None:
    activation, labels = draw((1, 8), 1)
    result = measure(activation, labels)
    np.testing.assert_allclose(result.scores["s"], sliced(activation, labels, np.ones((1, 1))), rtol=1e-10)
    assert not result.halves


def test_one_class_is_refused() -> None:
    activation, labels = draw((8,), 1)
    with pytest.raises(FairprunerError, match="compares classes, and the data holds 1"):
        measure(activation, labels)


def test_features_may_not_change_unless_pooled() -> None:
    model = nn.Linear(1, UNITS)
    spaces = spaces_of(model, space("s", UNITS, ("weight", 0, "write")))
    for signal in (Wasserstein(), WassersteinPooled()):
        accumulator = signal.start(Context(model, spaces, "removal", 2, 0))
        accumulator.see_activation(spaces["s"], torch.randn(4, UNITS, 9), torch.tensor([0, 1, 0, 1]))
        if isinstance(signal, WassersteinPooled):
            accumulator.see_activation(spaces["s"], torch.randn(4, UNITS, 4), torch.tensor([0, 1, 0, 1]))
        else:
            with pytest.raises(FairprunerError, match="has 4 features per unit in this batch and 9 in"):
                accumulator.see_activation(spaces["s"], torch.randn(4, UNITS, 4), torch.tensor([0, 1, 0, 1]))


@pytest.mark.parametrize("features", [1, 5])
@pytest.mark.parametrize("classes", [3, 200])  # room for 256 samples of a class, and for 16
def test_batch_size_makes_no_difference(features: int, classes: int) -> None:
    activation, labels = draw((40, 70, 33), features)
    whole = measure(activation, labels, classes=classes)
    for batch in (1, 7, 64):
        parts = measure(activation, labels, classes=classes, batch=batch)
        np.testing.assert_allclose(parts.scores["s"], whole.scores["s"], rtol=1e-9)
        np.testing.assert_allclose(parts.halves["s"], whole.halves["s"], rtol=1e-9)


def test_order_makes_no_difference_while_samples_are_kept_and_little_afterwards() -> None:
    activation, labels = draw((40, 70, 33), 5)
    order = torch.randperm(len(labels))
    for classes, tolerance in ((3, 1e-9), (200, 0.1)):
        before, after = (
            measure(activation[o], labels[o], classes=classes).scores["s"]
            for o in (torch.arange(len(labels)), order)
        )
        np.testing.assert_allclose(after, before, rtol=tolerance)


def test_permuted_units_get_permuted_scores() -> None:
    activation, labels = draw((30, 30, 30), 5)
    order = torch.tensor([2, 0, 3, 1])
    before, after = measure(activation, labels), measure(activation[:, order], labels)
    np.testing.assert_allclose(after.scores["s"], before.scores["s"][order.numpy()], rtol=1e-12)
    np.testing.assert_allclose(after.halves["s"], before.halves["s"][:, order.numpy()], rtol=1e-12)


def test_low_precision_activations_are_measured_in_single_precision() -> None:
    activation, labels = draw((20, 20), 5, dtype=torch.bfloat16)
    np.testing.assert_allclose(
        measure(activation, labels).scores["s"], measure(activation.double(), labels).scores["s"], rtol=1e-5
    )


# Beyond M samples of a class


def summary(values: Floats, kept: int) -> ClassQuantiles:
    one = ClassQuantiles(1, kept, torch.empty(0, dtype=torch.float64))
    one.extend(torch.from_numpy(values)[:, None], torch.arange(len(values)))
    return one


def test_merged_blocks_by_hand() -> None:
    """M = 4. The even samples 1, 9 and 2, 4 merge into 1.5, 6.5, the odd ones 0, 2 and 4, 6 into 1, 5, each
    value for two samples; 8 and 7 are left over.
    """
    one = summary(np.array([1.0, 0.0, 9.0, 2.0, 2.0, 4.0, 4.0, 6.0, 8.0, 7.0]), 4)
    whole, even, odd = one.steps(slice(0, 1))
    assert one.cells == (4, 2, 2)
    # Five samples 1.5, 1.5, 6.5, 6.5, 8 in two cells of 2.5 samples each.
    assert even.tolist() == [pytest.approx([(2 * 1.5 + 0.5 * 6.5) / 2.5, (1.5 * 6.5 + 8) / 2.5])]
    assert odd.tolist() == [[pytest.approx((2 * 1 + 0.5 * 5) / 2.5), pytest.approx((1.5 * 5 + 7) / 2.5)]]
    ten = [1, 1, 1.5, 1.5, 5, 5, 6.5, 6.5, 7, 8]
    expected = [(1 + 1 + 0.75) / 2.5, (0.75 + 1.5 + 5) / 2.5, (5 + 6.5 + 3.25) / 2.5, (3.25 + 7 + 8) / 2.5]
    assert sum(expected) * 2.5 == pytest.approx(sum(ten))
    assert whole.tolist() == [pytest.approx(expected)]


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=70), st.sampled_from([4, 8, 32]))
def test_the_summary_keeps_the_mean_and_the_order(values: list[float], kept: int) -> None:
    one = summary(np.array(values), kept)
    whole, even, odd = one.steps(slice(0, 1))
    assert whole.mean().item() == pytest.approx(np.mean(values), abs=1e-9)
    assert even.mean().item() == pytest.approx(np.mean(values[::2]), abs=1e-9)
    if len(values) > 1:
        assert odd.mean().item() == pytest.approx(np.mean(values[1::2]), abs=1e-9)
    assert (whole.diff() >= -1e-9).all()
    assert one.cells == (whole.shape[1], even.shape[1], odd.shape[1])


def test_a_pure_shift_stays_exact() -> None:
    values = np.random.default_rng(0).normal(size=500)
    points = quantile_points([summary(v, 32).steps(slice(0, 1)).whole for v in (values, values + 0.7)], 1)
    assert diameter(points).item() == pytest.approx(0.7, rel=1e-9)


@pytest.mark.parametrize(("kept", "tolerance"), [(8, 0.25), (32, 0.07), (256, 0.01)])
def test_the_summary_is_close_to_the_exact_distance(kept: int, tolerance: float) -> None:
    """What the module promises, on classes that differ by shift, by spread and by shape."""
    rng = np.random.default_rng(0)
    base = rng.normal(size=3000)
    for other in (
        rng.normal(0.5, 1, 3000),
        rng.normal(0, 2, 3000),
        rng.exponential(size=3000),
        np.maximum(rng.normal(size=3000), 0),
    ):
        points = quantile_points([summary(v, kept).steps(slice(0, 1)).whole for v in (base, other)], 1)
        assert diameter(points).item() == pytest.approx(wasserstein_distance(base, other), rel=tolerance)


def test_folded_and_whole_classes_compare_on_one_grid() -> None:
    """One class beyond M = 16 (8 cells), one of 5 samples: the W1 of their two step functions."""
    rng = np.random.default_rng(0)
    many, few = rng.normal(size=100), rng.normal(1, 2, size=5)
    cells = summary(many, 16).steps(slice(0, 1)).whole[0].numpy()
    activation = torch.from_numpy(np.concatenate([many, few]))[:, None, None]
    found = measure(activation, torch.tensor([0] * 100 + [1] * 5), classes=200).scores["s"][0]
    assert found == pytest.approx(wasserstein_distance(cells, few), rel=1e-12)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_sorting_by_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    rows = torch.randn(5000, 2, 16)
    expected = rows.sort(-1).values
    assert sort_(rows) is rows
    assert torch.equal(rows, expected)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=12))
def test_sorted_values_keep_their_places(values: list[float]) -> None:
    rows = torch.tensor([values, values[::-1]], dtype=torch.float32)
    before = rows.clone()
    ordered, places = sorted_with_places(rows)
    assert torch.equal(rows, before)
    assert torch.equal(ordered, rows.sort(1).values)
    assert torch.equal(rows.gather(1, places), ordered)
    assert places.sort(1).values.tolist() == 2 * [list(range(len(values)))]


@given(
    st.lists(st.tuples(st.floats(-50, 50), st.integers(1, 6)), min_size=1, max_size=12), st.integers(1, 20)
)
def test_quantile_cells_average_the_repeated_values(weighted: list[tuple[float, int]], cells: int) -> None:
    values, weights = (np.array(part, dtype=float) for part in zip(*weighted, strict=True))
    found = quantile_cells(torch.from_numpy(values)[None], weights, cells)[0]
    repeated = np.repeat(np.sort(np.repeat(values, weights.astype(int))), cells)  # every cell is whole now
    np.testing.assert_allclose(found, repeated.reshape(cells, -1).mean(1), atol=1e-9)


@pytest.mark.parametrize("order", ["as drawn", "sorted", "reversed", "by halves"])
@pytest.mark.parametrize(("kept", "count"), [(8, 100), (32, 3000), (64, 3000)])
def test_no_order_of_the_samples_exceeds_the_bound(order: str, kept: int, count: int) -> None:
    values = np.random.default_rng(count).standard_t(5, count)
    ordered = {
        "as drawn": values,
        "sorted": np.sort(values),
        "reversed": np.sort(values)[::-1].copy(),
        "by halves": np.concatenate([np.sort(values)[::2], np.sort(values)[1::2]]),
    }[order]
    moved = wasserstein_distance(summary(ordered, kept).steps(slice(0, 1)).whole[0].numpy(), values)
    levels = np.ceil(np.log2(count / kept))
    assert moved <= (levels + 1) * np.ptp(values) / kept
    assert moved <= 0.35 * np.std(values) * 8 / kept  # what it is in practice


def test_beyond_the_last_level_blocks_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairpruner.scoring.signals.quantiles.LEVELS", 2)
    values = np.random.default_rng(0).normal(size=1000)
    one = summary(values, 32)
    assert len(one._blocks) == 2
    whole = one.steps(slice(0, 1)).whole[0].numpy()
    assert whole.mean() == pytest.approx(values.mean(), abs=1e-9)
    assert wasserstein_distance(whole, values) < 0.1


@given(
    units=st.integers(1, 200_000),
    classes=st.integers(2, 5000),
    projections=st.integers(1, 256),
    itemsize=st.sampled_from([4, 8]),
)
def test_the_state_fits_its_budget(units: int, classes: int, projections: int, itemsize: int) -> None:
    kept, used = capacity(units, classes, projections, itemsize)
    assert SMALLEST <= kept <= 256
    assert kept & (kept - 1) == 0
    assert 1 <= used <= projections
    assert 4 * kept * used * units * classes * itemsize <= STATE_BYTES or (kept, used) == (SMALLEST, 1)
    if used < projections:
        assert kept == SMALLEST


def test_the_benchmark_net_keeps_16_samples_and_all_projections() -> None:
    assert capacity(4224, 10, 32, 4) == (16, 32)


def test_many_classes() -> None:
    """300 classes, 2 samples each: all pairs, against one distance matrix."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(600, UNITS))
    labels = np.arange(600) % 300
    found = measure(torch.from_numpy(values)[..., None], torch.from_numpy(labels), classes=300).scores["s"]
    ordered = np.sort(values.reshape(2, 300, UNITS), axis=0)  # [2, K, J]
    expected = np.abs(ordered[:, :, None] - ordered[:, None]).mean(0).max((0, 1))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
