"""Cuts are copies: one that would still use the original, or take over its tensors, is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Lock
from types import MethodType
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fairpruner as fp


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def wrapped() -> nn.Module:
    """Its forward is a function that calls the forward of the original."""
    model = net()
    before = model.forward
    model.forward = lambda x: 2 * before(x)  # type: ignore[method-assign]
    return model


def holding_a_weight() -> nn.Module:
    model = net()
    weight = model[2].weight
    model[2].forward = lambda x: F.linear(x, weight)
    return model


def holding_numbers() -> nn.Module:
    model = net()
    weight = model[2].weight
    model[2].forward = lambda x: F.linear(x, weight.data)
    return model


class Tapped(nn.Module):
    """Reads a feature that a hook takes down on the module that registered it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.feature = net(), nn.Linear(6, 3), torch.zeros(1, 6)
        self.body[1].register_forward_hook(lambda module, args, output: setattr(self, "feature", output))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), self.head(self.feature.detach().to(x)[:1])


class Remote(nn.Module):
    """Finds a layer through a weak reference to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.me = net(), ref(self)

    def forward(self, x: Tensor) -> Tensor:
        model = self.me()
        assert model is not None
        found: Tensor = model.inner[2](self.inner[:2](x))
        return found


class Locked(Remote):
    def __init__(self) -> None:
        super().__init__()
        self.lock = Lock()


class Fresh(nn.Module):
    """A copy of it is built anew and given the numbers of the original."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def __deepcopy__(self, memo: dict[int, Any]) -> Fresh:
        copy = type(self)()
        copy.load_state_dict(self.state_dict())
        return copy

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found


class Itself(Fresh):
    def __deepcopy__(self, memo: dict[int, Any]) -> Itself:
        return self


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (wrapped, "uses 0.bias, 0.weight, 2.bias of the original"),
        (holding_a_weight, "uses 2.weight of the original"),
        (holding_numbers, "uses 2.weight of the original"),
        (Tapped, "sets feature of the original"),
        (Remote, "uses inner.2.bias, inner.2.weight of the original"),
        (Locked, "attribute lock of a Locked cannot be copied"),
        (Fresh, "does not take over inner.0.weight"),
        (Itself, "does not take over inner.0.weight"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Fresh()), "does not take over 2.inner.0.weight"),
    ],
)
def test_a_model_whose_copies_do_not_stand_alone_is_refused(
    build: Callable[[], nn.Module], found: str
) -> None:
    with pytest.raises(fp.FairprunerError, match=found):
        fp.discover(build(), torch.ones(1, 4))


def test_a_plan_from_a_file_is_refused_for_such_a_model_too(tmp_path: Path) -> None:
    plan = fp.Plan.removing(fp.discover(net(), torch.ones(1, 4)), {"0": (1, 3)})
    plan.save(tmp_path / "plan.json")
    with pytest.raises(fp.FairprunerError, match="of the original"):
        fp.cut(wrapped(), fp.Plan.load(tmp_path / "plan.json"))


def doubled(module: nn.Linear, x: Tensor) -> Tensor:
    return 2 * F.linear(x, module.weight, module.bias)


@pytest.mark.parametrize("bind", [partial, MethodType])
def test_functions_that_are_bound_to_a_module_move_to_its_copy(bind: Callable[..., Any]) -> None:
    model = net()
    model[0].forward = bind(doubled, model[0])
    plan = fp.Plan.removing(fp.discover(model, torch.ones(1, 4)), {"0": (1, 3)})
    small, masked, x = fp.cut(model, plan), fp.mask(model, plan), torch.randn(3, 4)
    assert torch.allclose(small(x), masked(x), atol=1e-6)
    assert fp.count_flops(small, x[:1]) == plan.predicted["flops"]
