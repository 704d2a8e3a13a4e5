"""Sizes that stand in tuples, weights that heads share, and rounding that a model amplifies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import check_cut, some_units, with_lively_weights
from torch import Tensor, nn

import fairpruner as fp
from fairpruner.models.fingerprint import fingerprint


class SplitByTuple(nn.Module):
    """A gated block whose gate meets untouched and convolved channels, divided at sizes in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = (12, 8, 4)
        self.first, self.last = nn.Linear(6, 24), nn.Linear(12, 6)
        self.mixed = nn.Conv1d(4, 4, 3, padding=1, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        gate, plain, mixed = torch.split(self.first(x), self.parts, dim=-1)
        joined = torch.cat([plain, self.mixed(mixed.transpose(1, 2)).transpose(1, 2)], -1)
        return self.last(gate.sigmoid() * joined)


class TableOfBiases(nn.Module):
    """Attention with a table of biases, whose shape a tuple holds; tables may be shared by all blocks."""

    def __init__(self, heads: int = 4, tokens: int = 5) -> None:
        super().__init__()
        self.shape = (tokens, tokens, heads)
        self.table = nn.Parameter(torch.randn(tokens * tokens, heads))

    def forward(self) -> Tensor:
        return self.table.view(self.shape).permute(2, 0, 1)


class Attention(nn.Module):
    def __init__(self, *, own_table: bool) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.biases = TableOfBiases() if own_table else None

    def forward(self, x: Tensor, biases: Tensor | None = None) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, 4).permute(2, 0, 3, 1, 4)
        biases = self.biases() if self.biases is not None else biases
        attended = (q @ k.mT / 2 + biases).softmax(-1) @ v
        return self.proj(attended.transpose(1, 2).reshape(batch, tokens, width))


class Blocks(nn.Module):
    def __init__(self, *, one_table: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(own_table=not one_table) for _ in range(2))
        self.biases = TableOfBiases() if one_table else None
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        biases = None if self.biases is None else self.biases()
        for block in self.blocks:
            x = x + block(self.norm(x), biases)
        return self.head(self.norm(x).mean(1))


class SharedByHeads(nn.Module):
    """Queries are pooled by a convolution, and their positions added by a matrix, that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.proj, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 3)
        self.pool = nn.Conv1d(4, 4, 3, padding=1, groups=4)
        self.norm, self.first = nn.LayerNorm(4), nn.LayerNorm(16)
        self.places = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        batch = len(x)
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q = self.pool(q.flatten(0, 1).mT).mT.unflatten(0, (batch, self.num_heads))
        q = self.norm(q)
        scores = q @ k.mT + torch.einsum("bhtc,kc->bhtk", q, self.places)
        return self.head(x + self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))).mean(1)


class Attend(nn.Module):
    """Attention on an image whose keys come from fewer places, in code that keeps the input's width."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q, self.kv, self.proj = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 16)
        self.reduce, self.norm = nn.Conv2d(16, 16, 2, 2), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q = self.q(x).reshape(b, n, self.num_heads, -1).transpose(1, 2)
        fewer = self.reduce(x.mT.reshape(b, c, 4, 4)).reshape(b, c, -1).mT
        k, v = self.kv(self.norm(fewer)).reshape(b, -1, 2, self.num_heads, 4).permute(2, 0, 3, 1, 4)
        attended = (q @ k.mT).softmax(-1) @ v
        return self.proj(attended.transpose(1, 2).reshape(b, n, c))


class OnImages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend, self.head = Attend(), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.attend(x)).mean(1)


CASES: dict[str, tuple[Any, tuple[int, ...], dict[str, int]]] = {
    "parts": (SplitByTuple, (2, 7, 6), {"first": 4, "first#2": 8}),
    "tables": (lambda: Blocks(one_table=False), (2, 5, 16), {"blocks.0.qkv": 4, "blocks.1.qkv": 4}),
    "one table": (lambda: Blocks(one_table=True), (2, 5, 16), {"blocks.0.qkv": 4}),
    "shared weights": (SharedByHeads, (2, 6, 16), {"qkv": 4}),
    "reduced keys": (OnImages, (2, 16, 16), {"attend.q": 4}),
}


@pytest.mark.parametrize("case", CASES)
def test_units_whose_number_stands_in_a_tuple_or_whose_weights_are_shared(case: str) -> None:
    build, shape, sizes = CASES[case]
    model, example = with_lively_weights(build()), torch.randn(shape).double()
    spaces = fp.discover(model, example)
    assert {space.name: space.size for space in spaces} == sizes, spaces.left_out
    check_cut(model, example, spaces, some_units(spaces, 0.5, 0))


class TwoWidths(nn.Module):
    """Three parts of equal width, of which two pass grouped convolutions: their units are groups."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 12
        self.first, self.last = nn.Conv2d(3, 36, 1), nn.Conv2d(36, 5, 1)
        self.grouped = nn.ModuleList(nn.Conv2d(12, 12, 3, padding=1, groups=4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        one, two, three = torch.split(self.first(x).relu(), self.width, 1)
        return self.last(torch.cat([self.grouped[0](one), self.grouped[1](two), three], 1)).mean((2, 3))


def test_parts_with_more_units_give_several_to_each_unit_of_the_others() -> None:
    model, example = with_lively_weights(TwoWidths()), torch.randn(2, 3, 6, 6).double()
    spaces = fp.discover(model, example)
    assert [(space.name, space.size) for space in spaces] == [("first", 4)]
    check_cut(model, example, spaces, {"first": (0, 2)})


class Chaotic(nn.Module):
    """A logistic map doubles every rounding error in each of its steps."""

    def __init__(self, fixed: float | None = None) -> None:
        super().__init__()
        self.fixed = fixed
        self.first, self.last = nn.Linear(4, 2000), nn.Linear(2000, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).sigmoid()
        x = self.last(hidden if self.fixed is None else hidden / hidden.shape[1] * self.fixed).sigmoid()
        for _ in range(28):
            x = 4 * x * (1 - x)
        return x


def test_amplified_rounding_is_no_difference_and_does_not_hide_one() -> None:
    assert fp.discover(Chaotic(), torch.randn(9, 4)).names == ("first",)
    with pytest.raises(fp.FairprunerError, match="mask and cut differ"):
        fp.discover(Chaotic(fixed=2000.0), torch.randn(9, 4))


class Chooser(nn.Module):
    """One head says which places of the features the other reads, as a detector's boxes do."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.places, self.last = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)  # [rows, 8]
        chosen = (self.places(features).mean(0).sigmoid() * len(x)).long().clamp(max=len(x) - 1)
        return self.last(features[chosen].relu())


def test_numbers_that_choose_places_are_no_units() -> None:
    model, example = with_lively_weights(Chooser()), torch.randn(6, 4).double()
    spaces = fp.discover(model, example)
    assert spaces.left_out["places"] == "chooses places in index"
    check_cut(model, example, spaces, {"features": (1, 5)})


class TableOfPlaces(nn.Module):
    """A table that a forward pass makes anew for the number of tokens that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.table = torch.arange(x.shape[1], dtype=x.dtype)
        return self.first(x) + self.table[:, None]


def test_a_table_that_is_not_saved_does_not_change_the_fingerprint() -> None:
    model = TableOfPlaces()
    before = fingerprint(model)
    model(torch.randn(1, 3, 4))
    assert fingerprint(model) == before
