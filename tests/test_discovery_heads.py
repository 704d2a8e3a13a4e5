"""Heads and parts whose number stands in an attribute of any name, or in the width of the input."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from checks import check_cut, difference, some_units, with_lively_weights
from torch import Tensor, nn

import fairpruner as fp
from fairpruner.models.narrow_heads import NarrowHeads


class Attention(nn.Module):
    """Attention whose sizes have the names of the caller's choice; `d` heads are as many as numbers in one,
    and `turns` equals the number of heads by chance.
    """

    def __init__(self, names: tuple[str, str], width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.names = names
        setattr(self, names[0], heads)
        setattr(self, names[1], width // heads)
        self.turns = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def heads(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.count(), self.each())).permute(2, 0, 3, 1, 4)
        for _ in range(self.turns - 3):
            x = (q @ k.mT / self.each() ** 0.5).softmax(-1) @ v
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.heads(x).transpose(1, 2).flatten(2))


class ByH(Attention):
    def count(self) -> int:
        return self.h

    def each(self) -> int:
        return self.d


class ByNh(Attention):
    def count(self) -> int:
        return self.nh

    def each(self) -> int:
        return self.dh


class ByHeadNum(Attention):
    def count(self) -> int:
        return self.head_num

    def each(self) -> int:
        return self.size_per_head


class Grouped(nn.Module):
    """A fused projection that the code divides at a width it holds; 4 query heads share 2 keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.asking, self.offering, self.each = 16, 8, 4
        self.fused, self.out = nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.fused(x).split([self.asking, self.offering, self.offering], -1)
        q, k, v = (part.unflatten(-1, (-1, self.each)).transpose(1, 2) for part in parts)
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        return self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


class ByWidth(nn.Module):
    """Code that takes the width of its heads, and their scale, from the width of its input."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv, self.proj = nn.Linear(16, 48, bias=False), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = (q @ k.mT * (C // self.num_heads) ** -0.5).softmax(-1) @ v
        return self.proj(attended.transpose(1, 2).reshape(B, N, C))


class Interleaved(ByWidth):
    """The first numbers of all heads come first in the output projection, then the second, as in NesT."""

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = (q @ k.mT).softmax(-1) @ v  # [batch, heads, tokens, width of one]
        return self.proj(attended.permute(0, 2, 3, 1).reshape(B, N, C))


class ByChannels(nn.Module):
    """The same over maps: [batch, channels, height, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.proj = nn.Conv2d(16, 48, 1), nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        q, k, v = self.qkv(x).view(B, self.num_heads, -1, H * W).chunk(3, 2)
        return self.proj((v @ (q.mT @ k).softmax(-1).mT).view(B, C, H, W))


class BiasForEachHead(nn.Module):
    """A parameter [heads, width of one] meets queries before anything shows which of them are one head."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.bias = 4, nn.Parameter(torch.randn(4, 4))
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)) for f in (self.q, self.k, self.v))
        q, k, v = ((q + self.bias).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


def around(block: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), block, nn.LayerNorm(16), nn.Linear(16, 3))


TOKENS = torch.randn(2, 5, 6, dtype=torch.float64)


@pytest.mark.parametrize(
    "block",
    [
        ByH(("h", "d")),
        ByNh(("nh", "dh")),
        ByHeadNum(("head_num", "size_per_head")),
        Grouped(),
        ByWidth(),
        Interleaved(),
        BiasForEachHead(),
    ],
    ids=lambda block: type(block).__name__,
)
def test_heads_are_found_whatever_their_number_is_called(block: nn.Module) -> None:
    model = with_lively_weights(around(block))
    spaces = fp.discover(model, TOKENS)
    (heads,) = [space for space in spaces if space.kind == "head"]
    assert heads.size == (2 if isinstance(block, Grouped) else 4)
    check_cut(model, TOKENS, spaces, some_units(spaces, 0.5, 0))


def test_heads_of_maps_are_found_too() -> None:
    model = with_lively_weights(nn.Sequential(nn.Conv2d(3, 16, 1), ByChannels(), nn.Conv2d(16, 2, 1)))
    example = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    spaces = fp.discover(model, example)
    assert [space.size for space in spaces if space.kind == "head"] == [4]
    check_cut(model, example, spaces, some_units(spaces, 0.5, 0))


def test_narrow_heads_are_copied_pickled_loaded_and_cut_again(tmp_path: Path) -> None:
    model = with_lively_weights(around(ByWidth()))
    spaces = fp.discover(model, TOKENS)
    plan = fp.Plan.removing(spaces, {"1.qkv": [2]})
    small = fp.cut(model, plan)
    assert isinstance(small[1], NarrowHeads)
    assert isinstance(small[1], ByWidth)
    assert type(model[1]) is ByWidth
    file = io.BytesIO()
    torch.save(small, file)
    file.seek(0)
    fp.save(small, plan, tmp_path / "small")
    for other in (
        copy.deepcopy(small),
        torch.load(file, weights_only=False),
        fp.load(tmp_path / "small", build=lambda: around(ByWidth()).double()),
    ):
        assert difference(small, other, TOKENS) == 0
    again = fp.discover(small, TOKENS)
    assert again["1.qkv"].size == 3
    smaller = check_cut(small, TOKENS, again, {"1.qkv": (0,)})
    both = fp.cut(model, fp.Plan.removing(spaces, {"1.qkv": [0, 2]}))
    assert difference(smaller, both, TOKENS) < 1e-12


def test_an_input_as_long_as_it_is_wide_changes_nothing() -> None:
    """Only the width of the input is said to be another, not a length that happens to be equal."""
    model = with_lively_weights(around(ByWidth()))
    plan = fp.Plan.removing(fp.discover(model, TOKENS), {"1.qkv": [1, 3]})
    for length in (16, 8, 3):
        example = torch.randn(3, length, 6, dtype=torch.float64)
        assert difference(fp.mask(model, plan), fp.cut(model, plan), example) < 1e-12


class ByWidthWithMask(ByWidth):
    """Takes a mask [batch, tokens, at least tokens], of which it uses as many keys as the mask has."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        keys = mask.shape[-1]
        attended = (q @ k.mT[..., :keys]).masked_fill(~mask[:, None], -1e4).softmax(-1) @ v[:, :, :keys]
        return self.proj(attended.transpose(1, 2).reshape(B, N, C))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention, self.last = nn.Linear(6, 16), ByWidthWithMask(), nn.Linear(16, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.last(self.attention(mask=mask, x=self.first(x)))


def test_a_mask_over_as_many_tokens_as_heads_are_wide_keeps_its_shape() -> None:
    model, masks = with_lively_weights(Masked()), {n: torch.ones(2, n, n).tril().bool() for n in (5, 16)}
    plan = fp.Plan.removing(fp.discover(model, (TOKENS, masks[5])), {"attention.qkv": [1, 3]})
    example = (torch.randn(2, 16, 6, dtype=torch.float64), masks[16])
    assert difference(fp.mask(model, plan), fp.cut(model, plan), example) < 1e-12


def test_a_model_with_narrow_heads_is_compiled_around_them_and_its_shallow_copy_stands_alone() -> None:
    model = around(ByWidth()).double()
    small = fp.cut(model, fp.Plan.removing(fp.discover(model, TOKENS), {"1.qkv": [2]}))
    assert torch.allclose(torch.compile(small, backend="eager")(TOKENS), small(TOKENS))
    twin = copy.copy(small[1])
    twin.num_heads = 1
    assert small[1].num_heads == 3


def test_heads_that_read_a_shared_configuration_shrink_alone(tmp_path: Path) -> None:
    """Phi-3 divides its fused projection by a number of the configuration that all blocks share."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Phi3Config(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        pad_token_id=0,
    )
    model = transformers.Phi3ForCausalLM(config).eval()
    example = {"input_ids": torch.randint(3, 90, (1, 6))}
    spaces = fp.discover(model, example)
    heads = [space.name for space in spaces if space.kind == "head"]
    assert len(heads) == 2
    plan = fp.Plan.removing(spaces, {heads[1]: [0]})
    small = fp.cut(model, plan)
    assert difference(fp.mask(model, plan), small, example) < 1e-5
    first, second = (layer.self_attn.config.num_attention_heads for layer in small.model.layers)
    assert (first, second, config.num_attention_heads) == (4, 2, 4)
    fp.save(small, plan, tmp_path / "small")
    assert difference(small, fp.load(tmp_path / "small"), example) < 1e-6
    remote = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small", trust_remote_code=True)
    assert difference(small, remote, example) < 1e-6


class SplitByAttribute(nn.Module):
    """A block that divides its channels at a number that it holds, as YOLO's attention blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.c = 6
        self.enter, self.inner = nn.Conv2d(3, 12, 1), nn.Conv2d(6, 6, 3, padding=1)
        self.leave = nn.Conv2d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.enter(x).split((self.c, self.c), 1)
        return self.leave(torch.cat([one, two + self.inner(two)], 1))


def test_parts_of_one_size_that_an_attribute_holds_are_coupled() -> None:
    model, example = with_lively_weights(SplitByAttribute()), torch.randn(1, 3, 8, 8, dtype=torch.float64)
    spaces = fp.discover(model, example)
    assert [(space.name, space.size) for space in spaces] == [("enter", 6)]
    small = check_cut(model, example, spaces, {"enter": (1, 4)})
    assert small.c == 4


class SlopeForEachHead(nn.Module):
    """Attention with ALiBi: the model computes a number for each head, and gives them to every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, scale: float, slopes: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, 4)).permute(2, 0, 3, 1, 4).flatten(1, 2)
        return self.out(
            ((scale * q @ k.mT + slopes).softmax(-1) @ v)
            .unflatten(0, (batch, self.num_heads))
            .transpose(1, 2)
            .reshape(batch, length, 4 * self.num_heads)
        )


class Sloped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
        self.layers = nn.ModuleList(SlopeForEachHead() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        slopes = torch.linspace(0.1, 2, 4, dtype=x.dtype)[:, None, None] * torch.arange(x.shape[1])
        slopes, x = slopes.repeat(x.shape[0], 1, 1), self.embed(x)  # [batch * heads, 1, length]
        for layer in self.layers:
            x = x + nn.functional.layer_norm(layer(x, 0.5, slopes=slopes), (16,))
        return self.head(x)


def test_an_argument_with_a_number_for_every_head_loses_those_of_removed_heads(tmp_path: Path) -> None:
    model = with_lively_weights(Sloped())
    spaces = fp.discover(model, TOKENS[:1])
    heads = [space.name for space in spaces if space.kind == "head"]
    assert [spaces[name].size for name in heads] == [4, 4]
    plan = fp.Plan.removing(spaces, {heads[0]: [1], heads[1]: [0, 2]})
    small = fp.cut(model, plan)
    for batch, length in ((1, 5), (2, 5), (4, 4), (3, 8)):
        example = torch.randn(batch, length, 6, dtype=torch.float64)
        assert difference(fp.mask(model, plan), small, example) < 1e-12
    fp.save(small, plan, tmp_path / "small")
    loaded = fp.load(tmp_path / "small", build=lambda: Sloped().double())
    assert difference(small, loaded, TOKENS) == 0
    again = fp.discover(small, TOKENS)
    assert [again[name].size for name in heads] == [3, 2]
    smaller = check_cut(small, TOKENS, again, {heads[0]: (0,)})
    both = fp.cut(model, fp.Plan.removing(spaces, {heads[0]: [0, 1], heads[1]: [0, 2]}))
    assert difference(smaller, both, TOKENS) < 1e-12


class HeadsOfTwoKinds(nn.Module):
    """Five heads of one projection: a convolution mixes the values of each of the first two with a kernel of
    its own, and another those of the last three.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.sizes = 5, [8, 12]
        self.qkv, self.proj = nn.Linear(20, 60), nn.Linear(20, 20)
        self.mix = nn.ModuleList(nn.Conv1d(n, n, 3, padding=1, groups=n) for n in self.sizes)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        parts = v.transpose(-1, -2).reshape(B, C, N).split(self.sizes, 1)
        v = torch.cat([mix(part) for mix, part in zip(self.mix, parts, strict=True)], 1)
        v = v.reshape(B, self.num_heads, C // self.num_heads, N).transpose(-1, -2)
        return self.proj(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).reshape(B, N, C))


def test_heads_of_one_projection_may_belong_to_several_spaces() -> None:
    model = nn.Sequential(nn.Linear(6, 20), HeadsOfTwoKinds(), nn.LayerNorm(20), nn.Linear(20, 3))
    model = with_lively_weights(model)
    spaces = fp.discover(model, TOKENS)
    assert [space.size for space in spaces if space.kind == "head"] == [2, 3]
    check_cut(model, TOKENS, spaces, some_units(spaces, 0.5, 0))


def test_groups_of_a_state_space_model_are_found() -> None:
    """Mamba2 counts heads, groups and two widths; the size of a state has the value of a count by chance."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Mamba2Config(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=1,
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=2,
        chunk_size=4,
    )
    torch.manual_seed(0)
    model = transformers.Mamba2ForCausalLM(config).eval()
    tokens = {"input_ids": torch.randint(0, 50, (2, 7))}
    spaces = fp.discover(model, tokens)
    assert [(space.name, space.size) for space in spaces] == [("backbone.layers.0.mixer.in_proj", 2)]
    plan = fp.Plan.removing(spaces, {"backbone.layers.0.mixer.in_proj": [0]})
    with torch.no_grad():
        torch.testing.assert_close(
            fp.cut(model, plan)(**tokens).logits, fp.mask(model, plan)(**tokens).logits, rtol=1e-5, atol=1e-6
        )
