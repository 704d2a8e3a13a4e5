"""Several plans as one: the same model, to the bit, whether cut at once or step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from checks import IN_FLOAT64, difference, doubled, some_units, with_lively_weights
from torch import nn
from zoo import SMALL

import fairpruner as fp
from fairpruner.allocation.composition import compose, remaining
from fairpruner.core.costs import predict
from fairpruner.core.plan import Plan
from fairpruner.core.spaces import Spaces

NETS = [name for name in SMALL if not name.startswith(("resnet56", "densenet40", "prelu"))]
# Their spaces are coupled because a cut was seen to fail, which depends on the sizes: discovery of the
# cut
# model may find others.
REDISCOVERED = [name for name in NETS if name != "shuffle"]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))


def owners(spaces: Spaces) -> dict[str, Any]:
    return {
        s.name: (
            s.size,
            s.kind,
            s.min_keep,
            {(p.tensor, p.dim, p.role, p.owner.tobytes()) for p in s.slices},
            len(s.counts),
        )
        for s in spaces
    }


@pytest.mark.parametrize("name", NETS)
def test_three_rounds_are_one_plan(name: str) -> None:
    build, shape = SMALL[name]
    model, example = with_lively_weights(build()), doubled(torch.randn(*shape))
    whole = None
    current, spaces = model, fp.discover(model, example)
    for round_ in range(3):
        plan = Plan.removing(spaces, some_units(spaces, 0.3, seed=round_))
        small = fp.cut(current, plan)
        assert difference(fp.mask(current, plan), small, example) < IN_FLOAT64
        current, spaces = small, remaining(plan, small)
        whole = plan if whole is None else compose(whole, plan)
    assert whole is not None
    assert whole.rule == "iterative"
    assert whole.alpha is None
    at_once = fp.cut(model, whole)
    assert all(
        torch.equal(a, b)
        for a, b in zip(at_once.state_dict().values(), current.state_dict().values(), strict=True)
    )
    assert whole.predicted == {
        "units": sum(s.size for s in spaces),
        "params": fp.count_params(current),
        "flops": fp.count_flops(current, example),
        "bytes": sum(p.numel() * p.element_size() for p in current.parameters()),
    }
    assert whole.original["params"] == fp.count_params(model)
    assert predict(spaces, {}) == whole.predicted


@pytest.mark.parametrize("name", REDISCOVERED)
def test_what_remains_is_what_discovery_finds(name: str) -> None:
    build, shape = SMALL[name]
    model, example = build().eval(), torch.randn(*shape)
    spaces = fp.discover(model, example)
    plan = Plan.removing(spaces, some_units(spaces, 0.4, seed=1))
    small = fp.cut(model, plan)
    left, found = remaining(plan, small), fp.discover(small, example)
    assert left.names == found.names
    assert owners(left) == owners(found)
    assert left.fingerprint == found.fingerprint
    further = some_units(found, 0.4, seed=2)
    assert predict(left, further) == predict(found, further)
    assert (
        compose(plan, Plan.removing(found, further)).removed
        == compose(plan, Plan.removing(left, further)).removed
    )


def test_indices_are_those_of_the_original() -> None:
    model = mlp()
    first = Plan.removing(fp.discover(model, torch.zeros(1, 4)), {"0": (4, 1), "2": (0,)})
    second = Plan.removing(
        remaining(first, fp.cut(model, first)), {"0": (3, 0), "2": ()}
    )  # the first leaves 0, 2, 3, 5
    assert compose(first, second).removed == {"0": (4, 1, 5, 0), "2": (0,)}


def test_a_space_that_the_second_plan_lacks_stays_as_the_first_left_it() -> None:
    model = mlp()
    first = Plan.removing(fp.discover(model, torch.zeros(1, 4)), {"0": (1,), "2": (0,)})
    second = Plan.removing(remaining(first, fp.cut(model, first)).only(skip=["2"]), {"0": (0,)})
    assert compose(first, second).removed == {"0": (1, 0), "2": (0,)}


def test_plans_that_do_not_follow_each_other() -> None:
    model, example = mlp(), torch.zeros(1, 4)
    spaces = fp.discover(model, example)
    first = Plan.removing(spaces, {"0": (1,)})
    with pytest.raises(
        fp.FairprunerError, match="Space '0' has 6 units in the second plan, but the first plan leaves 5"
    ):
        compose(first, Plan.removing(spaces, {"0": (1,)}))
    other = nn.Sequential(nn.ReLU(), *mlp())
    with pytest.raises(fp.FairprunerError, match="'1', which the first plan does not have"):
        compose(Plan.removing(spaces, {}), Plan.removing(fp.discover(other, example), {}))
    left = remaining(first, fp.cut(model, first))
    space = left["0"]
    turned = replace(
        space, slices=tuple(replace(s, owner=np.where(s.owner >= 0, 4 - s.owner, -1)) for s in space.slices)
    )
    with pytest.raises(fp.FairprunerError, match="or in the order of its units"):
        compose(first, Plan.removing(replace(left, items=(turned, left["2"])), {"0": (0,)}))
