"""Repair gives back what the kept units tell, exactly where they tell all, and never makes things worse."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from checks import IN_FLOAT64, difference, some_units, with_lively_weights
from torch import Tensor, nn
from torch.nn import functional as F

import fairpruner as fp
from fairpruner.inputs.batches import read_batches
from fairpruner.models.narrowing import copy_with
from fairpruner.repair import METHODS, refits, regression
from fairpruner.repair.job import Job

Data = list[tuple[Tensor, Tensor]]
CPU = torch.device("cpu")


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def matching(model: nn.Module, inputs: Tensor, size: int = 16) -> Data:
    """Batches whose labels are the model's own outputs."""
    with torch.no_grad():
        return list(zip(inputs.split(size), model(inputs).split(size), strict=True))


def with_twins(model: nn.Module, spaces: fp.Spaces, twins: Mapping[str, tuple[int, int]]) -> nn.Module:
    """The model with the second of two units of a space made equal to the first."""
    changes: dict[str, list[tuple[int, Tensor, Tensor]]] = {}
    for space in spaces:
        for part in space.slices if space.name in twins else ():
            if part.role != "read":
                first, second = (
                    torch.from_numpy(np.flatnonzero(part.owner == unit)) for unit in twins[space.name]
                )
                changes.setdefault(part.tensor, []).append((part.dim, first, second))

    def change(name: str, tensor: Tensor) -> Tensor:
        for dim, first, second in changes.get(name, ()):
            tensor = tensor.index_copy(dim, second, tensor.index_select(dim, first))
        return tensor

    return copy_with(model, change)


class Attention(nn.Module):
    """Three heads of four features from one fused projection, and a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, -1, 4).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))


NETS: dict[str, tuple[Any, tuple[int, ...]]] = {
    **{
        name: (build, (2, 3, 16, 16) if name.startswith("resnet") else shape)
        for name, (build, shape) in zoo.SMALL.items()
    },
    "attention": (Attention, (2, 5, 12)),
}


def built(name: str, samples: int) -> tuple[nn.Module, Tensor, fp.Spaces]:
    build, shape = NETS[name]
    model, inputs = with_lively_weights(build()), torch.randn(samples, *shape[1:], dtype=torch.float64)
    return model, inputs, fp.discover(model, inputs[:2])


# One space for each kind of consumer; a pruned residual stream, and a concatenation, among them.
CONSUMERS = {
    "linear": ("mlp", "0"),
    "flattened": ("conv_flatten", "2"),
    "pooled": ("squeeze_excite", "2.0"),
    "conv1d behind pooling": ("conv1d", "0"),
    "conv2d padded": ("conv_flatten", "0"),
    "conv3d": ("conv3d", "0"),
    "grouped": ("grouped", "0"),
    "transposed": ("unet", "bottom.3"),
    "grouped transposed": ("grouped", "15"),
    "several consumers, one through a concatenation": ("unet", "down1.3"),
    "residual stream": ("resnet8_b", "conv1"),
    "inside a residual block": ("resnet8_a", "layer1.0.conv1"),
    "called several times": ("shared", "stem"),
    "bare parameters": ("functional", "first"),
    "matrix product": ("functional", "second"),
    "split and concatenated": ("split_concat", "enter.0"),
    "heads": ("attention", "qkv"),
}


# A weight that is called several times is left alone by sequential.
TWINS = [
    (kind, method)
    for kind in CONSUMERS
    for method in ("least_squares", "sequential")
    if (kind, method) != ("called several times", "sequential")
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "method"), TWINS)
def test_a_twin_comes_back_exactly(kind: str, method: str) -> None:
    name, space = CONSUMERS[kind]
    model, inputs, spaces = built(
        name, 400 if kind == "flattened" else 100
    )  # more than the features of a row
    model = with_twins(model, spaces, {space: (0, 1)})
    plan = fp.Plan.removing(spaces, {space: (1,)})
    small = fp.cut(model, plan)
    assert difference(small, model, inputs) > 1e-4
    repaired = fp.repair(small, model, plan, matching(model, inputs), method=method, loss=squared)
    assert difference(repaired, model, inputs) < IN_FLOAT64


@pytest.mark.parametrize("method", ["mean", "least_squares"])
@pytest.mark.parametrize("name", ["mlp", "grouped", "attention"])
def test_statistics_repair_every_plan_as_a_pass_over_the_data_does(name: str, method: str) -> None:
    model, inputs, spaces = built(name, 48)
    data = matching(model, inputs)
    statistics = fp.RepairStatistics(model, spaces, data)
    for seed in range(2):
        plan = fp.Plan.removing(spaces, some_units(spaces, 0.34, seed=seed))
        small = fp.cut(model, plan)
        before = copy.deepcopy(small.state_dict())
        found = statistics.repair(small, plan, method)
        expected = fp.repair_with_notes(
            small, model, plan, data, method=method, loss=lambda *_: torch.zeros(())
        )
        assert sorted(note.subject for note in found.notes) == sorted(n.subject for n in expected.notes)
        assert any(note.outcome == "repaired" for note in found.notes)
        for key, tensor in expected.model.state_dict().items():
            torch.testing.assert_close(found.model.state_dict()[key], tensor)
        assert all(torch.equal(before[key], tensor) for key, tensor in small.state_dict().items())


def test_statistics_are_of_one_model() -> None:
    model, inputs, spaces = built("mlp", 8)
    other, others, theirs = built("conv1d", 8)
    statistics = fp.RepairStatistics(model, spaces, matching(model, inputs))
    plan = fp.Plan.removing(theirs, some_units(theirs, 0.3, seed=0))
    with pytest.raises(fp.FairprunerError, match="another model"):
        statistics.repair(fp.cut(other, plan), plan)
    with pytest.raises(fp.FairprunerError, match="another model"):
        fp.RepairStatistics(model, theirs, matching(other, others))
    with pytest.raises(fp.FairprunerError, match="no samples"):
        fp.RepairStatistics(model, spaces, [])
    with pytest.raises(fp.FairprunerError, match="sequential"):
        statistics.repair(
            fp.cut(model, fp.Plan.removing(spaces, {})), fp.Plan.removing(spaces, {}), "sequential"
        )


def linear_net(hidden: nn.Linear, *rest: nn.Module) -> nn.Module:
    return nn.Sequential(hidden, *rest).double().eval()


@pytest.mark.parametrize("method", ["mean", "least_squares", "sequential"])
def test_constant_units_cost_nothing(method: str) -> None:
    net = linear_net(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        net[0].weight[[1, 4]] = 0
        net[0].bias[[1, 4]] = torch.tensor([2.0, 5.0], dtype=torch.float64)
    inputs = torch.randn(40, 4, dtype=torch.float64)
    plan = fp.Plan.removing(fp.discover(net, inputs[:1]), {"0": (1, 4)})
    repaired = fp.repair(fp.cut(net, plan), net, plan, matching(net, inputs), method=method, loss=squared)
    assert difference(repaired, net, inputs) < IN_FLOAT64


def test_all_kept_units_constant() -> None:
    net = linear_net(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        net[0].weight[[0, 1]] = 0
        net[0].bias[:] = 1
    inputs = torch.randn(40, 4, dtype=torch.float64)
    plan = fp.Plan.removing(fp.discover(net, inputs[:1]), {"0": (2,)})
    repaired = fp.repair(fp.cut(net, plan), net, plan, matching(net, inputs), loss=squared)
    torch.testing.assert_close(repaired(inputs).mean(0), net(inputs).mean(0))


@pytest.fixture
def undamped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regression, "DAMPINGS", (1e-13,))


@pytest.mark.usefixtures("undamped")
def test_least_squares_against_numpy() -> None:
    net = linear_net(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    inputs = torch.randn(400, 5, dtype=torch.float64)
    plan = fp.Plan.removing(fp.discover(net, inputs[:1]), {"0": (2, 3, 7)})
    repaired = fp.repair(fp.cut(net, plan), net, plan, matching(net, inputs, 100), loss=squared)
    hidden, weight, bias = (
        net[1](net[0](inputs)).detach().numpy(),
        net[2].weight.detach().numpy(),
        net[2].bias.detach().numpy(),
    )
    kept, gone = [0, 1, 4, 5, 6], [2, 3, 7]
    solution = np.linalg.lstsq(np.column_stack([hidden[:, kept], np.ones(400)]), hidden[:, gone], rcond=None)[
        0
    ]  # [6, 3]
    np.testing.assert_allclose(
        repaired[2].weight.detach().numpy(),
        weight[:, kept] + weight[:, gone] @ solution[:-1].T,
        rtol=1e-6,
        atol=1e-8,
    )
    np.testing.assert_allclose(
        repaired[2].bias.detach().numpy(), bias + weight[:, gone] @ solution[-1], rtol=1e-6, atol=1e-8
    )


@pytest.mark.usefixtures("undamped")
def test_least_squares_of_a_convolution_predicts_channels_at_each_pixel() -> None:
    net = linear_net(
        nn.Conv2d(2, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
    )  # type: ignore[arg-type]
    inputs = torch.randn(60, 2, 7, 7, dtype=torch.float64)
    plan = fp.Plan.removing(fp.discover(net, inputs[:1]), {"0": (0, 5)})
    repaired = fp.repair(fp.cut(net, plan), net, plan, matching(net, inputs), loss=squared)
    hidden = net[1](net[0](inputs)).detach().movedim(1, -1).reshape(-1, 6).numpy()
    weight = net[2].weight.detach().numpy()
    solution = np.linalg.lstsq(
        np.column_stack([hidden[:, 1:5], np.ones(len(hidden))]), hidden[:, [0, 5]], rcond=None
    )[0]  # [5, 2]
    expected = weight[:, 1:5] + np.einsum("orhw,kr->okhw", weight[:, [0, 5]], solution[:-1])
    np.testing.assert_allclose(repaired[2].weight.detach().numpy(), expected, rtol=1e-6, atol=1e-8)
    shift = np.einsum(
        "orhw,r->o", weight[:, [0, 5]], solution[-1]
    )  # into the running mean, for want of a bias
    np.testing.assert_allclose(repaired[3].running_mean.numpy(), -shift, rtol=1e-6, atol=1e-8)


def test_mean_by_hand() -> None:
    net = linear_net(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 2))
    inputs = torch.randn(50, 3, dtype=torch.float64)
    plan = fp.Plan.removing(fp.discover(net, inputs[:1]), {"0": (1,)})
    repaired = fp.repair(fp.cut(net, plan), net, plan, matching(net, inputs, 7), method="mean", loss=squared)
    mean = net[1](net[0](inputs)).mean(0)[1]
    torch.testing.assert_close(repaired[2].bias, net[2].bias + net[2].weight[:, 1] * mean)
    assert torch.equal(repaired[2].weight, net[2].weight[:, [0, 2, 3]])


@pytest.mark.usefixtures("undamped")
def test_sequential_against_numpy() -> None:
    net = linear_net(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    inputs = torch.randn(400, 5, dtype=torch.float64)
    plan = fp.Plan.removing(fp.discover(net, inputs[:1]), {"0": (2, 3, 7)})
    small = fp.cut(net, plan)
    repaired = fp.repair(small, net, plan, matching(net, inputs, 100), method="sequential", loss=squared)
    features = np.column_stack([small[1](small[0](inputs)).detach().numpy(), np.ones(400)])
    solution = np.linalg.lstsq(features, net(inputs).detach().numpy(), rcond=None)[0]  # [6, 3]
    np.testing.assert_allclose(repaired[2].weight.detach().numpy(), solution[:-1].T, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(repaired[2].bias.detach().numpy(), solution[-1], rtol=1e-6, atol=1e-8)


class Drifting(nn.Module):
    """Two residual blocks: the second can make up for what the first lost."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 60), nn.Linear(60, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.b(torch.tanh(self.a(x)))
        return x + self.d(torch.tanh(self.c(x)))


def test_sequential_fits_the_sum_and_so_undoes_earlier_drift() -> None:
    net = Drifting().double()
    inputs = torch.randn(1000, 6, dtype=torch.float64)
    plan = fp.Plan.removing(fp.discover(net, inputs[:1]), {"a": (0, 1, 2, 3), "c": (0,)})
    small, data = fp.cut(net, plan), matching(net, inputs, 250)
    repaired = fp.repair(small, net, plan, data, method="sequential", loss=squared)
    with torch.no_grad():
        first = repaired.get_submodule("b")(torch.tanh(repaired.get_submodule("a")(inputs)))
        drift = squared(first, net.b(torch.tanh(net.a(inputs))))
        assert squared(repaired(inputs), net(inputs)) < 0.2 * drift


class Rectified(Drifting):
    """The same blocks with relu: inputs that are 16 times larger give sums that are 16 times larger."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.b(torch.relu(self.a(x)))
        return x + self.d(torch.relu(self.c(x)))


@pytest.mark.parametrize("method", ["mean", "least_squares", "sequential"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_repaired_like_float32(method: str, dtype: torch.dtype) -> None:
    # Squares of these numbers, summed over the rows of a batch, pass 65,504, the largest float16.
    net, inputs = Rectified().to(dtype).float(), 16 * torch.randn(400, 32, 6).to(dtype).float()
    plan = fp.Plan.removing(fp.discover(net, inputs[:1]), {"a": (0, 1, 2, 3), "c": (0, 1)})

    def error(dtype: torch.dtype) -> float:
        ours = copy.deepcopy(net).to(dtype)
        data = [(batch.to(dtype), target) for batch, target in matching(net, inputs, 100)]
        found = fp.cut(ours, plan)
        repaired, notes = fp.repair_with_notes(found, ours, plan, data, method=method, loss=squared)
        assert {note.outcome for note in notes} == {"repaired"}, notes
        with torch.no_grad():
            return float(squared(repaired(inputs.to(dtype)).float(), net(inputs)))

    assert error(dtype) == pytest.approx(error(torch.float32), rel=0.1)


def test_numbers_that_are_not_finite_are_named() -> None:
    net = Drifting().double()
    inputs = torch.randn(100, 6, dtype=torch.float64)
    plan = fp.Plan.removing(fp.discover(net, inputs[:1]), {"a": (0, 1)})
    small = fp.cut(net, plan)
    inputs[40, 2] = torch.inf  # tanh hides it from most of the net, and the loss from the rest
    data = [(inputs, torch.zeros(100))]
    for method in ("least_squares", "sequential"):
        repaired, notes = fp.repair_with_notes(
            small,
            net,
            plan,
            data,
            method=method,
            loss=lambda output, _: output[:40].square().mean(),
        )
        assert all(torch.isfinite(p).all() for p in repaired.parameters())
    reasons = {note.subject: note.reason for note in notes if note.outcome == "kept"}
    assert "not finite" in reasons["b.weight"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NETS if not name.startswith(("resnet56", "densenet"))])
def test_no_method_makes_any_net_worse_and_sequential_makes_it_better(name: str) -> None:
    model, inputs, spaces = built(name, 48)
    plan = fp.Plan.removing(spaces, some_units(spaces, 0.34, seed=0))
    small, data = fp.cut(model, plan), matching(model, inputs)
    plain = float(squared(small(inputs), model(inputs)).detach())
    errors = {
        method: float(
            squared(
                fp.repair(small, model, plan, data, method=method, loss=squared)(inputs), model(inputs)
            ).detach()
        )
        for method in METHODS
    }
    assert all(error <= plain * (1 + 1e-9) for error in errors.values())
    assert errors["sequential"] < 0.6 * plain


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("samples", [2, 3, 5])
def test_few_samples_are_safe(method: str, samples: int) -> None:
    model, inputs, spaces = built("resnet8_a", samples)
    plan = fp.Plan.removing(spaces, some_units(spaces, 0.5, seed=1))
    small, data = fp.cut(model, plan), [(inputs, torch.arange(samples) % 10)]
    repaired = fp.repair(small, model, plan, data, method=method)
    assert all(torch.isfinite(t).all() for t in repaired.state_dict().values())
    losses = [float(F.cross_entropy(m(inputs), data[0][1]).detach()) for m in (small, repaired)]
    assert losses[1] <= losses[0] * (1 + 1e-9)


def test_one_sample_leaves_nothing_to_prove_a_fit_with() -> None:
    net = linear_net(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    plan = fp.Plan.removing(fp.discover(net, torch.zeros(1, 3).double()), {"0": (1,)})
    small = fp.cut(net, plan)
    repaired, notes = fp.repair_with_notes(small, net, plan, [(torch.ones(1, 3).double(), torch.tensor([0]))])
    assert [note.outcome for note in notes] == ["kept"]
    assert repaired is not small
    assert all(
        torch.equal(a, b)
        for a, b in zip(small.state_dict().values(), repaired.state_dict().values(), strict=True)
    )


def test_a_repair_that_raises_the_loss_is_not_used() -> None:
    net = linear_net(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    inputs = torch.randn(400, 3, dtype=torch.float64)
    plan = fp.Plan.removing(fp.discover(net, inputs[:1]), {"0": (1,)})
    small = fp.cut(net, plan)
    data = matching(small, inputs)  # as labels what the plain cut computes: nothing can do better
    repaired, notes = fp.repair_with_notes(small, net, plan, data, loss=squared)
    assert torch.equal(repaired[2].weight, small[2].weight)
    assert notes[-1].subject == "least_squares"
    assert "would rise" in notes[-1].reason


@pytest.mark.parametrize("method", METHODS)
def test_everything_given_is_left_as_it_was(method: str) -> None:
    model, inputs, spaces = built("squeeze_excite", 32)
    plan = fp.Plan.removing(spaces, some_units(spaces, 0.3, seed=0))
    small = fp.cut(model, plan)
    data = matching(model, inputs)
    small[0].train()
    model.train()
    before = [copy.deepcopy(m.state_dict()) for m in (model, small)]
    random = torch.get_rng_state()
    repaired = fp.repair(small, model, plan, data, method=method, loss=squared)
    assert torch.equal(random, torch.get_rng_state())
    for module, state in zip((model, small), before, strict=True):
        assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())
    assert all(module.training for module in model.modules())
    assert [m.training for m in small.modules()] == [m.training for m in repaired.modules()]
    assert [tuple(t.shape) for t in repaired.state_dict().values()] == [
        tuple(t.shape) for t in small.state_dict().values()
    ]
    assert not {id(p) for p in small.parameters()} & {id(p) for p in repaired.parameters()}


def test_batchnorm_gives_the_statistics_of_the_whole_data() -> None:
    net = (
        nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4, momentum=0.3))
        .double()
        .eval()
    )
    inputs = torch.randn(50, 3, 8, 8, dtype=torch.float64)
    plan = fp.Plan.removing(fp.discover(net, inputs[:1]), {"0": (0, 1)})
    small = fp.cut(net, plan)
    repaired = fp.repair(
        small,
        net,
        plan,
        [(b, b) for b in inputs.split(20)],
        method="batchnorm",
        loss=lambda output, _: output.mean(dim=(0, 2, 3)).square().mean(),
    )
    read = small[2](small[1](small[0](inputs)))  # the last batch is smaller, and weighs less
    torch.testing.assert_close(repaired[3].running_mean, read.mean((0, 2, 3)))
    parts = [(len(b), b.movedim(1, 0).flatten(1).var(1)) for b in read.split(20)]
    torch.testing.assert_close(repaired[3].running_var, sum(n * var for n, var in parts) / 50)
    assert repaired[3].momentum == 0.3
    assert not repaired[3].training
    assert int(repaired[3].num_batches_tracked) == int(small[3].num_batches_tracked)


def test_batchnorm_leaves_out_batches_with_one_value_of_a_channel() -> None:
    """A norm of features, or behind a global pooling, computes no variance of a single sample."""
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(6), nn.Flatten(),
        nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2),
    ).eval()  # fmt: skip
    inputs = torch.randn(41, 3, 8, 8)
    plan = fp.Plan.removing(fp.discover(net, inputs[:2]), {"0": (0, 1)})
    small = fp.cut(net, plan)

    def repaired(batches: list[Tensor]) -> tuple[nn.Module, list[Any]]:
        tried = copy.deepcopy(small)
        with torch.no_grad():
            return tried, METHODS["batchnorm"](Job(tried, net, plan, lambda: read_batches(batches, CPU, net)))

    model, notes = repaired([inputs[:1], *inputs[1:].split(20)])
    assert [note.outcome for note in notes] == ["repaired"] * 3
    torch.testing.assert_close(model[1].running_mean, small[0](inputs).mean((0, 2, 3)))
    without, _ = repaired(list(inputs[1:].split(20)))
    norms = [(small[3], model[3], without[3]), (small[6], model[6], without[6])]
    for before, with_single, expected in norms:
        assert not torch.allclose(expected.running_var, before.running_var)
        torch.testing.assert_close(with_single.running_var, expected.running_var)
    model, notes = repaired(list(inputs[:8].split(1)))
    assert [note.outcome for note in notes] == ["repaired", "skipped", "skipped"]
    assert "two values of a channel" in notes[1].reason
    assert torch.equal(model[3].running_mean, small[3].running_mean)
    assert torch.equal(model[6].running_var, small[6].running_var)
    assert not any(module.training or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("method", ["least_squares", "sequential", "tune"])
def test_autocast_reaches_the_models_but_not_the_sums(method: str) -> None:
    net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4)).eval()
    with torch.no_grad():
        for linear in (net[0], net[2]):
            linear.bias += 3  # sums of large means and small differences suffer most from rounding
    inputs = torch.randn(128, 6)
    plan = fp.Plan.removing(fp.discover(net, inputs[:2]), dict.fromkeys(("0", "2"), tuple(range(0, 24, 3))))
    small, data = fp.cut(net, plan), matching(net, inputs, size=32)
    exact = fp.repair(small, net, plan, data, method=method, loss=squared)
    read: list[torch.dtype] = []
    hook = net[2].register_forward_pre_hook(lambda _, args: read.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        rough = fp.repair(small, net, plan, data, method=method, loss=squared)
        found = rough(inputs)
        torch.clear_autocast_cache()
        assert torch.equal(found, rough(inputs))  # not that of weights that were cast before
    hook.remove()
    assert set(read) == {torch.bfloat16}
    with torch.no_grad():
        error, least = (float(squared(model(inputs), net(inputs))) for model in (rough, exact))
    assert error < 1.2 * least


def test_methods_in_a_row_each_start_from_the_last() -> None:
    model, inputs, spaces = built("conv1d", 64)
    plan = fp.Plan.removing(spaces, some_units(spaces, 0.34, seed=0))
    small, data = fp.cut(model, plan), matching(model, inputs)
    both = fp.repair(small, model, plan, data, method=["mean", "sequential"], loss=squared)
    last = fp.repair(
        fp.repair(small, model, plan, data, method="mean", loss=squared),
        model,
        plan,
        data,
        method="sequential",
        loss=squared,
    )
    assert all(
        torch.equal(a, b) for a, b in zip(both.state_dict().values(), last.state_dict().values(), strict=True)
    )


def test_notes_tell_what_was_repaired_and_what_was_not() -> None:
    model, inputs, spaces = built("shared", 48)
    plan = fp.Plan.removing(spaces, {"stem": (0, 3)})
    notes = fp.repair_with_notes(
        fp.cut(model, plan),
        model,
        plan,
        matching(model, inputs),
        method="sequential",
        loss=squared,
    ).notes
    told = {note.subject: note for note in notes}
    assert told["body.weight"].outcome == "skipped"
    assert "called 3 times" in told["body.weight"].reason
    assert told["head.weight"].outcome == "repaired"
    assert told["head.weight"].error is not None
    assert 0 <= told["head.weight"].error < 1


def test_mean_says_so_where_nothing_takes_an_offset() -> None:
    model, inputs, spaces = built("functional", 48)
    plan = fp.Plan.removing(spaces, {"second": (0, 3)})
    notes = fp.repair_with_notes(
        fp.cut(model, plan), model, plan, matching(model, inputs), method="mean", loss=squared
    ).notes
    assert [(n.subject, n.outcome) for n in notes] == [("head", "kept")]
    assert "bias" in notes[0].reason


def test_what_a_user_can_get_wrong() -> None:
    net = linear_net(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    plan = fp.Plan.removing(fp.discover(net, torch.zeros(1, 3).double()), {"0": (1,)})
    small, data = fp.cut(net, plan), [(torch.ones(2, 3).double(), torch.tensor([0, 1]))]
    with pytest.raises(fp.FairprunerError, match="least_squares"):
        fp.repair(small, net, plan, data, method="least_square")
    with pytest.raises(fp.FairprunerError, match="can be read once"):
        fp.repair(small, net, plan, iter(data))
    with pytest.raises(fp.FairprunerError, match="no samples"):
        fp.repair(small, net, plan, [])
    with pytest.raises(fp.FairprunerError, match=r"0\.weight has the shape \[4, 3\], expected \[3, 3\]"):
        fp.repair(net, net, plan, data)
    with pytest.raises(fp.FairprunerError, match="another model"):
        fp.repair(small, small, plan, data)


class Tied(nn.Module):
    """The embedding is also the last layer, so refitting the one would spoil the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(20, 6), nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.down(torch.relu(self.up(x)))
        return F.linear(x, self.embedding.weight)


def test_a_weight_that_does_more_than_multiply_is_left_alone() -> None:
    model, tokens = Tied().double().eval(), torch.randint(20, (64, 5))
    plan = fp.Plan.removing(fp.discover(model, tokens[:2], kinds=["hidden"]), {"up": (0, 1, 2, 3, 4)})
    small = fp.cut(model, plan)
    repaired, notes = fp.repair_with_notes(
        small, model, plan, matching(model, tokens), method="sequential", loss=squared
    )
    assert torch.equal(repaired.get_parameter("embedding.weight"), model.embedding.weight)
    assert {note.subject: note.outcome for note in notes} == {
        "down.weight": "repaired",
        "embedding.weight": "skipped",
    }
    with torch.no_grad():
        assert squared(repaired(tokens), model(tokens)) < 0.5 * squared(small(tokens), model(tokens))


class Texts(nn.Module):
    """Called with a batch of texts; every token is computed by itself, padding included."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(20, 6), nn.Linear(6, 16), nn.Linear(16, 20)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.embedding(input_ids))))


@pytest.mark.parametrize("method", ["mean", "least_squares", "sequential"])
def test_padding_teaches_nothing(method: str) -> None:
    model, tokens = Texts().double().eval(), torch.randint(1, 20, (64, 5))
    real, mask = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, torch.ones_like(tokens)
    padded = {"input_ids": F.pad(tokens, (0, 9)), "attention_mask": F.pad(mask, (0, 9))}
    plan = fp.Plan.removing(fp.discover(model, {k: v[:2] for k, v in real.items()}), {"up": (0, 1, 2, 3, 4)})
    small = fp.cut(model, plan)

    def repaired(batch: dict[str, Tensor]) -> nn.Module:
        def of_real(output: Tensor, target: Tensor) -> Tensor:
            return squared(output[:, :5], target[:, :5])

        return fp.repair(small, model, plan, [(batch, model(**batch).detach())], method=method, loss=of_real)

    without, with_padding = (repaired(batch).get_parameter("down.weight") for batch in (real, padded))
    torch.testing.assert_close(with_padding, without, rtol=1e-9, atol=1e-12)
    assert method == "mean" or not torch.allclose(without, small.get_parameter("down.weight"))


class Counting(list[tuple[Tensor, Tensor]]):
    """Data that knows how often it was read."""

    reads = 0

    def __iter__(self) -> Any:
        self.reads += 1
        return super().__iter__()


def test_sums_that_have_no_room_together_are_taken_in_several_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, spaces = built("resnet8_a", 64)
    plan = fp.Plan.removing(spaces, some_units(spaces, 0.34, seed=0))
    small, outcomes, errors, reads = fp.cut(model, plan), [], [], []
    for room in (refits.MOST_NUMBERS, 2**18):
        monkeypatch.setattr(refits, "MOST_NUMBERS", room)
        data = Counting(matching(model, inputs))
        repaired, notes = fp.repair_with_notes(small, model, plan, data, method="sequential", loss=squared)
        outcomes.append({note.subject: note.outcome for note in notes})
        errors.append(float(squared(repaired(inputs), model(inputs)).detach()))
        reads.append(data.reads)
    assert outcomes[0] == outcomes[1]
    assert reads[1] > reads[0]
    assert errors[1] < 1.2 * errors[0] < 0.6 * float(squared(small(inputs), model(inputs)).detach())


class Mixer(nn.Module):
    """A weight over the positions, applied to every channel by itself: [batch, 3, 6] -> [batch, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv1d(3, 8, 1), nn.Linear(8, 2)
        self.over, self.back = nn.Linear(6, 5), nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x = x + self.back(F.relu(self.over(x)))
        return self.leave(x.mean(2))


def test_a_weight_over_positions_is_not_refitted_where_channels_are_gone() -> None:
    net, inputs = with_lively_weights(Mixer()), torch.randn(16, 3, 6).double()
    plan = fp.Plan.removing(fp.discover(net, inputs[:1]), {"enter": (1, 4), "over": (0,)})
    data = [(inputs, net(inputs).detach())]
    found = fp.repair_with_notes(fp.cut(net, plan), net, plan, data, method="sequential", loss=F.mse_loss)
    skipped = {note.subject: note.reason for note in found.notes if note.outcome == "skipped"}
    assert skipped == {"back.weight": refits.FEWER_ROWS}
    assert any(note.subject == "leave.weight" and note.outcome == "repaired" for note in found.notes)


class Sink(nn.Module):
    """Tokens below 100 are a thousand times as large as the others; a norm reads the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(200, 12), nn.Linear(12, 8)
        self.up, self.down = nn.Linear(12, 40), nn.Linear(40, 12)
        with torch.no_grad():
            self.embedding.weight[:100] *= 1000

    def forward(self, input_ids: Tensor) -> Tensor:
        stream = self.embedding(input_ids)
        stream = stream + self.down(torch.relu(self.up(stream)))
        return self.head(F.rms_norm(stream, (12,)))


def test_huge_first_tokens_do_not_decide_the_fit_of_texts() -> None:
    torch.manual_seed(0)
    model, tokens, unseen = Sink().double().eval(), *torch.randint(100, 200, (2, 40, 16))
    tokens[:, 0] = torch.arange(40)
    data = [{"input_ids": part} for part in tokens.split(10)]
    plan = fp.Plan.removing(fp.discover(model, data[0], kinds=["hidden"]), {"up": range(12)})
    small = fp.cut(model, plan)
    with torch.no_grad():
        cut = squared(small(unseen), model(unseen))
        METHODS["sequential"](Job(small, model, plan, lambda: read_batches(data, torch.device("cpu"), model)))
        # With equal weights of all tokens, 0.6 times the error of the cut is left.
        assert squared(small(unseen), model(unseen)) < 0.2 * cut
