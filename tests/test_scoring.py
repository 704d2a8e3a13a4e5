"""The calibration pass: the model comes back as it was, batches of every form work, and each mistake is
told in one sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from small_nets import NETS, batches, build, samples, space, spaces_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointFunction, checkpoint
from torch.utils.data import DataLoader, TensorDataset

import fairpruner as fp
from fairpruner.core.cost_model import CostModel
from fairpruner.core.scores import Scores
from fairpruner.core.spaces import Spaces
from fairpruner.errors import FairprunerError
from fairpruner.inputs.batches import read_batches
from fairpruner.scoring.score import score

EVERY_SIGNAL: dict[str, Any] = {
    "removal": ["wasserstein", "wasserstein_pooled", "l1", "l2", "fpgm", "activation", "random"],
    "protection": ["taylor", "taylor2", "deletion", "random"],
}


def assert_same(one: Scores, other: Scores, *, rtol: float = 0.0) -> None:
    for mine, theirs in ((one.removals, other.removals), (one.protections, other.protections)):
        assert list(mine) == list(theirs)
        for signal, by_space in mine.items():
            for name, values in by_space.items():
                np.testing.assert_allclose(
                    values, theirs[signal][name], rtol=rtol, atol=rtol * 1e-3, err_msg=f"{signal} {name}"
                )


# What holds for every net


@pytest.mark.parametrize("net", sorted(NETS))
def test_scores_do_not_depend_on_the_batch_size(net: str) -> None:
    model, spaces = build(net)
    whole = score(model, batches(net, 60, 60), spaces=spaces, **EVERY_SIGNAL)
    assert whole.samples == 60
    for size in (7, 32):
        assert_same(score(model, batches(net, 60, size), spaces=spaces, **EVERY_SIGNAL), whole, rtol=1e-6)


@pytest.mark.parametrize("net", sorted(NETS))
def test_scores_do_not_depend_on_the_order_of_the_samples(net: str) -> None:
    model, spaces = build(net)
    inputs, labels = samples(net, 60)
    order = torch.randperm(60)
    one, other = (
        score(model, [(inputs[o], labels[o])], spaces=spaces, **EVERY_SIGNAL)
        for o in (torch.arange(60), order)
    )
    assert_same(one, other, rtol=1e-6)


@pytest.mark.parametrize("net", sorted(NETS))
def test_several_signals_at_once_equal_each_alone(net: str) -> None:
    model, spaces = build(net)
    data = batches(net, 20, 8)
    together = score(model, data, spaces=spaces, **EVERY_SIGNAL)
    assert together.active == ("wasserstein", "taylor")
    for signal in EVERY_SIGNAL["removal"]:
        alone = score(model, data, spaces=spaces, removal=signal, protection="random")
        assert_same(
            alone,
            Scores(
                spaces, {signal: together.removals[signal]}, {"random": together.protections["random"]}, 20
            ),
            rtol=1e-12,
        )
    for signal in EVERY_SIGNAL["protection"]:
        alone = score(model, data, spaces=spaces, removal="l1", protection=signal)
        assert_same(
            alone,
            Scores(spaces, {"l1": together.removals["l1"]}, {signal: together.protections[signal]}, 20),
            rtol=1e-12,
        )


def test_permuted_units_get_permuted_scores() -> None:
    model, spaces = build("mlp")
    data = batches("mlp", 30, 10)
    before = score(model, data, spaces=spaces, **EVERY_SIGNAL)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight[order])
        model[0].bias.copy_(model[0].bias[order])
        model[2].weight.copy_(model[2].weight[:, order])
    after = score(model, data, spaces=spaces, **EVERY_SIGNAL)
    for mine, theirs in ((after.removals, before.removals), (after.protections, before.protections)):
        for signal in set(mine) - {"random"}:
            np.testing.assert_allclose(
                mine[signal]["0"], theirs[signal]["0"][order.numpy()], rtol=1e-9, err_msg=signal
            )
            np.testing.assert_allclose(mine[signal]["2"], theirs[signal]["2"], rtol=1e-9, err_msg=signal)


def test_the_seed_fixes_the_scores() -> None:
    model, spaces = build("convnet")
    data = batches("convnet", 30, 10)
    one, again, other = (score(model, data, spaces=spaces, seed=seed) for seed in (1, 1, 2))
    assert_same(one, again)
    assert not np.array_equal(one.removal["0"], other.removal["0"])
    assert one.settings["seed"] == 1
    assert one.settings["wasserstein"] == {"projections": 32, "kept_samples": 256}


def test_a_weight_called_twice_is_observed_at_its_first_call() -> None:
    model, spaces = build("shared")
    inputs, labels = samples("shared", 8)
    scores = score(model, [(inputs, labels)], spaces=spaces, removal="activation")
    np.testing.assert_allclose(
        scores.removal["inner"], model.inner(inputs).relu().mean(0).detach(), rtol=1e-9
    )


def test_a_weight_is_observed_where_it_reads_along_the_right_dim() -> None:
    """One square weight, read along dim 1 by the first call and along dim 0 by the second."""

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight) + self.up(x).relu() @ self.weight

    model = Square().double()
    spaces = spaces_of(model, space("up", 4, ("up.weight", 0, "write"), ("weight", 0, "read")))
    inputs, labels = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 2
    scores = score(model, [(inputs, labels)], spaces=spaces, removal="activation")
    np.testing.assert_allclose(scores.removal["up"], model.up(inputs).relu().mean(0).detach(), rtol=1e-9)


def test_what_is_read_counts_even_if_it_is_changed_in_place_later() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            output = self.down(hidden)
            hidden.zero_()
            return output

    model = InPlace().double()
    spaces = spaces_of(model, space("up", 4, ("up.weight", 0, "write"), ("down.weight", 1, "read")))
    inputs, labels = samples("mlp", 8)
    scores = score(model, [(inputs, labels)], spaces=spaces, removal="activation", protection="random")
    np.testing.assert_allclose(scores.removal["up"], model.up(inputs).abs().mean(0).detach(), rtol=1e-9)
    with pytest.raises(
        FairprunerError, match=r"backward pass failed on batch 0: .*modified by an inplace operation"
    ):
        score(model, [(inputs, labels)], spaces=spaces)


# The model comes back as it was


class Fragile(nn.Module):
    """Everything scoring could disturb: norm statistics, dropout, a frozen part, gradients, a hook, train
    mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.body(x) + 0.1 * torch.rand(()))


def fragile() -> tuple[Fragile, Spaces]:
    model = Fragile()
    carried = [(f"body.1.{name}", 0, "carry") for name in ("weight", "bias", "running_mean", "running_var")]
    spaces = spaces_of(
        model,
        space(
            "body.0",
            6,
            ("body.0.weight", 0, "write"),
            ("body.0.bias", 0, "carry"),
            *carried,
            ("head.weight", 1, "read"),
        ),
    )
    F.cross_entropy(model(torch.randn(8, 5)), torch.arange(8) % 3).backward()
    model.body[0].weight.requires_grad_(False)
    model.body[1].eval()
    model.head.register_forward_hook(lambda module, args, output: None)
    return model, spaces


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "tensors": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": {
            name: None if p.grad is None else (id(p.grad), p.grad.clone())
            for name, p in model.named_parameters()
        },
        "frozen": {name: p.requires_grad for name, p in model.named_parameters()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": {
            name: (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for name, m in model.named_modules()
        },
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "random": torch.get_rng_state(),
    }


def assert_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(model)
    for kind in ("frozen", "modes", "hooks", "attributes"):
        assert after[kind] == before[kind], kind
    assert torch.equal(after["random"], before["random"])
    for name, value in before["tensors"].items():
        assert torch.equal(after["tensors"][name], value), name
    for name, gradient in before["gradients"].items():
        if gradient is None:
            assert after["gradients"][name] is None
        else:
            assert after["gradients"][name][0] == gradient[0]
            assert torch.equal(after["gradients"][name][1], gradient[1])


def shuffled_loader() -> DataLoader[Any]:
    inputs, labels = samples("mlp", 24, dtype=torch.float32)
    return DataLoader(TensorDataset(inputs, labels), batch_size=10, shuffle=True)


def test_the_model_stays_bit_identical() -> None:
    model, spaces = fragile()
    before = snapshot(model)
    score(model, shuffled_loader(), spaces=spaces, **EVERY_SIGNAL)
    assert_untouched(model, before)
    score(model, shuffled_loader(), spaces=spaces, groups=2)
    assert_untouched(model, before)


@pytest.mark.parametrize("failure", [RuntimeError("the loss gave up"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["loss", "data", "model"])
def test_the_model_stays_bit_identical_after_a_failure(failure: BaseException, where: str) -> None:
    model, spaces = fragile()
    calls = 0

    def fail_at(place: str) -> None:
        nonlocal calls
        calls += place == where
        if place == where and calls == 2:
            raise failure

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        fail_at("loss")
        return F.cross_entropy(output, labels)

    def data() -> Iterator[Any]:
        for batch in shuffled_loader():
            fail_at("data")
            yield batch

    handle = model.body[2].register_forward_hook(lambda module, args, output: fail_at("model"))
    before = snapshot(model)
    told = isinstance(failure, Exception)  # Ctrl-C stays what it is
    with pytest.raises(FairprunerError if told else type(failure)) as caught:
        score(
            model,
            data(),
            spaces=spaces,
            loss=loss,
            removal=["wasserstein", "activation"],
            protection=["taylor", "taylor2", "deletion"],
        )
    assert_untouched(model, before)
    handle.remove()
    if told:
        sentences = {
            "loss": "The loss failed on batch",
            "data": "The data failed at batch 1",
            "model": "Batch",
        }
        assert str(caught.value).startswith(sentences[where])
        assert caught.value.__cause__ is failure


def test_the_hook_on_a_parametrized_module_is_removed() -> None:
    model, spaces = build("parametrized")
    before = snapshot(model)
    score(model, batches("parametrized", 12, 5), spaces=spaces, **EVERY_SIGNAL)
    assert_untouched(model, before)
    with pytest.raises(FairprunerError, match=r"The loss failed on batch 0.*ZeroDivisionError: division"):
        score(model, batches("parametrized", 12, 5), spaces=spaces, loss=lambda output, labels: 1 / 0)
    assert_untouched(model, before)


def test_frozen_models_score_like_free_ones() -> None:
    model, spaces = build("convnet")
    data = batches("convnet", 20, 8)
    free = score(model, data, spaces=spaces, **EVERY_SIGNAL)
    model.requires_grad_(False)
    with torch.no_grad():
        assert_same(score(model, data, spaces=spaces, **EVERY_SIGNAL), free)
    with torch.inference_mode():
        assert_same(score(model, data, spaces=spaces, **EVERY_SIGNAL), free)
    assert not any(p.requires_grad for p in model.parameters())


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Checkpointed(nn.Module):
    """Two blocks, each of them or all of the model under a checkpoint of the two ways to import it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList([Residual(), Residual()])
        self.where = where

    def everything(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.where == "function":
                x = checkpoint(block, x, use_reentrant=True)
            elif self.where == "module":
                x = torch.utils.checkpoint.checkpoint(block.__call__, x, use_reentrant=True)
            else:
                x = block(x)
        return self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return (
            checkpoint(self.everything, x, use_reentrant=True) if self.where == "all" else self.everything(x)
        )


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("skip", [[], ["first"]])
@pytest.mark.parametrize("where", ["function", "module", "all"])
def test_checkpoints_that_are_reentrant_make_no_difference(
    where: str, skip: list[str], labelled: bool
) -> None:
    net = Checkpointed("nowhere")
    data: list[Any] = [(torch.randn(16, 4), torch.arange(16) % 3) for _ in range(2)]
    data = data if labelled else [x for x, _ in data]
    spaces = fp.discover(net, torch.zeros(1, 4), skip=skip)
    signals: dict[str, Any] = {"removal": "activation", "protection": ["taylor", "taylor2"]}
    expected = score(net, data, spaces=spaces, **signals)
    assert all(values.any() for values in expected.protections["taylor2"].values())
    net.where = where
    assert_same(score(net, data, spaces=spaces, **signals), expected)


def test_checkpoints_are_back_after_a_failure() -> None:
    net, data = Checkpointed("nowhere"), [(torch.randn(16, 4), torch.arange(16) % 3)]
    spaces = fp.discover(net, torch.zeros(1, 4))
    usual = CheckpointFunction.apply

    def failing(output: Tensor, labels: Tensor) -> Tensor:
        assert CheckpointFunction.apply != usual
        raise RuntimeError("the loss gave up")

    with pytest.raises(FairprunerError, match="the loss gave up"):
        score(net, data, spaces=spaces, loss=failing)
    assert CheckpointFunction.apply == usual
    assert "apply" not in vars(CheckpointFunction)


def test_train_mode_makes_no_difference() -> None:
    model, spaces = fragile()
    data = [(torch.randn(8, 5), torch.arange(8) % 3) for _ in range(2)]
    one = score(model.train(), data, spaces=spaces)
    assert_same(one, score(model.eval(), data, spaces=spaces))


def test_shared_parameters_count_once() -> None:
    """A head tied to the first map by identity: the gradient of both uses, the weight once."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False)
            self.down.weight = self.up.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x).tanh() @ self.down.weight

    model = Tied().double()
    spaces = spaces_of(
        model, space("up", 4, ("up.weight", 0, "read"))
    )  # written along dim 0 and read along it too
    inputs, labels = torch.randn(9, 3, dtype=torch.float64), torch.arange(9) % 3
    gradient = torch.autograd.grad(F.cross_entropy(model(inputs), labels), model.up.weight)[0]
    scores = score(model, [(inputs, labels)], spaces=spaces, removal="activation")
    np.testing.assert_allclose(
        scores.protection["up"], (gradient * model.up.weight).sum(1).abs().detach(), rtol=1e-9
    )
    np.testing.assert_allclose(
        scores.removal["up"], model.up(inputs).tanh().abs().mean(0).detach(), rtol=1e-9
    )


# Precision


def test_bfloat16_models() -> None:
    model, spaces = build("convnet", torch.float32)
    inputs, labels = samples("convnet", 60, dtype=torch.float32)
    exact = score(model, [(inputs, labels)], spaces=spaces)
    rough = score(model.bfloat16(), [(inputs.bfloat16(), labels)], spaces=spaces)
    for name in spaces.names:
        np.testing.assert_allclose(rough.removal[name], exact.removal[name], rtol=0.05)
        assert np.corrcoef(rough.protection[name], exact.protection[name])[0, 1] > 0.95


def test_autocast_reaches_the_model_but_not_the_signals() -> None:
    model, spaces = build("convnet", torch.float32)
    data = [(inputs.float(), labels) for inputs, labels in batches("convnet", 60, 25)]
    exact = score(model, data, spaces=spaces, **EVERY_SIGNAL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = score(model, data, spaces=spaces, **EVERY_SIGNAL)
        read = model[:3](data[0][0])
    assert read.dtype == torch.bfloat16
    for name in spaces.names:
        assert not np.array_equal(rough.removal[name], exact.removal[name])
        np.testing.assert_allclose(rough.removal[name], exact.removal[name], rtol=0.02)
        assert np.corrcoef(rough.protection[name], exact.protection[name])[0, 1] > 0.95


# Batches of every form


class TwoInputs(nn.Module):
    """Called with two tensors by position or by name; answers as asked."""

    def __init__(self, answer: str = "tensor") -> None:
        super().__init__()
        self.up, self.down, self.answer = nn.Linear(5, 4), nn.Linear(4, 3), answer

    def forward(self, left: Tensor, right: Tensor) -> Any:
        logits = self.down(self.up(left + right).relu())
        answers = {
            "tensor": logits,
            "tuple": (logits, left),
            "dict": {"loss": None, "logits": logits},
            "object": Answer(logits),
        }
        return answers[self.answer]


class Answer:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


@pytest.mark.parametrize("answer", ["tensor", "tuple", "dict", "object"])
@pytest.mark.parametrize("form", ["args", "kwargs", "dict batch"])
def test_forms_of_batches_and_outputs(form: str, answer: str) -> None:
    torch.manual_seed(0)
    model = TwoInputs(answer)
    spaces = spaces_of(
        model, space("up", 4, ("up.weight", 0, "write"), ("up.bias", 0, "carry"), ("down.weight", 1, "read"))
    )
    left, right, labels = torch.randn(9, 5), torch.randn(9, 5), torch.arange(9) % 3
    forms: dict[str, Any] = {
        "args": ((left, right), labels),
        "kwargs": ({"left": left, "right": right}, labels),
    }
    forms["dict batch"] = {"left": left, "right": right, "labels": labels}
    scores = score(model, [forms[form]], spaces=spaces)
    model.answer = "tensor"
    assert_same(scores, score(model, [((left, right), labels)], spaces=spaces))


def test_labels_need_not_be_tensors_and_short_batches_weigh_less() -> None:
    model, spaces = build("mlp")
    inputs, labels = samples("mlp", 10)
    whole = score(model, [(inputs, labels)], spaces=spaces)
    parts = [(inputs[:7], labels[:7].tolist()), (inputs[7:7], []), (inputs[7:], labels[7:].numpy())]
    assert_same(score(model, parts, spaces=spaces), whole, rtol=1e-9)


def test_a_loss_of_the_users_own_sees_output_and_labels_as_they_are() -> None:
    model, spaces = build("mlp")
    inputs, _ = samples("mlp", 8)
    target = torch.randn(8, 3, dtype=torch.float64)
    scores = score(
        model,
        [(inputs, target)],
        spaces=spaces,
        loss=F.mse_loss,
        removal=["l1", "activation"],
        protection=["taylor", "taylor2"],
    )
    parameters = [model[2].weight, model[2].bias, model[4].weight.T]
    gradients = torch.autograd.grad(
        F.mse_loss(model(inputs), target), [model[2].weight, model[2].bias, model[4].weight]
    )
    products = [p * g for p, g in zip(parameters, (*gradients[:2], gradients[2].T), strict=True)]
    expected = (products[0].sum(1) + products[1] + products[2].sum(1)).abs().detach()
    np.testing.assert_allclose(scores.protection["2"], expected, rtol=1e-9)
    assert scores.settings["loss"] == "mse_loss"


def test_spaces_are_discovered_from_the_first_batch() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    inputs, labels = samples("mlp", 12, dtype=torch.float32)
    scores = score(model, [(inputs, labels)])
    assert scores.spaces.names == ("0",)
    assert scores.removal["0"].shape == (6,)


def test_progress_is_quiet_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    model, spaces = build("mlp")
    score(model, batches("mlp", 12, 4), spaces=spaces)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")


def test_progress_shows_rate_and_time_left_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    model, spaces = build("mlp")
    score(model, batches("mlp", 12, 4), spaces=spaces)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)  # without colours
    assert "scoring" in shown
    assert "3/3 batches" in shown
    assert "samples/s" in shown


def test_batches_go_to_the_device_of_the_model() -> None:
    data = [{"x": torch.zeros(4, 5), "flags": [torch.ones(2), "as it is"], "y": torch.zeros(4)}]
    (batch,) = read_batches(data, torch.device("meta"))
    assert batch.inputs["x"].is_meta
    assert batch.inputs["flags"][0].is_meta
    assert batch.inputs["flags"][1] == "as it is"
    assert batch.labels.is_meta


# Mistakes


def test_no_data() -> None:
    model, spaces = build("mlp")
    for nothing in ([], iter(()), [(torch.empty(0, 5), torch.empty(0, dtype=torch.long))]):
        with pytest.raises(FairprunerError, match="holds no samples"):
            score(model, nothing, spaces=spaces)


def test_one_class_only() -> None:
    model, spaces = build("mlp")
    inputs, labels = samples("mlp", 8)
    with pytest.raises(FairprunerError, match="compares classes, and the data holds 1"):
        score(model, [(inputs, torch.zeros_like(labels))], spaces=spaces)
    score(model, [(inputs, torch.zeros_like(labels))], spaces=spaces, removal="l1")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.rand(8), r"has labels float32\[8\], expected class indices: integers of shape \[8\]"),
        (torch.zeros(8, 1, dtype=torch.long), r"has labels int64\[8, 1\]"),
        (torch.tensor(1), r"has labels int64\[\]"),
        (torch.arange(7) % 3, "has 7 labels for 8 samples"),
        (torch.arange(8) - 1, "has the label -1"),
        (torch.arange(8), "has the label [3-7], expected class indices below the 3 logits"),
        (["a"] * 8, "has labels of type list"),
    ],
)
def test_labels_that_are_no_class_indices(labels: Any, message: str) -> None:
    model, spaces = build("mlp")
    with pytest.raises(FairprunerError, match=f"Batch 0 {message}"):
        score(model, [(samples("mlp", 8)[0], labels)], spaces=spaces)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ("words", r"Batch 0 is str, expected \(input, label\), \(input, input, label\), a dict, or inputs"),
        ((), r"Batch 0 is \(\), expected \(input, label\)"),
        ((1, 2, 3), r"Batch 0 has \(int, int\) as its input, expected a tensor"),
        ({"x": torch.zeros(8, 5), "kind": 1}, r"Batch 0 does not fit the model"),
        ((torch.tensor(1.0), torch.tensor([1])), "expected a tensor whose dim 0 counts the samples"),
    ],
)
def test_batches_of_no_known_form(batch: Any, message: str) -> None:
    model, spaces = build("mlp")
    with pytest.raises(FairprunerError, match=message):
        score(model, [batch], spaces=spaces)


def test_a_batch_that_does_not_fit_the_model() -> None:
    model, spaces = build("mlp")
    good = samples("mlp", 4)
    with pytest.raises(
        FairprunerError,
        match=(
            r"Batch 1 does not fit the model: Sequential called with float64\[4, 2, 4, 4\] raised"
            r" RuntimeError"
        ),
    ):
        score(model, [good, samples("convnet", 4)], spaces=spaces)


def test_an_output_without_logits() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 6), nn.Unflatten(1, (3, 2, 1)))
    spaces = spaces_of(model, space("0", 4, ("0.weight", 0, "write"), ("1.weight", 1, "read")))
    with pytest.raises(
        FairprunerError, match=r"returned float32\[2, 3, 2, 1\], expected logits of shape \[2, classes\]"
    ):
        score(model, [(torch.randn(4, 5), torch.arange(4) % 2)], spaces=spaces)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda output, labels: F.cross_entropy(output, labels, reduction="none"),
            r"loss of batch 1 is float64\[4\], expected a scalar",
        ),
        (lambda output, labels: 0.5, "loss of batch 0 is float, expected a scalar tensor"),
        (lambda output, labels: output.sum() * torch.inf, "loss of batch 0 is -?inf"),
        (lambda output, labels: output.sum() * torch.nan, "loss of batch 0 is nan"),
        (lambda output, labels: output.sum().detach(), "loss has no gradient"),
    ],
)
def test_losses_that_cannot_be_used(loss: Any, message: str) -> None:
    model, spaces = build("mlp")
    first = True

    def late(output: Tensor, labels: Tensor) -> Any:
        nonlocal first
        if "batch 1" in message and first:
            first = False
            return F.cross_entropy(output, labels)
        return loss(output, labels)

    with pytest.raises(FairprunerError, match=message):
        score(model, batches("mlp", 8, 4), spaces=spaces, loss=late)


def test_activations_that_are_not_finite() -> None:
    model, spaces = build("convnet")
    (inputs, labels), second = batches("convnet", 12, 6)
    second[0][3, 0, 0, 0] = torch.nan
    for removal in ("wasserstein", "activation"):
        with pytest.raises(FairprunerError, match="Space '0' has NaN or infinite activations in batch 1"):
            score(model, [(inputs, labels), second], spaces=spaces, removal=removal)
    with pytest.raises(FairprunerError, match="loss of batch 1 is nan"):
        score(model, [(inputs, labels), second], spaces=spaces, removal="l1")


def test_spaces_of_another_model() -> None:
    model, _ = build("mlp")
    _, other = build("convnet")
    with pytest.raises(
        FairprunerError, match=r"The spaces belong to another model: found the fingerprint .* of Sequential"
    ):
        score(model, batches("mlp", 6, 3), spaces=other)


def test_nothing_to_score() -> None:
    model, spaces = build("mlp")
    none = Spaces((), {"0": "skipped"}, CostModel((), (), ()), spaces.fingerprint)
    with pytest.raises(
        FairprunerError, match="nothing to score in Sequential: the spaces are empty, and 1 were left out"
    ):
        score(model, batches("mlp", 6, 3), spaces=none)


def test_a_space_that_cannot_be_seen() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("ni,oi->no", self.up(x), self.down.weight)

    model = Hidden()
    spaces = spaces_of(model, space("up", 4, ("up.weight", 0, "write"), ("down.weight", 1, "read")))
    data = [(torch.randn(4, 5), torch.arange(4) % 2)]
    with pytest.raises(
        FairprunerError, match=r"Space 'up' cannot be observed.*down\.weight reads its 4 units.*skip='up'"
    ):
        score(model, data, spaces=spaces)
    score(model, data, spaces=spaces, removal="l1")  # what looks at no activation needs none


def test_samples_that_a_model_mixes() -> None:
    """One row for the whole batch: nothing says whose features those are."""

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(0, keepdim=True)

    model = nn.Sequential(Mean(), nn.Linear(5, 4), nn.Linear(4, 3))
    spaces = spaces_of(model, space("1", 4, ("1.weight", 0, "write"), ("2.weight", 1, "read")))
    with pytest.raises(
        FairprunerError,
        match=r"'1' cannot be observed: 2.weight reads \[1, 4\], whose dim 0 is not a multiple of the 2",
    ):
        score(model, [(torch.randn(4, 5), torch.arange(4) % 2)] * 2, spaces=spaces)


def test_memory_that_runs_out_is_not_taken_for_a_wrong_batch() -> None:
    class Full(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            found: Tensor = self.inner(x)
            return found

    model, data = Full(), [(torch.randn(8, 4), torch.arange(8) % 2)] * 2
    spaces = fp.discover(model, torch.randn(1, 4))
    with pytest.raises(
        FairprunerError, match=r"Memory ran out on batch 0: .* Give smaller batches"
    ) as caught:
        score(model, data, spaces=spaces)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
