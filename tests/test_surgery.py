"""A cut model equals the masked one, costs what was predicted, and is a plain model afterwards."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from checks import check_cut, difference, doubled, some_units, with_lively_weights
from moe_zoo import plain_example, plain_moe
from torch import nn
from zoo import SMALL, CifarResNet

import fairpruner as fp


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_mask_equals_cut_on_every_topology(name: str) -> None:
    build, shape = SMALL[name]
    model, example = with_lively_weights(build()), torch.randn(shape, dtype=torch.float64)
    spaces = fp.discover(model, example)
    for seed, share in enumerate((0.2, 0.5, 0.99)):
        check_cut(model, example, spaces, some_units(spaces, share, seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "unet", "grouped", "resnet8_a", "split_concat"])
def test_each_space_alone(name: str) -> None:
    build, shape = SMALL[name]
    model, example = with_lively_weights(build()), torch.randn(shape, dtype=torch.float64)
    spaces = fp.discover(model, example)
    for space in spaces:
        check_cut(model, example, spaces, {space.name: (space.size // 2,)})


def test_the_empty_plan_is_the_identity() -> None:
    build, shape = SMALL["unet"]
    model, example = build().double(), torch.randn(shape, dtype=torch.float64)
    plan = fp.Plan.removing(fp.discover(model, example), {})
    assert difference(model, fp.cut(model, plan), example) == 0
    assert difference(model, fp.mask(model, plan), example) == 0


@pytest.mark.parametrize(
    ("build", "example"),
    [(SMALL["unet"][0], torch.zeros(SMALL["unet"][1])), (plain_moe, plain_example())],
    ids=["unet", "experts"],
)
def test_cut_and_masked_models_share_no_memory_with_the_original(
    build: Callable[[], nn.Module], example: torch.Tensor
) -> None:
    model = build().to(example.dtype)
    spaces = fp.discover(model, example)
    held = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    for removed in ({}, some_units(spaces, 0.5, 0)):
        plan = fp.Plan.removing(spaces, removed)
        for made in (fp.cut(model, plan), fp.mask(model, plan)):
            assert not held & {tensor.untyped_storage().data_ptr() for tensor in made.state_dict().values()}


def test_the_mask_is_what_no_consumer_reads() -> None:
    """Against an independent oracle: zero the units' activations with a hook on each consumer."""
    build, shape = SMALL["resnet8_b"]
    model, example = with_lively_weights(build()), torch.randn(shape, dtype=torch.float64)
    spaces = fp.discover(model, example)
    gone = [1, 3, 10]
    masked = fp.mask(model, fp.Plan.removing(spaces, {"layer1.0.conv1": gone}))
    hooked = copy.deepcopy(model)
    hooked.layer1[0].conv2.register_forward_pre_hook(
        lambda _, inputs: (inputs[0].index_fill(1, torch.tensor(gone), 0),)
    )
    assert difference(masked, hooked, example) < 1e-12


def test_mode_dtype_and_gradients_are_kept() -> None:
    model = CifarResNet(1, "B").bfloat16().train()
    model.conv1.weight.requires_grad_(False)
    model.layer1.eval()
    spaces = fp.discover(model, torch.randn(1, 3, 32, 32).bfloat16())
    small = fp.cut(model, fp.Plan.removing(spaces, some_units(spaces, 0.5, 0)))
    assert {t.dtype for t in small.parameters()} == {torch.bfloat16}
    assert [m.training for m in small.modules()] == [m.training for m in model.modules()]
    assert [p.requires_grad for p in small.parameters()] == [p.requires_grad for p in model.parameters()]
    assert type(small) is type(model)


@pytest.fixture(scope="module")
def small() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, example = CifarResNet(1, "A").eval(), torch.randn(2, 3, 32, 32)
    spaces = fp.discover(model, example)
    return fp.cut(model, fp.Plan.removing(spaces, some_units(spaces, 0.5, 0))), example


def test_a_cut_model_trains(small: tuple[nn.Module, torch.Tensor]) -> None:
    model, example = copy.deepcopy(small[0]).train(), small[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(5):
        loss = nn.functional.cross_entropy(model(example), torch.tensor([3, 7]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_a_cut_model_is_exported_scripted_and_compiled(small: tuple[nn.Module, torch.Tensor]) -> None:
    model, example = small
    expected = model(example)
    exported = torch.export.export(model, (example,)).module()
    assert torch.allclose(exported(example), expected, atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # torch.jit is on its way out, but users still have it
        scripted, traced = torch.jit.script(model), torch.jit.trace(model, example)
    assert torch.allclose(scripted(example), expected, atol=1e-6)
    assert torch.allclose(traced(example), expected, atol=1e-6)
    assert torch.allclose(torch.compile(model, backend="eager")(example), expected, atol=1e-6)


@pytest.mark.slow
def test_a_cut_model_goes_to_onnx(small: tuple[nn.Module, torch.Tensor]) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations
        program = torch.onnx.export(small[0], (small[1],), dynamo=True, verbose=False)
    onnx.checker.check_model(program.model_proto)


def test_a_cut_model_can_be_cut_again(small: tuple[nn.Module, torch.Tensor]) -> None:
    model, example = with_lively_weights(small[0]), doubled(small[1])
    spaces = fp.discover(model, example)
    check_cut(model, example, spaces, some_units(spaces, 0.5, 3))


def test_shared_parameters_stay_shared() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
            self.two.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.relu(self.two(torch.relu(self.one(torch.relu(self.one(x)))))))

    # the input is fixed at six features, and the square weight reads it: nothing of it can go
    with pytest.raises(fp.FairprunerError, match="nothing to prune"):
        fp.discover(Tied(), torch.randn(2, 6))
    build, shape = SMALL["shared"]
    model, example = with_lively_weights(build()), torch.randn(shape, dtype=torch.float64)
    model.again = model.body  # a second name for the same module
    spaces = fp.discover(model, example)
    cut = check_cut(model, example, spaces, {"stem": (0, 4, 9)})
    assert cut.again is cut.body
    assert cut.body.weight.shape == (7, 7, 3, 3)


def test_a_plan_for_another_model_is_refused() -> None:
    build, shape = SMALL["mlp"]
    plan = fp.Plan.removing(fp.discover(build(), torch.randn(shape)), {})
    with pytest.raises(
        fp.FairprunerError, match=r"The plan belongs to another model: found the fingerprint .* of Linear"
    ):
        fp.cut(nn.Linear(3, 2), plan)
    with pytest.raises(fp.FairprunerError, match="The plan belongs to another model"):
        fp.mask(nn.Linear(3, 2), plan)


@pytest.mark.parametrize("units", [[1.5], [1.0], ["1"], [True], [np.bool_(True)], [None], np.array([0.5])])
def test_a_plan_takes_whole_unit_numbers_only(units: Any) -> None:
    build, shape = SMALL["mlp"]
    spaces = fp.discover(build(), torch.randn(shape))
    with pytest.raises(fp.FairprunerError, match=r"The units to remove of space '2' hold .*, expected whole"):
        fp.Plan.removing(spaces, {"2": units})
    for whole in ([1, 3], np.array([1, 3]), torch.tensor([1, 3])):
        assert fp.Plan.removing(spaces, {"2": whole}).removed["2"] == (1, 3)  # type: ignore[dict-item]


def test_a_plan_takes_spaces_by_name_only() -> None:
    """A number was taken for the position of a space, and nothing was removed."""
    build, shape = SMALL["mlp"]
    spaces = fp.discover(build(), torch.randn(shape))
    with pytest.raises(fp.FairprunerError, match="The space 2 is a int, expected a name"):
        fp.Plan.removing(spaces, {2: (1,)})  # type: ignore[dict-item]


def test_a_plan_cannot_empty_a_space_or_name_a_unit_twice() -> None:
    build, shape = SMALL["mlp"]
    spaces = fp.discover(build(), torch.randn(shape))
    with pytest.raises(fp.FairprunerError, match="keeps 0 units of space '2', expected at least 1"):
        fp.Plan.removing(spaces, {"2": tuple(range(12))})
    for units in ((1, 1), (-1,), (12,), (2**70,)):
        with pytest.raises(fp.FairprunerError, match="must be distinct"):
            fp.Plan.removing(spaces, {"2": units})
    for unit in (None, 5):
        with pytest.raises(fp.FairprunerError, match=r"are (None|5), expected a sequence of indices"):
            fp.Plan.removing(spaces, {"2": unit})  # type: ignore[dict-item]
