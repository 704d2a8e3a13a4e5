"""The attention module that a cut leaves computes what the stock one does, for whatever it is asked."""

from __future__ import annotations

import copy

import pytest
import torch
from checks import check_cut, with_lively_weights
from torch import nn

import fairpruner as fp
from fairpruner.models.attention import FewerHeadsAttention


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("separate", [True, False])
def test_with_all_heads_it_is_the_stock_module(batch_first: bool, need_weights: bool, separate: bool) -> None:
    sizes = {"kdim": 10, "vdim": 14} if separate else {}
    stock = nn.MultiheadAttention(12, 3, batch_first=batch_first, dtype=torch.float64, **sizes).eval()
    ours = copy.deepcopy(stock)
    ours.__class__ = FewerHeadsAttention
    query, key, value = (
        torch.randn(2, 5, 12).double(),
        torch.randn(2, 7, sizes.get("kdim", 12)).double(),
        torch.randn(2, 7, sizes.get("vdim", 12)).double(),
    )
    padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    turned = (query, key, value) if batch_first else tuple(t.transpose(0, 1) for t in (query, key, value))
    masks = [
        {},
        {"key_padding_mask": padding},
        {"attn_mask": torch.randn(5, 7).double()},
        {"attn_mask": torch.randn(5, 7) > 1, "key_padding_mask": padding},
    ]
    for options in masks:
        options = {"need_weights": need_weights, **options}
        for mine, theirs in zip(ours(*turned, **options), stock(*turned, **options), strict=True):
            assert (mine is None and theirs is None) or torch.allclose(mine, theirs, atol=1e-12)
    single = [t[0] for t in (query, key, value)]
    for mine, theirs in zip(
        ours(*single, average_attn_weights=False), stock(*single, average_attn_weights=False), strict=True
    ):
        assert torch.allclose(mine, theirs, atol=1e-12)


def test_heads_of_stock_attention_and_of_encoder_layers_are_cut() -> None:
    layer = nn.TransformerEncoderLayer(24, 4, 48, batch_first=True)
    model = with_lively_weights(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    example = torch.randn(2, 5, 24, dtype=torch.float64)
    spaces = fp.discover(model, example)
    assert {s.name: (s.kind, s.size) for s in spaces} == {
        f"layers.{i}.{n}": u
        for i in (0, 1)
        for n, u in {"self_attn": ("head", 4), "linear1": ("hidden", 48)}.items()
    }
    small = check_cut(model, example, spaces, {"layers.0.self_attn": (1, 2), "layers.1.self_attn": (0,)})
    assert [small.layers[i].self_attn.num_heads for i in (0, 1)] == [2, 3]
    assert isinstance(small.layers[0].self_attn, nn.MultiheadAttention)
    with torch.no_grad():  # the fused kernel is on by default, and must not be handed these weights
        small(example)


def test_a_narrower_input_of_stock_attention_runs_if_all_heads_stay() -> None:
    """The stock module refuses an input that is narrower than its embedding, on its fused path too."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(3, 16), nn.Linear(16, 2)
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.enter(x)
            return self.leave(x + self.attention(x, x, x, need_weights=False)[0])

    torch.manual_seed(0)
    net, example = Net().double().eval(), torch.randn(2, 5, 3).double()
    spaces = fp.discover(net, example)
    plan = fp.Plan.removing(spaces, {"enter": (0, 3, 7)})
    with torch.no_grad():
        torch.testing.assert_close(fp.cut(net, plan)(example), fp.mask(net, plan)(example))
