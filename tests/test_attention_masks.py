"""A cut attention module reads masks, added keys and packed samples as the module before the cut does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fairpruner as fp
from fairpruner.models.attention import FewerHeadsAttention

_RANDOM = torch.Generator().manual_seed(0)
X = torch.randn(2, 5, 16, generator=_RANDOM)
PER_HEAD = torch.randn(2 * 4, 5, 5, generator=_RANDOM) * 3
HIDDEN = (PER_HEAD > 1) & (torch.arange(5) > 0)  # every token reads at least the first one
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])


class Net(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.a = nn.MultiheadAttention(16, 4, batch_first=True, **options)
        self.o, self.end = nn.Linear(16, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        read = self.a(x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=False)[0]
        return self.end(torch.relu(self.o(read)))


class Sloped(Net):
    """Every head hides other keys, in a mask that the model computes for each batch."""

    def forward(self, x: Tensor, mask: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        distance = (torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])).abs()  # [tokens, keys]
        return super().forward(x, (torch.arange(4)[:, None, None] * -distance).repeat(len(x), 1, 1) * 0.5)


class Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder, self.end = nn.TransformerEncoder(layer, 2), nn.Linear(16, 3)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.end(self.encoder(x, src_key_padding_mask=padding))


class Translating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(16, 4, 1, 1, 32, batch_first=True)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.both(x, x[:, 1:], src_key_padding_mask=padding, memory_key_padding_mask=padding)


def lively(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / 3)
    return model.eval()


def net() -> nn.Module:
    return lively(Net())


def check_equal(a: nn.Module, b: nn.Module, *inputs: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(a(*inputs), b(*inputs), atol=1e-6, rtol=1e-5)


def test_a_mask_for_every_head_is_read_by_the_heads_that_are_left(tmp_path: Path) -> None:
    model = net()
    spaces = fp.discover(model, {"x": X})
    first = fp.Plan.removing(spaces, {"a": (1,)})
    small = fp.cut(model, first)
    check_equal(small, fp.mask(model, first), X, PER_HEAD)
    check_equal(small, fp.mask(model, first), X, HIDDEN)
    check_equal(small, fp.mask(model, first), X, HIDDEN, PADDING)
    for other in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        check_equal(other, small, X, PER_HEAD)
    fp.save(small, first, tmp_path / "small")
    check_equal(fp.load(tmp_path / "small", build=net), small, X, PER_HEAD)
    second = fp.Plan.removing(fp.discover(small, {"x": X}), {"a": (1,)})  # head 2 of the whole model
    smaller = fp.cut(small, second)
    check_equal(smaller, fp.mask(model, fp.Plan.removing(spaces, {"a": (1, 2)})), X, PER_HEAD)
    check_equal(fp.cut(model, fp.compose(first, second)), smaller, X, PER_HEAD)


def test_a_mask_for_every_head_is_read_whole_if_only_features_are_cut() -> None:
    model = net()
    spaces = fp.discover(model, {"x": X})
    plan = fp.Plan.removing(spaces, {"a.out_proj": (1, 5)})
    check_equal(fp.cut(model, plan), fp.mask(model, plan), X, PER_HEAD)


def test_a_mask_for_the_heads_that_are_left_is_read_too() -> None:
    model = net()
    small = fp.cut(model, fp.Plan.removing(fp.discover(model, {"x": X}), {"a": (1,)}))
    left = PER_HEAD.unflatten(0, (2, 4))[:, [0, 2, 3]].flatten(0, 1)
    with torch.no_grad():
        torch.testing.assert_close(small(X, left), small(X, PER_HEAD))
    with pytest.raises(RuntimeError, match="should have 4"):
        small(X, PER_HEAD[:4])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("build", [Packing, Translating])
def test_samples_without_their_padding_are_read_by_fewer_heads(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """In eval mode, without gradients, torch's encoder packs the samples into a nested tensor."""
    model = lively(build())
    spaces = fp.discover(model, {"x": X})
    heads = [space.name for space in spaces if space.kind == "head"]
    for removed in ({heads[0]: (1, 2)}, {heads[1]: (0,)}, dict.fromkeys(heads, (3,))):
        plan = fp.Plan.removing(spaces, removed)
        small = fp.cut(model, plan)
        check_equal(small, fp.mask(model, plan), X, PADDING)
        check_equal(small, fp.mask(model, plan), X)
    fp.save(small, plan, tmp_path / "small")
    check_equal(fp.load(tmp_path / "small", build=lambda: build().eval()), small, X, PADDING)


ADDED = [{"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}]


@pytest.mark.parametrize("options", ADDED)
@pytest.mark.parametrize("need_weights", [True, False])
def test_added_keys_are_those_of_the_stock_module(options: dict[str, bool], need_weights: bool) -> None:
    stock = lively(nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64, **options))
    ours = copy.deepcopy(stock)
    ours.__class__ = FewerHeadsAttention
    x, causal = X.double(), torch.ones(5, 5, dtype=torch.bool).triu(1)
    calls: list[dict[str, Any]] = [
        {},
        {"key_padding_mask": PADDING},
        {"attn_mask": PER_HEAD.double()},
        {"attn_mask": HIDDEN, "key_padding_mask": PADDING},
        {"attn_mask": causal, "is_causal": True},
        {"attn_mask": causal, "is_causal": True, "key_padding_mask": PADDING},
    ]
    for call in calls:
        call = {"need_weights": need_weights, **call}
        for mine, theirs in zip(ours(x, x, x, **call), stock(x, x, x, **call), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)
    alone = {"key_padding_mask": PADDING[1], "attn_mask": HIDDEN[:4], "need_weights": need_weights}
    torch.testing.assert_close(ours(*[x[1]] * 3, **alone)[0], stock(*[x[1]] * 3, **alone)[0])


@pytest.mark.parametrize("options", ADDED)
def test_heads_with_added_keys_and_features_after_them_are_cut(options: dict[str, bool]) -> None:
    model = lively(Net(**options))
    spaces = fp.discover(model, {"x": X})
    assert {"a", "a.out_proj", "o"} <= {space.name for space in spaces}
    plan = fp.Plan.removing(spaces, {"a": (0, 2), "o": (1,)})
    check_equal(fp.cut(model, plan), fp.mask(model, plan), X, HIDDEN, PADDING)


@pytest.mark.parametrize("build", [*(lambda options=options: Net(**options) for options in ADDED), Sloped])
def test_scores_come_from_the_activations_of_the_model(build: Callable[[], nn.Module]) -> None:
    model, seen = lively(build()), []

    def loss(output: Tensor, *_: Any) -> Tensor:
        seen.append(output.detach())
        return output.pow(2).sum()

    fp.score(model, [{"x": X[:1]}], spaces=fp.discover(model, {"x": X[:1]}), loss=loss)
    assert seen
    for output in seen:
        torch.testing.assert_close(output, model(X[:1]), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("unit", range(4))
def test_an_encoder_without_one_of_its_blocks_runs_on_torchs_fast_path(unit: int) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(16, 3)).eval()
    x = torch.randn(2, 5, 16)
    spaces = fp.discover(model, x, kinds=["block"])
    plan = fp.Plan.removing(spaces, {"blocks": (unit,)})
    with torch.no_grad():
        torch.testing.assert_close(fp.cut(model, plan)(x), fp.mask(model, plan)(x), rtol=0, atol=1e-5)
