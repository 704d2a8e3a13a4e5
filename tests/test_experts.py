"""Routed experts: found in every family, removed as if their logit were -inf, costed exactly, chosen
under any budget.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import IN_FLOAT64, check_cut, difference, outputs, some_units
from moe_zoo import (
    BLOCKS,
    EXPERTS,
    FAMILIES,
    FURTHER,
    Expert,
    PlainMoE,
    enliven,
    moe,
    plain_example,
    plain_moe,
    tokens,
)
from torch import nn
from torch.nn import functional as F

import fairpruner as fp
from fairpruner.core.tod import removal_order
from fairpruner.models.experts import SIZES, expert_blocks, plain_experts, unsupported_experts
from fairpruner.models.silencing import SilencedRows, silence

TOLERANCE = 1e-6  # several routers compute in float32, whatever the model's type
WITHOUT_HEADS = {
    "olmoe",
    "flex_olmo",
    "minimax_m2",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "mistral4",
}  # a norm over all heads, or latent attention


def held_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_removed_equals_masked_in_every_family(family: str) -> None:
    model, example = moe(family), tokens()
    spaces = fp.discover(model, example)
    kinds = [s.kind for s in spaces]
    assert kinds.count("expert") == BLOCKS
    assert kinds.count("hidden") >= BLOCKS  # those inside the experts, and of the shared ones
    assert ("head" in kinds) == (family not in WITHOUT_HEADS)
    experts = spaces.only(kinds=["expert"])
    deepest = {
        s.name: removal_order(np.arange(s.size)[::-1], s.groups)[: s.size - s.min_keep] for s in experts
    }
    for removed in (some_units(experts, 0.5, 0), deepest):
        small = check_cut(model, example, experts, removed, TOLERANCE)
        check_counts(small, experts, removed)
        assert fp.Plan.removing(experts, removed).predicted["bytes"] == held_bytes(small)
    check_cut(model, example, spaces, some_units(spaces, 0.4, 1), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("family", FURTHER)
def test_further_families(family: str) -> None:
    model, example = moe(family), tokens()
    spaces = fp.discover(model, example)
    assert [s.kind for s in spaces].count("expert") == BLOCKS
    check_cut(model, example, spaces, some_units(spaces, 0.4, 1), TOLERANCE)


def check_counts(small: nn.Module, spaces: fp.Spaces, removed: Mapping[str, Any]) -> None:
    """Every copy of the number of experts is the new one, and experts that are left are found again."""
    blocks = expert_blocks(small)
    assert [b.size for b in blocks] == [s.size - len(removed[s.name]) for s in spaces]
    for block in blocks:
        for path in (block.name, block.experts, block.router):
            module = small.get_submodule(path)
            assert {vars(module)[name] for name in SIZES if name in vars(module)} <= {block.size}, path
        assert 1 <= block.top_k <= block.size


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_list_of_experts_is_cut_by_dropping_modules(dtype: torch.dtype) -> None:
    model, example = plain_moe(dtype), plain_example(dtype)
    spaces = fp.discover(model, example)
    assert [(s.name, s.kind, s.size) for s in spaces] == [
        ("blocks.0", "expert", EXPERTS),
        ("blocks.0.experts.0.up", "hidden", 20),
        ("blocks.1", "expert", EXPERTS),
        ("blocks.1.experts.0.up", "hidden", 20),
    ]
    assert not any("no rule" in reason for reason in spaces.left_out.values())
    removed = {"blocks.0": (0, 3, 11), "blocks.1": (5,), "blocks.0.experts.0.up": (1, 2)}
    small = check_cut(model, example, spaces, removed, TOLERANCE)
    kept = [e for e in range(EXPERTS) if e not in removed["blocks.0"]]
    assert len(small.blocks[0].experts) == len(kept) == small.blocks[0].router.out_features
    for expert, number in zip(small.blocks[0].experts, kept, strict=True):
        assert torch.equal(expert.up.bias, model.blocks[0].experts[number].up.bias[[0, *range(3, 20)]])
        assert (expert.up.out_features, expert.down.in_features) == (18, 18)


def test_experts_that_the_example_never_reaches_are_cut_alike() -> None:
    """One token shows three experts of twelve: the hidden units of the others must go, and be masked,
    with theirs.
    """
    model = plain_moe()
    spaces = fp.discover(model, plain_example()[:1, :1])
    assert [s.kind for s in spaces] == ["expert", "hidden"] * BLOCKS
    plan = fp.Plan.removing(spaces, some_units(spaces, 0.5, 0))
    small = fp.cut(model, plan)
    assert difference(fp.mask(model, plan), small, plain_example()) < IN_FLOAT64
    assert fp.count_params(small) == plan.predicted["params"]


class Experts(nn.ModuleList):
    """A list that also computes, and knows its length."""

    def __init__(self, experts: nn.ModuleList) -> None:
        super().__init__(experts)
        self.num_experts = len(experts)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        shares = F.one_hot(chosen, self.num_experts).to(x.dtype) * weights[..., None]  # [tokens, k, E]
        return sum(expert(x) * shares[..., number].sum(1, keepdim=True) for number, expert in enumerate(self))


class ComputingList(PlainMoE):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts(self.experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.top_k, dim=-1)
        return x + self.experts(x, chosen, weights)


def test_a_list_that_computes_stays_what_it_is() -> None:
    model, example = (
        nn.Sequential(ComputingList(), nn.LayerNorm(16)).double(),
        torch.randn(7, 16, dtype=torch.float64),
    )
    spaces = fp.discover(model, example)
    assert [s.kind for s in spaces] == ["expert", "hidden"]
    small = check_cut(
        model, example, spaces, {"0": (1, 2, 10), "0.experts.0.up": (0, 19)}
    )  # every expert works on every token: its FLOPs go with it
    assert isinstance(small[0].experts, Experts)
    assert (len(small[0].experts), small[0].experts.num_experts) == (9, 9)


class ExpertChoice(PlainMoE):
    """Each expert takes the tokens that it has the highest scores for, as many as any other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(len(x) // 4, dim=0)
        for number, expert in enumerate(self.experts):
            rows = chosen[:, number]
            x = x.index_add(0, rows, expert(x[rows]) * weights[:, number, None])
        return x


def test_experts_that_choose_their_tokens_leave_with_their_flops() -> None:
    model, example = nn.Sequential(ExpertChoice(), nn.LayerNorm(16)), torch.randn(16, 16)
    spaces = fp.discover(model, example, kinds=["expert"])
    plan = fp.Plan.removing(spaces, {"0": (1, 2, 10)})
    small = fp.cut(model, plan)
    assert fp.count_flops(small, example) == plan.predicted["flops"] < plan.original["flops"]


def test_a_masked_model_can_be_copied_and_masked_again() -> None:
    model, example = moe("deepseek_v2"), tokens()
    spaces = fp.discover(model, example, kinds=["expert"])
    name = spaces.names[0]
    first, second, both = (
        fp.Plan.removing(spaces, {name: units}) for units in ((0, 6), (1, 7), (0, 6, 1, 7))
    )
    twice = copy.deepcopy(fp.mask(fp.mask(model, first), second))
    assert difference(twice, fp.mask(model, both), example) == 0
    assert difference(twice, fp.cut(model, both), example) < TOLERANCE


class OneMatrix(PlainMoE):
    """The router's weight as a bare parameter of the block, [width, E], and rows written with an index."""

    def __init__(self) -> None:
        super().__init__()
        del self.router
        self.w_gate = nn.Parameter(torch.randn(16, EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, 16)
        probabilities = (flat @ self.w_gate).softmax(-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == number)
            out[token] += expert(flat[token]) * weights[token, rank, None]
        return out.reshape(x.shape)


def test_a_block_that_is_the_model_itself_with_its_router_as_a_parameter() -> None:
    model, example = (
        OneMatrix().double(),
        torch.randn(1, 2, 16, dtype=torch.float64),
    )  # so few tokens that most experts get none
    spaces = fp.discover(model, example)
    assert [(s.name, s.kind) for s in spaces] == [("experts", "expert"), ("experts.0.up", "hidden")]
    assert expert_blocks(model)[0].router == ""
    small = check_cut(model, example, spaces, {"experts": (0, 7, 8), "experts.0.up": (4,)})
    assert small.w_gate.shape == (16, 9)


def test_gpt_oss_interleaves_gate_and_up() -> None:
    model = moe("gpt_oss")
    spaces = fp.discover(model, tokens(), kinds=["hidden"])
    small = fp.cut(model, fp.Plan.removing(spaces, {"model.layers.0.mlp.experts": (0, 5)}))
    before, after = (m.model.layers[0].mlp.experts for m in (model, small))
    stay = [j for j in range(24) if j not in (0, 5)]
    pairs = [2 * j + side for j in stay for side in (0, 1)]
    assert torch.equal(after.gate_up_proj, before.gate_up_proj[:, :, pairs])
    assert torch.equal(after.gate_up_proj_bias, before.gate_up_proj_bias[:, pairs])
    assert torch.equal(after.down_proj, before.down_proj[:, stay])
    assert torch.equal(after.down_proj_bias, before.down_proj_bias)


@pytest.mark.parametrize(
    "family", ["qwen2_moe", "deepseek_v3", "ernie4_5_moe", "lfm2_moe", "gpt_oss", "phimoe", "gemma4"]
)
def test_a_masked_model_chooses_only_kept_experts(family: str) -> None:
    """Also where a correction bias is added after the logits have become probabilities."""
    model, example = moe(family), tokens(17)
    spaces = fp.discover(model, example, kinds=["expert"])
    removed = some_units(spaces, 0.5, 3)
    masked, chosen = fp.mask(model, fp.Plan.removing(spaces, removed)), []
    for block in expert_blocks(model):
        masked.get_submodule(block.experts).register_forward_pre_hook(lambda _, args: chosen.append(args[1]))
    assert all(t.isfinite().all() for t in outputs(masked, example))
    for units, block in zip(chosen, expert_blocks(model), strict=True):
        assert not np.isin(units.numpy(), removed[block.name]).any()
    assert [p.shape for p in masked.parameters()] == [p.shape for p in model.parameters()]


def test_a_zeroed_expert_is_not_a_removed_one() -> None:
    model, example = moe("mixtral"), tokens()
    spaces = fp.discover(model, example, kinds=["expert"])
    removed = some_units(spaces, 0.5, 0)
    zeroed = copy.deepcopy(model)
    with torch.no_grad():
        for block in expert_blocks(model):
            zeroed.get_submodule(block.experts).down_proj[list(removed[block.name])] = 0
    assert difference(zeroed, fp.cut(model, fp.Plan.removing(spaces, removed)), example) > 1e-2


def test_all_backends_agree_on_a_cut_model() -> None:
    model, example = moe("qwen3_moe", torch.float32), tokens()
    spaces = fp.discover(model, example, kinds=["expert"])
    small = fp.cut(
        model, fp.Plan.removing(spaces, {"model.layers.0.mlp": (0, 4, 9), "model.layers.1.mlp": (11,)})
    )
    for backend in ("grouped_mm", "batched_mm"):
        other = copy.deepcopy(small)
        other.set_experts_implementation(backend)
        assert difference(small, other, example) < 1e-5


def test_discover_leaves_the_model_as_it_was() -> None:
    model = moe("deepseek_v3", torch.float32)
    model.set_experts_implementation("grouped_mm")
    state, classes = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    spaces = fp.discover(model, tokens())
    assert model.config._experts_implementation == "grouped_mm"
    assert [type(m) for m in model.modules()] == classes
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    with pytest.raises(fp.FairprunerError, match="does not fit the model"):
        fp.discover(model, {"input_ids": torch.randn(2, 3)})
    assert model.config._experts_implementation == "grouped_mm"
    small = fp.cut(model, fp.Plan.removing(spaces, some_units(spaces, 0.5, 0)))
    assert small.config._experts_implementation == "grouped_mm"
    flops = fp.count_flops(model, tokens())
    with plain_experts(model):
        assert fp.count_flops(model, tokens()) == flops == fp.Plan.removing(spaces, {}).original["flops"]


def test_a_list_of_layers_is_no_block_of_experts() -> None:
    net = nn.Module()
    net.k, net.layers, net.head = 2, nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 3)
    assert expert_blocks(net) == ()
    assert unsupported_experts(net) == {}


# Break the adapter in one place: verification must leave the block out, not give a wrong cut.
CROOKED = {
    "the correction bias stays": ("deepseek_v3", lambda s: not s.tensor.endswith("e_score_correction_bias")),
    "the scales of experts stay": ("gemma4", lambda s: not s.tensor.endswith("per_expert_scale")),
    "the down projections stay": ("mixtral", lambda s: not s.tensor.endswith("down_proj")),
    "the router's bias stays": ("gpt_oss", lambda s: not s.tensor.endswith("router.bias")),
    "an expert's bias stays": ("gpt_oss", lambda s: not s.tensor.endswith("down_proj_bias")),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", CROOKED)
def test_a_wrong_space_of_experts_would_be_caught(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import fairpruner.discovery as discovery

    family, stays = CROOKED[what]
    honest = discovery.expert_space

    def crooked(*args: Any) -> fp.UnitSpace:
        space = honest(*args)
        return replace(space, slices=tuple(s for s in space.slices if stays(s)))

    monkeypatch.setattr(discovery, "expert_space", crooked)
    model = moe(family)
    spaces = fp.discover(model, tokens(), kinds=["expert", "hidden"])
    assert "expert" not in {s.kind for s in spaces}
    assert all(
        "cannot run" in spaces.left_out[b.name] or "differ" in spaces.left_out[b.name]
        for b in expert_blocks(model)
    )


def test_wide_experts_are_not_too_faint_to_be_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack of matrices is no convolution: with weights drawn as for one, what experts add would drown
    in rounding.
    """
    import fairpruner.discovery as discovery

    honest = discovery.expert_space

    def crooked(*args: Any) -> fp.UnitSpace:
        space = honest(*args)
        return replace(space, slices=tuple(s for s in space.slices if not s.tensor.endswith("down_proj")))

    monkeypatch.setattr(discovery, "expert_space", crooked)
    model = moe("mixtral", torch.float32, hidden_size=256, intermediate_size=512)
    assert "expert" not in {s.kind for s in fp.discover(model, tokens(), kinds=["expert", "hidden"])}


class MatricesApart(nn.Module):
    """Experts whose two stacks lie in modules of their own."""

    class Stack(nn.Module):
        def __init__(self, *shape: int) -> None:
            super().__init__()
            self.num_experts, self.weight = shape[0], nn.Parameter(torch.randn(shape) / 4)

    def __init__(self) -> None:
        super().__init__()
        self.top_k, self.router = 2, nn.Linear(8, 4)
        self.up, self.down = self.Stack(4, 12, 8), self.Stack(4, 8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.top_k)
        every = torch.einsum(
            "nei,ehi->neh", torch.einsum("nw,eiw->nei", x, self.up.weight).relu(), self.down.weight
        )
        return x + (every.gather(1, chosen[..., None].expand(-1, -1, 8)) * weights[..., None]).sum(1)


def test_what_is_not_supported_says_so() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), MatricesApart())
    spaces = fp.discover(net, torch.randn(5, 8))
    assert spaces.names == ("0",)
    assert (
        "has a number of experts, but no nn.ModuleList of equal modules or module with parameters"
        " [experts, …]" in spaces.left_out["3"]
    )


class Stacks(nn.Module):
    """Experts as matrices of the block itself, which says how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.router = 4, 2, nn.Linear(8, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 12) / 4), nn.Parameter(torch.randn(4, 12, 8) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.top_k)
        shares = torch.zeros(len(x), 4).scatter(1, chosen, weights)
        return x + torch.einsum(
            "neh,ehw,ne->nw", torch.einsum("nw,ewh->neh", x, self.up).relu(), self.down, shares
        )


def named_experts() -> nn.Module:
    block = PlainMoE(width=8, hidden=12, experts=4, top_k=2)
    block.experts = nn.ModuleDict({str(number): expert for number, expert in enumerate(block.experts)})
    block.forward = lambda x: x  # what it computes does not matter here
    return block


def odd_experts() -> nn.Module:
    block = PlainMoE(width=8, hidden=12, experts=4, top_k=2)
    block.experts[2] = Expert(8, 10)
    return block


class Unrouted(nn.Module):
    """Sums all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert(8, 12) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(expert(x) for expert in self.experts)  # type: ignore[return-value]


NO_BLOCK = {
    Stacks: "has a number of experts, but no nn.ModuleList",
    named_experts: "its 4 experts are an nn.ModuleDict, expected nn.ModuleList",
    odd_experts: "its 4 experts differ in their parameters, expected equal ones",
    Unrouted: "no matrix beside its 4 experts has a row for each",
}


@pytest.mark.parametrize("make", NO_BLOCK)
def test_what_is_no_block_says_what_was_found(make: Any) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), make())
    spaces = fp.discover(net, torch.randn(1, 5, 8) if make is not Stacks else torch.randn(5, 8))
    assert "0" in spaces.names
    assert "expert" not in {s.kind for s in spaces}
    assert NO_BLOCK[make] in spaces.left_out["3"]


def test_a_token_that_uses_every_expert_leaves_none_to_remove() -> None:
    net = nn.Sequential(PlainMoE(top_k=EXPERTS), nn.Linear(16, 16))
    spaces = fp.discover(net, torch.randn(1, 4, 16))
    assert spaces.left_out["0"] == "routing needs all of its 12 experts"
    assert "expert" not in {s.kind for s in spaces}


class Best(PlainMoE):
    """The best expert alone, as in Switch, or the best two: a number that only the code knows."""

    def __init__(self, used: int) -> None:
        super().__init__(experts=6)
        self.used = used
        del self.top_k

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, 16)
        weights, chosen = self.router(flat).softmax(-1).topk(self.used)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == number)
            out[token] += expert(flat[token]) * weights[token, rank, None]
        return out.reshape(x.shape)


@pytest.mark.parametrize("used", [1, 2, 6])
def test_how_many_experts_a_token_uses_may_be_known_to_the_code_alone(used: int) -> None:
    net, example = (
        nn.Sequential(Best(used), nn.Linear(16, 4)).double(),
        torch.randn(1, 9, 16, dtype=torch.float64),
    )
    assert expert_blocks(net)[0].top_k is None
    spaces = fp.discover(net, example)
    if used == 6:
        assert spaces.left_out["0"] == "routing needs all of its 6 experts"
        return
    assert [(s.name, s.kind, s.min_keep) for s in spaces] == [
        ("0", "expert", used),
        ("0.experts.0.up", "hidden", 1),
    ]
    check_cut(net, example, spaces, {"0": tuple(range(used, 6)), "0.experts.0.up": (3,)})


class ManyGates(nn.Module):
    """Experts shared by two tasks, with a gate for each."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert(16, 6) for _ in range(4))
        self.gates = nn.ModuleList(nn.Linear(16, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        every = torch.stack([expert(x) for expert in self.experts], -1)  # [N, 16, E]
        return torch.cat([(every * gate(x).softmax(-1)[:, None]).sum(-1) for gate in self.gates], 1)


def test_experts_go_from_all_gates() -> None:
    net = nn.Sequential(ManyGates(), nn.Linear(32, 4)).double()
    spaces = fp.discover(net, torch.randn(3, 16).double())
    small = check_cut(net, torch.randn(3, 16).double(), spaces, {"0": (1, 3), "0.experts.0.up": (2,)})
    assert [gate.out_features for gate in small[0].gates] == [2, 2]


class OneByOne(PlainMoE):
    """Experts without biases, called on one token after the other: products with vectors."""

    def __init__(self) -> None:
        super().__init__(experts=4, top_k=2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 6, bias=False), nn.ReLU(), nn.Linear(6, 16, bias=False))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.top_k)
        return torch.stack(
            [
                sum(w * self.experts[e](t) for e, w in zip(c, ws, strict=True))
                for t, c, ws in zip(x, chosen, weights, strict=True)
            ]
        )


def test_experts_called_on_single_tokens() -> None:
    model, example = (
        nn.Sequential(OneByOne(), nn.LayerNorm(16)).double(),
        torch.randn(7, 16, dtype=torch.float64),
    )
    spaces = fp.discover(model, example)
    assert [(s.name, s.kind) for s in spaces] == [("0", "expert"), ("0.experts.0.0", "hidden")]
    small = check_cut(model, example, spaces, {"0": (1, 2), "0.experts.0.0": (0, 5)})
    plan = fp.Plan.removing(spaces, {"0": (1, 2), "0.experts.0.0": (0, 5)})
    assert (
        difference(
            small,
            fp.repair(fp.cut(model, plan), model, plan, [(example, torch.arange(7))], method="mean"),
            example,
        )
        == 0
    )


class StackedExperts(nn.Module):
    """All experts at once, [N, width] -> [N, E, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(6, 8, 12) / 3), nn.Parameter(torch.randn(6, 12, 8) / 3)
        self.bias = nn.Parameter(torch.randn(6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            torch.einsum("neh,ehw->new", torch.einsum("nw,ewh->neh", x, self.up).relu(), self.down)
            + self.bias
        )


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 6), StackedExperts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        return x + (self.experts(x).gather(1, chosen[..., None].expand(-1, -1, 8)) * weights[..., None]).sum(
            1
        )


def test_stacked_experts_are_scored_without_a_look_at_their_routing() -> None:
    model, data = (
        nn.Sequential(Stacked(), nn.Linear(8, 3)).double(),
        [(torch.randn(9, 8).double(), torch.arange(9) % 3)] * 2,
    )
    spaces = fp.discover(model, data[0][0])
    assert [(s.name, s.kind, s.min_keep) for s in spaces] == [("0", "expert", 2)]
    with pytest.raises(
        fp.FairprunerError,
        match=r"calls its StackedExperts in a way that is not known.*removal='l2' and protection='deletion'",
    ):
        fp.score(model, data, spaces=spaces)
    plan = fp.allocate(
        fp.score(model, data, spaces=spaces, removal="l2", protection="deletion"),
        keep=fp.Budget("experts", 0.5),
        exact=True,
    )
    assert difference(fp.cut(model, plan), fp.mask(model, plan), data[0][0]) < TOLERANCE


def test_a_cut_list_with_narrower_experts_is_saved_and_loaded(tmp_path: Path) -> None:
    model, example = plain_moe(), plain_example()
    spaces = fp.discover(model, example)
    plan = fp.Plan.removing(
        spaces, {"blocks.0": (0, 3), "blocks.0.experts.0.up": (1, 2), "blocks.1.experts.0.up": (7,)}
    )
    small = fp.cut(model, plan)
    fp.save(small, plan, tmp_path / "small")
    assert difference(small, fp.load(tmp_path / "small", build=plain_moe), example) == 0
    with pytest.raises(
        fp.FairprunerError, match=r"blocks\.0\.experts has the shape \[12\], and the plan keeps 10"
    ):
        fp.save(model, plan, tmp_path / "wrong")


@pytest.mark.parametrize("method", ["mean", "least_squares", "sequential"])
def test_repair_by_position_leaves_listed_experts_alone(method: str) -> None:
    """Those that stay have moved up, and the tokens they are called on are others in each model."""
    model, example = plain_moe(), plain_example()
    plan = fp.Plan.removing(
        fp.discover(model, example), {"blocks.0": (0, 3), "blocks.0.experts.0.up": (1, 2)}
    )
    small, data = fp.cut(model, plan), [(example, model(example).detach())]
    again, notes = fp.repair_with_notes(small, model, plan, data, method=method, loss=F.mse_loss)
    assert difference(small, again, example) == 0
    assert notes
    assert all("'merge' can repair those" in note.reason for note in notes)


def test_silenced_rows_stay_silent_through_casts_copies_and_products() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(5, 3), torch.randn(4, 3)
    silenced = torch.tensor([False, True, False, False, True])
    rows = nn.Parameter(silence(weight, silenced))
    expected = F.linear(x, weight).masked_fill(silenced, -math.inf)
    for form in (
        rows,
        copy.deepcopy(rows),
        rows.float(),
        rows.double().float(),
        rows.detach().clone(),
        rows.data,
    ):
        assert isinstance(form, SilencedRows)
        for logits in (
            F.linear(x, form),
            x @ form.T,
            x @ form.t(),
            torch.einsum("nw,ew->ne", x, form),
            torch.matmul(x, form.transpose(0, 1)),
        ):
            assert type(logits) is torch.Tensor
            torch.testing.assert_close(logits, expected)  # a processor may sum in another order
    assert isinstance(rows, nn.Parameter)
    assert rows.requires_grad
    module = nn.Linear(3, 5, bias=False)
    module.weight = rows
    assert torch.equal(module.double()(x.double()) == -math.inf, silenced.expand(4, 5))
    again = silence(rows, torch.tensor([True, False, False, False, False]))
    assert again.silenced.tolist() == [True, True, False, False, True]
    assert type(rows.sum()) is torch.Tensor
    F.linear(x.double(), rows).masked_fill(silenced, 0.0).sum().backward()
    assert torch.equal(rows.grad[silenced], torch.zeros(2, 3, dtype=torch.float64))


def test_an_uneven_cut_can_be_cut_again() -> None:
    model, example = enliven(moe("glm4_moe")), tokens()
    for _ in range(2):
        spaces = fp.discover(model, example)
        model = check_cut(model, example, spaces, some_units(spaces, 0.3, 5), TOLERANCE)
    assert [b.size for b in expert_blocks(model)] == [8, 8]
