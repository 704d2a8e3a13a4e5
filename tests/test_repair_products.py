"""Every kind of product is rows of features times a matrix, and least squares on sums is least squares on
rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.nn import functional as F

from fairpruner.inputs.batches import Batch
from fairpruner.models.gram import WIDE, gram_matrix
from fairpruner.models.torch_private import FEW_PRODUCTS, multiplied
from fairpruner.repair import weight_uses
from fairpruner.repair.interceptor import Interceptor
from fairpruner.repair.products import Product, Rows
from fairpruner.repair.regression import Fit, Halves, NormalEquations, judged_fit, judged_mean
from fairpruner.repair.weight_uses import Addition, Offset, find_weight_uses


class Seen(Interceptor):
    """Keeps the last product and its output."""

    def product(self, product: Product) -> Tensor:
        self.last, self.out = product, product.run()
        return self.out


class Holder(nn.Module):
    """A weight, a bias and any function of an input and both."""

    def __init__(
        self, shape: tuple[int, ...], outputs: int, function: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(s, dtype=torch.float64)) for s in (shape, (outputs,))
        )
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


def check(holder: Holder, inputs: Tensor, bias: bool = True) -> None:
    seen = Seen(holder)
    with torch.no_grad(), seen:
        holder(inputs)
    product, out = seen.last, seen.out
    total = out.numel() // out.shape[product.axis]
    rows = Rows(torch.randperm(total)[: max(1, total // 2)], fitted=0)
    matrix = product.matrix(holder.weight.detach())  # [G, c, taps, q]
    found = torch.einsum("grtc,gctq->grq", product.features(rows), matrix)
    expected = product.outputs(out, rows) - (holder.bias.detach() if bias else 0)
    torch.testing.assert_close(found.transpose(0, 1).flatten(1), expected)
    assert torch.equal(product.stored(matrix, holder.weight), holder.weight)
    assert (product.bias is holder.bias) == bias


CONVOLUTIONS = {
    1: (F.conv1d, F.conv_transpose1d),
    2: (F.conv2d, F.conv_transpose2d),
    3: (F.conv3d, F.conv_transpose3d),
}


@settings(max_examples=60)
@given(
    dims=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.one_of(st.integers(0, 2), st.sampled_from(["same", "valid"])),
    dilation=st.integers(1, 2),
    groups=st.integers(1, 3),
)
def test_convolutions(dims: int, kernel: int, stride: int, padding: Any, dilation: int, groups: int) -> None:
    stride, kernel = (1, 2 * (kernel // 2) + 1) if padding == "same" else (stride, kernel)
    function = CONVOLUTIONS[dims][0]
    holder = Holder(
        (2 * groups, 3, *[kernel] * dims),
        2 * groups,
        lambda x, w, b: function(x, w, b, stride, padding, dilation, groups),
    )
    check(holder, torch.randn(2, 3 * groups, *[6] * dims, dtype=torch.float64))


@settings(max_examples=60)
@given(
    dims=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    groups=st.integers(1, 3),
    extra=st.booleans(),
)
def test_transposed_convolutions(
    dims: int, kernel: int, stride: int, padding: int, dilation: int, groups: int, extra: bool
) -> None:
    function, more = CONVOLUTIONS[dims][1], int(extra and max(stride, dilation) > 1)
    holder = Holder(
        (3 * groups, 2, *[kernel] * dims),
        2 * groups,
        lambda x, w, b: function(x, w, b, stride, padding, more, groups, dilation),
    )
    check(holder, torch.randn(2, 3 * groups, *[5] * dims, dtype=torch.float64))


@pytest.mark.parametrize(
    ("shape", "function", "bias"),
    [
        ((3, 4), F.linear, True),
        ((3, 4), lambda x, w, b: F.linear(input=x, weight=w, bias=b), True),
        ((4, 3), lambda x, w, b: x @ w + b, False),
        ((3, 4), lambda x, w, b: x @ w.t() + b, False),
        ((4, 4), lambda x, w, b: torch.matmul(x, w.t()), False),
        ((4, 3), lambda x, w, b: torch.addmm(b, x.flatten(0, -2), w), True),
    ],
)
def test_matrix_products(
    shape: tuple[int, int], function: Callable[[Tensor, Tensor, Tensor], Tensor], bias: bool
) -> None:
    outputs = next(size for size in (3, shape[0]) if size in shape)
    for inputs in ((5, 4), (2, 5, 4)):
        check(Holder(shape, outputs, function), torch.randn(*inputs, dtype=torch.float64), bias)


@given(
    rows=st.integers(8, 40),
    features=st.integers(1, 4),
    targets=st.integers(1, 3),
    with_offset=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_a_fit_from_sums_is_the_fit_of_the_rows(
    rows: int, features: int, targets: int, with_offset: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(rows, features)) + 2, rng.normal(size=(rows, targets))
    equations = NormalEquations.of(
        torch.from_numpy(x[None, :5]), torch.from_numpy(y[None, :5])
    ) + NormalEquations.of(torch.from_numpy(x[None, 5:]), torch.from_numpy(y[None, 5:]))
    (fit,) = equations.solve([1e-13], with_offset)
    assert fit is not None
    design = np.column_stack([x, np.ones(rows)]) if with_offset else x
    solution = np.linalg.lstsq(design, y, rcond=None)[0]
    np.testing.assert_allclose(fit.slope[0].numpy(), solution[:features], rtol=1e-5, atol=1e-6)
    residual = y - x @ fit.slope[0].numpy() - fit.offset[0].numpy()
    assert equations.error(fit) == pytest.approx(np.square(residual).sum(), rel=1e-6, abs=1e-9)
    other = Fit(
        torch.from_numpy(rng.normal(size=(1, features, targets))),
        torch.from_numpy(rng.normal(size=(1, targets))),
    )
    assert equations.error(other) == pytest.approx(
        np.square(y - x @ other.slope[0].numpy() - other.offset[0].numpy()).sum()
    )


@pytest.mark.parametrize("with_offset", [False, True])
def test_a_row_of_weight_three_counts_like_three_rows(with_offset: bool) -> None:
    x, y = torch.randn(1, 30, 4, dtype=torch.float64), torch.randn(1, 30, 2, dtype=torch.float64)
    weights = torch.arange(30, dtype=torch.float64) % 3 + 1
    times = weights.long()
    repeated = NormalEquations.of(x.repeat_interleave(times, 1), y.repeat_interleave(times, 1))
    weighted = NormalEquations.of(x, y, weights)
    (one,), (other,) = (list(sums.solve([1e-6], with_offset)) for sums in (repeated, weighted))
    assert one is not None
    assert other is not None
    torch.testing.assert_close(one.slope, other.slope)
    torch.testing.assert_close(one.offset, other.offset)
    assert weighted.error(one) == pytest.approx(repeated.error(one))


@pytest.mark.parametrize("features", [256, 301])
def test_wide_products_of_pairs_are_whole(features: int) -> None:
    x = torch.randn(2, 40, features, dtype=torch.float64)
    found = NormalEquations.of(x, torch.zeros(2, 40, 1, dtype=torch.float64)).gram
    torch.testing.assert_close(found, x.mT @ x)


def halves(x: Tensor, y: Tensor) -> Halves:
    order = torch.cat([torch.arange(0, len(x), 2), torch.arange(1, len(x), 2)])
    return Halves.of(x[None, order], y[None, order], fitted=(len(x) + 1) // 2)


def test_noise_is_not_fitted() -> None:
    x, y = torch.randn(24, 20, dtype=torch.float64), torch.randn(24, 1, dtype=torch.float64)
    found = judged_fit(halves(x, y), with_offset=False)
    assert found.fit is None or float(found.fit.slope.abs().max()) < 0.5  # undamped it would pass 1
    assert found.after <= found.before


def test_a_true_line_is_found_without_damping() -> None:
    x = torch.randn(40, 6, dtype=torch.float64)
    x[:, 5] = x[:, 0] - 2 * x[:, 1]  # no unique solution
    slope = torch.randn(6, 2, dtype=torch.float64)
    found = judged_fit(halves(x, x @ slope + 3), with_offset=True)
    assert found.fit is not None
    torch.testing.assert_close(x @ found.fit.slope[0] + found.fit.offset[0], x @ slope + 3, rtol=0, atol=1e-8)


def test_a_mean_is_used_only_if_it_holds_for_the_other_half() -> None:
    x = torch.randn(40, 2, dtype=torch.float64)
    good = judged_mean(halves(x, torch.full((40, 1), 3.0, dtype=torch.float64)), with_offset=True)
    assert good.fit is not None
    assert float(good.fit.offset) == pytest.approx(3)
    # one half +1, the other -1
    opposed = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(20)[:, None]
    assert judged_mean(halves(x, opposed), with_offset=True).fit is None


class Block(nn.Module):
    """One of each: a bias, a batch norm, a shared norm, a sum in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two, self.three = (
            nn.Conv2d(3, 4, 1),
            *(nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(3)),
        )
        self.norm, self.shared, self.head = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        out = self.norm(self.one(x))
        out += x
        x = torch.relu(self.shared(self.two(torch.relu(out))))
        x = torch.relu(self.shared(self.three(x))) + x
        return self.head(x.mean((2, 3)))


def test_uses_of_weights() -> None:
    model = Block().eval()
    uses = find_weight_uses(model, Batch(torch.randn(6, 3, 8, 8), torch.zeros(6), 0))
    assert list(uses) == ["stem.weight", "one.weight", "two.weight", "three.weight", "head.weight"]
    assert {name: use.offset for name, use in uses.items()} == {
        "stem.weight": Offset("stem.bias", 1),
        "one.weight": Offset("norm.running_mean", -1),
        "two.weight": None,  # the norm behind it serves another as well
        "three.weight": None,
        "head.weight": Offset("head.bias", 1),
    }
    # What runs through a relu first is no straight line of the output any more.
    assert {name: use.addition for name, use in uses.items() if use.addition} == {
        "one.weight": Addition(0, 0)
    }


class Chain(nn.Module):
    """Residual blocks of one linear layer each."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x)) + layer(x).mul(0.5)
        return x


def test_an_addition_is_compared_with_the_few_outputs_that_lead_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = []
    scale = weight_uses.channel_scale
    monkeypatch.setattr(weight_uses, "channel_scale", lambda *rows: compared.append(1) or scale(*rows))
    for depth in (10, 40):
        compared.clear()
        find_weight_uses(Chain(depth).double(), Batch(torch.randn(8, 4).double(), torch.zeros(8), 0))
        assert len(compared) == 2 * depth


@pytest.mark.parametrize("width", [3, WIDE - 1, WIDE, WIDE + 61])
@pytest.mark.parametrize("shape", [(), (1,), (2,)])
@pytest.mark.parametrize("turned", [False, True])
def test_a_gram_matrix_is_the_exact_one_but_for_rounding(
    width: int, shape: tuple[int, ...], turned: bool
) -> None:
    generator = torch.Generator().manual_seed(width)
    features = torch.randn(*shape, *((width, 500) if turned else (500, width)), generator=generator)
    features = features.mT if turned else features
    exact = features.double().mT @ features.double()
    torch.testing.assert_close(gram_matrix(features).double(), exact, rtol=0, atol=1e-3)
    assert torch.equal(gram_matrix(features), gram_matrix(features).mT)
    assert gram_matrix(features.double()).dtype == torch.float64


@pytest.mark.parametrize("kind", ["whole", "turned", "part", "turned part", "row by row"])
def test_large_products_are_exact_but_for_rounding_wherever_their_operands_lie(kind: str) -> None:
    torch.manual_seed(0)
    table = torch.randn(400, 400)
    right = {
        "whole": table,
        "turned": table.t(),
        "part": torch.randn(400, 500)[:, 100:],
        "turned part": torch.randn(500, 400)[100:].t(),
        "row by row": torch.randn(800, 400)[::2],
    }[kind]
    left = right[:40].flip(0)
    assert left.numel() * right.shape[1] > FEW_PRODUCTS
    for one, other in ((left, right), (right.t(), left.t()), (right[:, :7].t(), right)):
        torch.testing.assert_close(
            multiplied(one, other).double(), one.double() @ other.double(), rtol=0, atol=1e-3
        )
