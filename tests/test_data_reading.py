"""Scores and repairs do not depend on how the data is divided into batches, shuffled, or read again."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fairpruner as fp
from fairpruner.core.units import UnitSpace
from fairpruner.errors import FairprunerError
from fairpruner.scoring.signals import reconstruction
from fairpruner.scoring.signals.reconstruction import CovarianceSums


def mlp() -> tuple[nn.Module, Tensor, Tensor]:
    """A net with one space of 12 hidden units, inputs, and labels of five classes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 5)).eval()
    return net, torch.randn(64, 6), torch.arange(64) % 5


class ReadOnce:
    """Batches that are gone after one pass, without being an iterator."""

    def __init__(self, data: list[tuple[Tensor, Tensor]]) -> None:
        self._batches = iter(data)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._batches


def rankings(scores: fp.Scores) -> list[list[int]]:
    return [values.argsort().tolist() for values in scores.protection.values()]


# Scores


def test_pixels_weigh_the_same_in_batches_of_any_size() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)).double().eval()
    images, labels = torch.randn(8, 3, 8, 8).double(), torch.randint(0, 4, (8, 8, 8))
    labels[::2].view(4, -1)[:, 4:] = 255  # few pixels of every other image have a label
    spaces = fp.discover(net, images[:1])
    whole, single = (
        fp.score(net, list(zip(images.split(size), labels.split(size), strict=True)), spaces=spaces)
        for size in (8, 1)
    )
    np.testing.assert_allclose(whole.protection["0"], single.protection["0"], rtol=1e-9)


def test_amounts_whose_first_samples_are_zero_are_no_classes() -> None:
    net, inputs, _ = mlp()
    targets = torch.rand(64, 5)
    targets[:2] = 0
    assert fp.score(net, [(inputs, targets)]).settings["loss"] == "mse"
    later = [(inputs[:2], targets[:2]), (inputs[2:], targets[2:] * 3)]
    with pytest.raises(FairprunerError, match=r"expected values from 0 to 1 .* Pass loss='regression'"):
        fp.score(net, later)


def test_drawn_labels_belong_to_samples() -> None:
    net, inputs, _ = mlp()
    spaces = fp.discover(net, inputs[:1])
    whole, parts = (fp.score(net, list(inputs.split(size)), spaces=spaces, seed=3) for size in (64, 7))
    np.testing.assert_allclose(whole.protection["0"], parts.protection["0"], rtol=1e-4)
    twice = fp.score(net, [torch.cat([inputs, inputs])], spaces=spaces)
    even, odd = twice.halves["taylor2"]["0"]
    assert not np.array_equal(even, odd)


def test_drawn_labels_follow_the_softmax() -> None:
    from fairpruner.inputs.batches import Batch
    from fairpruner.scoring.objective import Objective

    logits = torch.tensor([2.0, 0.0, 1.0]).expand(20_000, 3).clone().requires_grad_()
    objective = Objective("unlabelled", None, has_classes=False, draws_labels=True, seed=0)
    objective.mean(logits, Batch(torch.zeros(20_000, 1), None, 0)).backward()
    # The mean gradient is the softmax minus the share of draws of each class.
    assert logits.grad is not None
    assert logits.grad.sum(0).abs().max() < 0.02
    assert (logits.grad < 0).sum(0).min() > 1000


def test_a_later_pass_that_misses_samples_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconstruction, "MOST_NUMBERS", 1)  # so that every space takes a pass
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 5)).eval()
    data = [(torch.randn(32, 6), torch.arange(32) % 5)] * 2
    with pytest.raises(FairprunerError, match=r"has 0 of 64 samples in a later pass"):
        fp.score(net, ReadOnce(data), removal="reconstruction")


def test_moments_of_rows_far_from_zero() -> None:
    torch.manual_seed(0)
    rows = torch.randn(2000, 8) @ torch.randn(8, 8)
    rows[:, 3] += 5000
    rows[:, 4] *= 1e-3
    sums = CovarianceSums(UnitSpace("a", "hidden", 8, slices=()), 2)
    for part in rows.split(250):
        sums.update(part[:, :, None])
    expected = torch.cov(rows.double().T, correction=0)
    spread = expected.diag().sqrt()
    assert ((sums.covariance(range(2)) - expected).abs() / torch.outer(spread, spread)).max() < 1e-6
    second = rows.double().T @ rows.double() / 2000
    torch.testing.assert_close(sums.second(), second, rtol=1e-6, atol=0)


def test_float16_gradients_do_not_vanish_in_large_batches() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU())
    net = nn.Sequential(*net, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)).eval()
    images, labels = torch.randn(64, 3, 48, 48), torch.arange(64) % 4
    expected = fp.score(net, [(images, labels)], removal="l1").protection
    found = fp.score(copy.deepcopy(net).half(), [(images.half(), labels)], removal="l1").protection
    for name, values in expected.items():
        assert np.abs(found[name] - values).max() < 0.01 * values.max()


def test_labels_that_are_identities_take_no_memory_for_those_between() -> None:
    net, inputs, labels = mlp()
    settings = fp.score(
        net, [(inputs, labels + 10**9)], loss=lambda out, ids: F.cross_entropy(out, ids - 10**9)
    ).settings
    assert settings["wasserstein"] == {"projections": 32, "kept_samples": 256}


# Repair


@pytest.mark.parametrize("method", ["mean", "least_squares", "batchnorm"])
def test_shuffling_does_not_decide_whether_a_repair_is_kept(method: str) -> None:
    net, _, _ = mlp()
    inputs = torch.randn(2000, 6)
    loader = DataLoader(TensorDataset(inputs, torch.randint(0, 5, (2000,))), 100, shuffle=True)
    plan = fp.Plan.removing(fp.discover(net, inputs[:1]), {})
    for seed in range(8):
        torch.manual_seed(seed)
        repaired = fp.repair_with_notes(fp.cut(net, plan), net, plan, loader, method=method)
        assert not [note for note in repaired.notes if "would rise" in note.reason]


@pytest.mark.parametrize("method", ["mean", "least_squares", "sequential", "batchnorm", "tune"])
def test_data_that_can_be_read_once_is_refused_by_repair(method: str) -> None:
    net, inputs, labels = mlp()
    plan = fp.Plan.removing(fp.discover(net, inputs[:1]), {"0": (0, 1)})
    data = list(zip(inputs.split(32), labels.split(32), strict=True))
    with pytest.raises(FairprunerError, match="can be read only once"):
        fp.repair(fp.cut(net, plan), net, plan, ReadOnce(data), method=method)


def test_statistics_read_the_data_once() -> None:
    net, inputs, labels = mlp()
    spaces = fp.discover(net, inputs[:1])
    plan = fp.Plan.removing(spaces, {"0": (0, 1)})
    data = list(zip(inputs.split(32), labels.split(32), strict=True))
    expected, found = (
        fp.RepairStatistics(net, spaces, read).repair(fp.cut(net, plan), plan).model.state_dict()
        for read in (data, ReadOnce(data))
    )
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)


def test_outputs_that_are_no_numbers_are_refused_without_labels() -> None:
    net, inputs, _ = mlp()
    plan = fp.Plan.removing(fp.discover(net, inputs[:1]), {"0": (0, 1)})
    with pytest.raises(FairprunerError, match="has NaN"):
        fp.repair(fp.cut(net, plan), net, plan, [inputs * float("nan")])


def test_one_tensor_is_one_batch_for_every_stage() -> None:
    net, inputs, _ = mlp()
    small, plan = fp.prune(net, inputs, keep=fp.Budget("units", 0.5))
    assert plan.share("units") == 0.5
    assert small(inputs).shape == (64, 5)


# The default device


@pytest.fixture
def default_device_elsewhere() -> Iterator[None]:
    """As with `torch.set_default_device("cuda")` and a model on the CPU: no number may come from there."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.slow
@pytest.mark.usefixtures("default_device_elsewhere")
def test_no_stage_uses_the_default_device(tmp_path: Path) -> None:
    with torch.device("cpu"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        net = nn.Sequential(*net, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()
        images, labels = torch.randn(64, 3, 12, 12), torch.arange(64) % 4
        data = list(zip(images.split(16), labels.split(16), strict=True))
    removal = ["wasserstein", "activation", "reconstruction", "surgeon", "saliency", "fpgm", "random"]
    scores = fp.score(net, data, removal=removal, protection=["taylor", "taylor2", "deletion"])
    fp.score(net, [inputs for inputs, _ in data])
    plan = fp.allocate(scores, keep=fp.Budget("flops", 0.5))
    small = fp.cut(net, plan)
    for method in ("mean", "least_squares", "sequential", "batchnorm", "tune"):
        fp.repair(small, net, plan, data, method=method)
    fp.save(small, plan, tmp_path / "small")
    fp.recover(small, data, epochs=1)
    best, found = fp.prune(net, data, keep=fp.Budget("flops", 0.5))
    assert fp.count_params(best) == found.predicted["params"]
    assert all(tensor.device.type == "cpu" for tensor in best.state_dict().values())
