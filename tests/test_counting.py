"""Parameters and MACs of a model, by hand and on the shapes that counters stumble over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fairpruner as fp


class ClassToken(nn.Module):
    """A learned token, expanded straight into a submodule, beside the input's own."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 4))
        self.block, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        token: Tensor = self.block(self.token.expand(len(x), -1, -1))
        return self.head(token[:, 0] + self.block(x))


class GivenParameter(nn.Module):
    """A constant that is a parameter and the input of the first layer, as in a style-based generator."""

    def __init__(self) -> None:
        super().__init__()
        self.constant = nn.Parameter(torch.zeros(1, 4))
        self.block, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.constant) * x.mean())


@pytest.mark.parametrize(
    ("build", "macs"),
    [(ClassToken, 3 * (24 + 24 + 12)), (GivenParameter, 24 + 12)],
    ids=["expanded", "given"],
)
def test_a_parameter_may_be_the_input_of_a_module(build: Callable[[], nn.Module], macs: int) -> None:
    model = build()
    assert fp.count_flops(model, torch.zeros(3, 4)) == macs
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_batch_counts_as_often_as_it_has_samples_and_a_plan_counts_the_same_way() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    for samples in (1, 8):
        example = torch.zeros(samples, 4)
        assert fp.count_flops(model, example) == samples * 48
        plan = fp.Plan.removing(fp.discover(model, example), {"0": (1, 5)})
        assert plan.original["flops"] == samples * 48
        assert plan.predicted["flops"] == fp.count_flops(fp.cut(model, plan), example) == samples * 36


def test_an_example_that_does_not_fit_is_told_in_one_sentence() -> None:
    with pytest.raises(fp.FairprunerError, match="The example does not fit the model: Linear called with"):
        fp.count_flops(nn.Linear(4, 2), torch.zeros(1, 3))


class Attending(nn.Module):
    """Attention over 5 tokens with 4 heads of width 2, and 2 heads of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(2, (-1, 2)).transpose(1, 2)
        k, v = self.kv(x).unflatten(2, (2, -1, 2)).movedim(3, 1).unbind(3)
        y = F.scaled_dot_product_attention(q, *(t.repeat_interleave(2, 1) for t in (k, v)))
        return self.out(y.transpose(1, 2).flatten(2))


def test_the_products_inside_attention_are_counted_on_the_cpu_too() -> None:
    """Both products: 3 samples, 4 heads, 5 x 5 pairs of tokens, width 2."""
    model, example = Attending(), torch.randn(3, 5, 8)
    linear, inside = 3 * 5 * (64 + 64 + 64), 2 * 3 * 4 * 5 * 5 * 2
    assert fp.count_flops(model, example) == linear + inside
    plan = fp.Plan.removing(fp.discover(model, example), {"q": (1,)})
    assert plan.original["flops"] == linear + inside
    assert plan.predicted["flops"] == fp.count_flops(fp.cut(model, plan), example)
