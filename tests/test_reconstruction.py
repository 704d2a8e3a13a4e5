"""The reconstruction signal against brute force: the greedy order of the least error that the kept units
cannot make up for.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import small_nets
import torch
from hypothesis import given
from torch import nn

import fairpruner as fp
from fairpruner.core.arrays import Floats
from fairpruner.core.cost_model import CostModel
from fairpruner.scoring.signals import Reconstruction, surgeon
from fairpruner.scoring.signals import reconstruction as module
from fairpruner.scoring.signals.base import Context
from fairpruner.scoring.signals.reconstruction import greedy_errors


def left_error(covariance: Floats, weights: Floats, gone: list[int]) -> float:
    """The error of the outputs without some inputs, the others making up for them as well as can be."""
    kept = [i for i in range(len(covariance)) if i not in gone]
    rest = covariance[np.ix_(gone, gone)]
    if kept:
        rest = rest - covariance[np.ix_(gone, kept)] @ np.linalg.solve(
            covariance[np.ix_(kept, kept)], covariance[np.ix_(kept, gone)]
        )
    return float(np.trace(weights[gone].T @ rest @ weights[gone]))


def brute_force(covariance: Floats, weights: Floats, width: int) -> tuple[list[int], list[float]]:
    units, order, errors = len(covariance) // width, [], []
    for _ in range(units):
        candidates = {
            u: left_error(
                covariance, weights, [i for v in (*order, u) for i in range(v * width, (v + 1) * width)]
            )
            for u in range(units)
            if u not in order
        }
        order.append(min(candidates, key=lambda u: candidates[u]))
        errors.append(candidates[order[-1]])
    return order, errors


@given(
    units=st.integers(1, 7), width=st.integers(1, 3), outputs=st.integers(1, 5), seed=st.integers(0, 10**6)
)
def test_scores_are_the_errors_of_the_greedy_order(units: int, width: int, outputs: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = rng.normal(size=(200, units * width)) * rng.uniform(0.5, 2, units * width)
    mixed = samples @ (np.eye(units * width) + 0.3 * rng.normal(size=(units * width, units * width)))
    covariance, weights = (
        np.cov(mixed.T).reshape(units * width, -1),
        rng.normal(size=(units * width, outputs)),
    )
    order, errors = brute_force(covariance, weights, width)
    scores = greedy_errors(covariance, weights @ weights.T, units)
    np.testing.assert_allclose(np.sort(scores), errors, rtol=1e-2, atol=1e-6 * errors[-1])
    assert np.argsort(scores).tolist() == order


def one_by_one(covariance: Floats, gram: Floats, units: int) -> Floats:
    """The greedy errors with both matrices updated after every removal, as the formulas are written."""
    width = len(covariance) // units
    inverse, gram, total, scores = np.linalg.inv(covariance), gram.copy(), 0.0, np.zeros(units)
    left = list(range(units))
    rows = {u: list(range(u * width, (u + 1) * width)) for u in left}
    while left:
        own = {u: np.linalg.inv(inverse[np.ix_(rows[u], rows[u])]) for u in left}
        errors = {u: np.trace(gram[np.ix_(rows[u], rows[u])] @ own[u]) for u in left}
        gone = min(errors, key=lambda u: errors[u])
        left.remove(gone)
        total += errors[gone]
        scores[gone] = total
        gain = -inverse[:, rows[gone]] @ own[gone]
        gain[rows[gone]] = -np.eye(width)
        change = np.eye(len(gram))
        change[:, rows[gone]] += gain
        inverse = inverse + gain @ inverse[rows[gone]]
        gram = change @ gram @ change.T
    return scores


@pytest.mark.parametrize(("units", "width"), [(150, 1), (30, 5), (3, 80)])
def test_updates_in_blocks_change_nothing(units: int, width: int) -> None:
    """Several updates of the matrices, with rows dropped in between, against one update for each removal."""
    rng = np.random.default_rng(units)
    samples = rng.normal(size=(3 * units * width, units * width)) * rng.uniform(0.3, 2, units * width)
    samples += rng.normal(size=(len(samples), 4)) @ rng.normal(size=(4, units * width))
    weights = rng.normal(size=(units * width, 7))
    covariance = np.cov(samples.T)
    expected = one_by_one(
        covariance + module.DAMPING * np.diag(covariance).mean() * np.eye(len(covariance)),
        weights @ weights.T,
        units,
    )
    np.testing.assert_allclose(greedy_errors(covariance, weights @ weights.T, units), expected, rtol=1e-8)


def test_redundant_units_go_first_and_only_while_they_are_redundant() -> None:
    rng = np.random.default_rng(0)
    free = rng.normal(size=(500, 3))
    samples = np.stack(
        [free[:, 0], free[:, 1], free[:, 2], free[:, 0] + free[:, 1], np.full(500, 7.0)], axis=1
    )
    order = np.argsort(greedy_errors(np.cov(samples.T), np.eye(5) * 10, 5)).tolist()
    assert 4 in order[:2]  # the constant
    assert len({0, 1, 3} & set(order[:2])) == 1  # one of the three that two determine


def test_equal_errors_keep_their_order_when_sorted() -> None:
    scores = greedy_errors(np.zeros((6, 6)), np.zeros((6, 6)), 6)
    assert len(set(scores)) == 6


@pytest.mark.parametrize("name", ["mlp", "convnet", "grouped", "residual"])
def test_the_signal_uses_the_moments_of_what_consumers_read(name: str) -> None:
    model, spaces = small_nets.build(name)
    data = small_nets.batches(name, 60, 25)
    signal = Reconstruction(halves=True)
    scores = fp.score(model, data, spaces=spaces, removal=signal)
    other = fp.score(model, small_nets.batches(name, 60, 60), spaces=spaces, removal="reconstruction")
    assert "reconstruction" not in other.halves  # they cost twice as much again, so only if asked for
    for space in spaces:
        assert (scores.removal[space.name] > 0).all()
        np.testing.assert_allclose(
            scores.removal[space.name], other.removal[space.name], rtol=1e-6
        )  # however the data is cut into batches
        assert scores.halves["reconstruction"][space.name].shape == (2, space.size)


def test_a_linear_net_by_hand() -> None:
    net = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)).double()
    inputs = torch.randn(80, 3, dtype=torch.float64)
    spaces = fp.discover(net, inputs[:1])
    found = fp.score(net, [(inputs, torch.arange(80) % 2)], spaces=spaces, removal="reconstruction").removal[
        "0"
    ]
    hidden = net[0](inputs).detach().numpy()
    covariance, weights = np.cov(hidden.T, bias=True), net[1].weight.detach().numpy().T
    damped = covariance + 1e-6 * np.trace(covariance) / 4 * np.eye(4)
    flops = 3 + 2  # of one unit
    np.testing.assert_allclose(
        np.sort(found), np.divide(brute_force(damped, weights, 1)[1], flops), rtol=1e-6
    )


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
def test_inputs_of_rank_one_are_scored(scale: float) -> None:
    model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3)).eval()
    inputs = torch.randn(64, 1) * 1e-3 + scale * torch.ones(64, 4)  # float32 rounding exceeds the variance
    scores = fp.score(model, [(inputs, torch.arange(64) % 3)], removal="reconstruction")
    assert np.isfinite(scores.removal["0"]).all()


def test_an_indefinite_covariance_takes_more_damping() -> None:
    errors = greedy_errors(np.array([[1.0, 1.0 + 1e-5], [1.0 + 1e-5, 1.0]]), np.ones((2, 2)), 2)
    assert np.isfinite(errors).all()
    assert (np.diff(np.sort(errors)) > 0).all()


@pytest.mark.parametrize("spaces", [32, 1])
def test_moments_held_at_once_are_those_of_the_largest_space_or_fewer(spaces: int) -> None:
    many = [fp.UnitSpace(f"{number}", "hidden", 11_008, slices=()) for number in range(spaces)]
    context = Context(nn.Identity(), fp.Spaces((), {}, CostModel((), (), ()), ""), "removal", 1, 0, True)
    for most, matrices in ((module.MOST_NUMBERS, 1), (surgeon.MOST_NUMBERS, 2)):
        groups = module.groups_within(most, many, matrices=matrices, context=context)
        assert [space for group in groups for space in group] == many
        assert max(matrices * 11_008**2 * len(group) for group in groups) <= max(most, matrices * 11_008**2)


@pytest.mark.parametrize(
    ("signal", "limited", "room"),
    [
        ("reconstruction", module, 12**2 + 5**2),  # 8 units alone, then 12 and 5
        ("surgeon", surgeon, 2 * (12**2 + 5**2)),
    ],
)
def test_memory_is_bounded_by_more_passes(
    signal: str, limited: Any, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 5))
    net.append(nn.Linear(5, 3))
    data = [(torch.randn(20, 6), torch.arange(20) % 3) for _ in range(3)]
    runs: list[int] = []
    net.register_forward_pre_hook(lambda module, args: runs.append(len(args[0])))
    spaces = fp.discover(net, data[0][0][:1])

    def scored(batches: Any, removal: Any) -> tuple[fp.Scores, int]:
        runs.clear()
        scores = fp.score(net, batches, spaces=spaces, removal=removal)
        return scores, sum(size == 20 for size in runs)

    whole, passes = scored(data, [signal, "activation"])
    monkeypatch.setattr(limited, "MOST_NUMBERS", room)
    parts, more = scored(data, [signal, "activation"])
    once, single = scored(iter(data), signal)  # which cannot be read again
    assert (passes, more, single) == (3, 6, 3)
    for name in spaces.names:
        for own in (signal, "activation"):
            assert np.array_equal(whole.removals[own][name], parts.removals[own][name])
        assert np.array_equal(whole.removal[name], once.removal[name])
