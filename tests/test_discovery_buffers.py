"""Buffers that meet units element by element are cut with them; all others are constants."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from checks import check_cut, doubled, some_units, with_lively_weights
from torch import nn
from torch.nn.utils import parametrize, prune

import fairpruner as fp


class Frozen(nn.Module):
    """A norm with fixed statistics in buffers, as of torchvision's detection backbones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight.reshape(1, -1, 1, 1) * (self.running_var.reshape(1, -1, 1, 1) + 1e-5).rsqrt()
        return x * scale + (self.bias.reshape(1, -1, 1, 1) - self.running_mean.reshape(1, -1, 1, 1) * scale)


def frozen_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3), Frozen(12), nn.ReLU(), nn.Conv2d(12, 7, 1), Frozen(7), nn.Conv2d(7, 2, 1)
    )


def test_a_frozen_norm_goes_along_with_its_channels() -> None:
    model, example = with_lively_weights(frozen_net()), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    spaces = fp.discover(model, example)
    assert {s.name: s.size for s in spaces} == {"0": 12, "3": 7}
    assert {(s.tensor, s.role) for s in spaces["0"].slices} >= {
        ("1.running_mean", "carry"),
        ("1.weight", "carry"),
    }
    small = check_cut(model, example, spaces, some_units(spaces, 0.5, 0))
    assert small[1].running_var.shape == (6,)


def test_an_instance_norm_with_its_own_statistics_goes_along_with_its_channels() -> None:
    norm = nn.InstanceNorm2d(12, affine=True, track_running_stats=True)
    net = nn.Sequential(nn.Conv2d(3, 12, 3), norm, nn.ReLU(), nn.Conv2d(12, 2, 1))
    model, example = with_lively_weights(net.eval()), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    spaces = fp.discover(model, example)
    small = check_cut(model, example, spaces, some_units(spaces, 0.5, 0))
    assert small[1].running_mean.shape == small[1].running_var.shape == (6,)  # for every sample the same


@pytest.mark.parametrize("kind", [nn.InstanceNorm2d, nn.BatchNorm2d])
def test_a_norm_without_tensors_knows_how_many_channels_it_has(kind: Callable[..., nn.Module]) -> None:
    norm = kind(12, affine=False, track_running_stats=False)
    net = nn.Sequential(nn.Conv2d(3, 12, 3), norm, nn.ReLU(), nn.Conv2d(12, 2, 1))
    model, example = with_lively_weights(net.eval()), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    small = check_cut(model, example, fp.discover(model, example), {"0": (0, 5, 7)})
    assert small[1].num_features == 9


class Positions(nn.Module):
    """A table of positions in a buffer, [batch, tokens] -> [batch, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 10), nn.Linear(10, 3)
        self.register_buffer("table", torch.randn(1, 16, 10))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head((self.embed(tokens) + self.table[:, : tokens.shape[1]]).relu().mean(1))


def test_a_table_of_positions_loses_columns_and_keeps_its_rows() -> None:
    model, tokens = with_lively_weights(Positions()), torch.arange(10).reshape(2, 5)
    spaces = fp.discover(model, tokens)
    assert [(s.tensor, s.dim) for s in spaces["embed"].slices if s.role == "carry"] == [("table", 2)]
    assert check_cut(model, tokens, spaces, {"embed": (0, 4, 9)}).table.shape == (1, 16, 7)


class Rotary(nn.Module):
    """Four heads turned by tables in buffers that all heads share, [batch, tokens, 8] -> same."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 48), nn.Linear(16, 8)
        self.register_buffer("cos", torch.randn(32, 4))
        self.register_buffer("sin", torch.randn(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, -1, 4).permute(2, 0, 3, 1, 4)
        q, k = (t * self.cos[:length] + t.roll(2, -1) * self.sin[:length] for t in (q, k))
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_tables_that_all_heads_share_stay() -> None:
    model, example = with_lively_weights(Rotary()), torch.randn(2, 5, 8, dtype=torch.float64)
    spaces = fp.discover(model, example)
    assert {s.name: (s.kind, s.size) for s in spaces} == {"qkv": ("head", 4)}
    assert not {s.tensor for s in spaces["qkv"].slices} & {"cos", "sin"}
    check_cut(model, example, spaces, {"qkv": (0, 3)})


def test_pruning_masks_of_torch_are_cut_with_their_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3))
    for layer in (model[0], model[2]):
        prune.random_unstructured(layer, "weight", amount=0.3)
    spaces = fp.discover(model, torch.randn(2, 4))
    assert {s.tensor for s in spaces["0"].slices} == {
        *("0.weight_orig", "0.weight_mask", "0.bias", "2.weight_orig", "2.weight_mask"),
    }
    plan = fp.Plan.removing(spaces, {"0": (1, 5)})
    x = torch.randn(2, 4)
    torch.testing.assert_close(fp.cut(model, plan)(x), fp.mask(model, plan)(x))


NORMS = {
    "weight_norm": (
        nn.utils.parametrizations.weight_norm,
        "parametrize.remove_parametrizations",
        parametrize.remove_parametrizations,
    ),
    "spectral_norm": (
        nn.utils.parametrizations.spectral_norm,
        "parametrize.remove_parametrizations",
        parametrize.remove_parametrizations,
    ),
    "hooked spectral_norm": (
        nn.utils.spectral_norm,
        "remove_spectral_norm",
        nn.utils.remove_spectral_norm,
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_normalised_weights_name_the_line_that_removes_them(name: str) -> None:
    norm, line, remove = NORMS[name]
    model = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), norm(nn.Linear(9, 8)), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(fp.FairprunerError) as refusal:
        fp.discover(model, torch.randn(2, 4))
    call = f"torch.nn.utils.{line}(model.get_submodule('2'), 'weight')"
    assert str(refusal.value).count(f"it is normalised in every forward pass; first call {call}") == 2
    remove(model.get_submodule("2"), "weight")
    assert fp.discover(model, torch.randn(2, 4)).names == ("0", "2")


class Standardised(nn.Conv2d):
    """A convolution whose weight has mean 0 and variance 1 over its inputs, as in NFNet and BiT."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        weight = nn.functional.batch_norm(rows, None, None, training=True).reshape_as(self.weight)
        return nn.functional.conv2d(x, weight, self.bias)


def test_standardised_weights_are_named_as_the_reason() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), Standardised(8, 6, 1), nn.ReLU(), nn.Conv2d(6, 2, 1))
    spaces = fp.discover(model, torch.randn(1, 3, 4, 4))
    assert spaces.names == ("2",)
    assert "standardised over its inputs in every forward pass" in spaces.left_out["0"]


def test_real_detection_backbones_are_no_longer_blocked() -> None:
    from torchvision.models import resnet18
    from torchvision.ops.misc import FrozenBatchNorm2d

    model = with_lively_weights(resnet18(norm_layer=FrozenBatchNorm2d))
    example = doubled(torch.randn(1, 3, 32, 32))
    spaces = fp.discover(model, example)
    assert len(spaces) == 12
    check_cut(model, example, spaces, some_units(spaces, 0.4, 0))
