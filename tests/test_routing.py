"""Signals for routed experts: against autograd, hand-computed numbers, and themselves on the same tokens
in other batches.
"""

from __future__ import annotations

import copy
import math
import warnings
from contextlib import nullcontext
from typing import Any

import moe_zoo
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fairpruner as fp
from fairpruner.core.spaces import Spaces
from fairpruner.models.experts import expert_blocks
from fairpruner.models.narrowing import mask_units
from fairpruner.models.routing import RouterOutput, gates_of, probabilities, slopes_of, watching_experts
from fairpruner.scoring.signals import BatchInfo, Context
from fairpruner.scoring.signals.routing import SOFT_ACTIVATION

FAMILIES = (
    "qwen2_moe",
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "phimoe",
    "granitemoe",
    "glm4_moe",
    "ernie4_5_moe",
)
MORE = (
    "jamba",
    "hunyuan_v1_moe",
    "dots1",
    "llama4",
    "minimax_m2",
    "aria_text",
    "gemma4",
    "afmoe",
    "mistral4",
)
REMOVAL = ("soft_activation", "soft_activation_all", "frequency", "reap")


@pytest.fixture(scope="module")
def qwen() -> nn.Module:
    return moe_zoo.moe("qwen2_moe")


@pytest.fixture(scope="module")
def spaces(qwen: nn.Module) -> Spaces:
    return fp.discover(qwen, moe_zoo.tokens())


@pytest.fixture(scope="module")
def experts(spaces: Spaces) -> Spaces:
    return spaces.only(["expert"])


def texts(*lengths: int, seed: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 90, (length,), generator=generator) for length in lengths]


def padded(rows: list[Tensor], side: str) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)
    mask = nn.utils.rnn.pad_sequence(
        [torch.ones_like(row) for row in rows], batch_first=True, padding_side=side
    )
    return {"input_ids": ids, "attention_mask": mask}


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Of every position but the last, [N, T - 1]."""
    return F.cross_entropy(model(input_ids=ids).logits[:, :-1].movedim(2, 1), ids[:, 1:], reduction="none")


def assert_same(one: fp.Scores, other: fp.Scores, tolerance: float = 1e-6) -> None:
    # Routers and norms compute in float32, whatever the model's type.
    for ours, theirs in ((one.removals, other.removals), (one.protections, other.protections)):
        for signal, by_space in ours.items():
            for name, values in by_space.items():
                np.testing.assert_allclose(
                    theirs[signal][name],
                    values,
                    rtol=tolerance,
                    atol=tolerance * np.abs(values).max(),
                    err_msg=f"{signal} of {name}",
                )


# --- The one-backward identity ---


def weights_of(model: nn.Module, path: str) -> list[list[Tensor]]:
    """The parameters of each expert."""
    module = model.get_submodule(path)
    if isinstance(module, nn.ModuleList):
        return [list(expert.parameters()) for expert in module]
    return [list(rows) for rows in zip(*module.parameters(), strict=True)]


def products(model: nn.Module, path: str, loss: Tensor) -> Tensor:
    """<gradient, weights> of each expert by autograd, [E]."""
    module = model.get_submodule(path)
    found = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True, allow_unused=True)
    grads = {
        id(p): torch.zeros_like(p) if g is None else g
        for p, g in zip(module.parameters(), found, strict=True)
    }
    if isinstance(module, nn.ModuleList):
        return torch.stack([sum((grads[id(p)] * p).sum() for p in expert.parameters()) for expert in module])
    return sum((grads[id(p)] * p).flatten(1).sum(1) for p in module.parameters())


def calls_of(model: nn.Module, run: Any) -> tuple[list[RouterOutput], Any]:
    calls: list[RouterOutput] = []
    with torch.enable_grad(), watching_experts(model, expert_blocks(model), calls.append):
        return calls, run()


@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_terms_of_all_pairs_are_gradient_times_weights(family: str) -> None:
    model, ids = moe_zoo.moe(family), moe_zoo.tokens()["input_ids"]
    plain = next_token_loss(model, ids).mean()
    calls, watched = calls_of(model, lambda: next_token_loss(model, ids).mean())
    assert torch.allclose(plain, watched, rtol=1e-12)
    assert [call.block.name for call in calls] == [block.name for block in expert_blocks(model)]
    slopes = slopes_of(calls, torch.autograd.grad(watched, gates_of(calls)))
    for call, terms in zip(calls, slopes, strict=True):
        exact = products(model, call.block.experts, plain)
        assert (call.by_expert(terms) - exact).abs().max() <= 1e-9 * exact.abs().max()
        assert call.logits is not None
        selected = call.tally(torch.ones(call.tokens, dtype=torch.bool))["selected"]
        assert selected.sum() == call.tokens * call.block.top_k


@pytest.mark.parametrize("inplace", [False, True])
def test_terms_of_listed_experts(inplace: bool) -> None:
    model, x = moe_zoo.plain_moe(), moe_zoo.plain_example()
    if inplace:  # activations that overwrite what the hooks have seen
        for block in model.blocks:
            for position in range(len(block.experts)):
                block.experts[position] = nn.Sequential(
                    nn.Linear(16, 8), nn.ReLU(inplace=True), nn.LayerNorm(8), nn.Linear(8, 16)
                ).double()
    calls, watched = calls_of(model, lambda: model(x).square().mean())
    slopes = slopes_of(calls, torch.autograd.grad(watched, gates_of(calls)))
    for call, terms in zip(calls, slopes, strict=True):
        exact = products(model, call.block.experts, model(x).square().mean())
        assert (call.by_expert(terms) - exact).abs().max() <= 1e-9 * exact.abs().max()


def test_use_position_weighting_against_a_copy_of_the_expert_for_every_pair() -> None:
    """Each pair of a token and an expert gets weights of its own, so that autograd tells their parts
    apart.
    """
    model = moe_zoo.PlainMoE(width=4, hidden=5, experts=4, top_k=2).double()
    x, target = (torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(s)).double() for s in (1, 2))
    weights, chosen = model.router(x[0]).topk(2, dim=-1)
    weights = weights.softmax(-1)
    copies = {
        (t, k): {
            n: p.detach().clone().requires_grad_()
            for n, p in model.experts[int(chosen[t, k])].named_parameters()
        }
        for t in range(6)
        for k in range(2)
    }
    rows = [
        sum(
            weights[t, k] * torch.func.functional_call(model.experts[0], copies[t, k], (x[0, t],))
            for k in range(2)
        )
        for t in range(6)
    ]
    F.mse_loss(torch.stack(rows), target[0]).backward()
    expected = np.zeros(4)
    for (t, k), own in copies.items():
        expected[int(chosen[t, k])] += float(weights[t, k].detach()) * float(
            sum((p.grad * p.detach()).sum() for p in own.values())
        )
    net = nn.Sequential(model)
    found = fp.discover(net, x, kinds=["expert"])
    scores = fp.score(net, [(x, target)], spaces=found, loss=F.mse_loss, protection="routed_taylor")
    np.testing.assert_allclose(scores.protection["0"], np.abs(expected), rtol=1e-9)


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_exact_version_weights_by_the_token_of_the_loss(family: str) -> None:
    model, ids = moe_zoo.moe(family), moe_zoo.tokens(7)["input_ids"]
    calls, _ = calls_of(model, lambda: next_token_loss(model, ids))
    expected = {}
    for call in calls:
        used = call.by_group(call.weight, call.token, call.tokens).view(*ids.shape, -1)  # [N, T, E]
        terms = [
            used[n, t] * products(model, call.block.experts, next_token_loss(model, ids[n : n + 1])[0, t])
            for n in range(2)
            for t in range(6)
        ]
        expected[call.block.name] = torch.stack(terms).mean(0).abs().detach().numpy()
    found = fp.discover(model, {"input_ids": ids}, kinds=["expert"])
    scores = fp.score(
        model, [{"input_ids": ids}] * 2, spaces=found, protection=["routed_taylor_exact", "routed_taylor"]
    )
    for name, values in expected.items():
        np.testing.assert_allclose(scores.protection[name], values, rtol=1e-8, atol=1e-12)


# --- Routing statistics ---


def hand_made() -> nn.Module:
    """Expert e gives (e + 1, 0, 0, 0) for every token, and the logits are the token itself."""
    block = moe_zoo.PlainMoE(width=4, hidden=3, experts=4, top_k=2)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
        block.router.weight.copy_(torch.eye(4))
        for number, expert in enumerate(block.experts):
            expert.down.bias[0] = number + 1.0
    return nn.Sequential(block)


def test_hand_computed_routing() -> None:
    net, x = hand_made(), torch.tensor([[[2.0, 1.0, 0.0, -1.0], [0.0, 3.0, 1.0, -1.0]]])
    found = fp.discover(net, torch.randn(1, 5, 4), kinds=["expert"])
    scores = fp.score(net, [(x, torch.zeros(1, 2, 4))], spaces=found, loss=F.mse_loss, removal=REMOVAL)
    first, second = (
        1 / (1 + math.exp(-1)),
        1 / (1 + math.exp(-2)),
    )  # of the better of the two experts, for each token
    expected = {
        "frequency": [0.5, 1.0, 0.5, 0.0],
        "soft_activation": [first / 2, (1 - first + second) / 2, (1 - second) / 2, 0.0],
        "soft_activation_all": x[0].softmax(1).mean(0).tolist(),
        "reap": [first, 2 * (1 - first + second) / 2, 3 * (1 - second), 0.0],
    }
    for signal, values in expected.items():
        np.testing.assert_allclose(scores.removals[signal]["0"], values, rtol=1e-6, err_msg=signal)


def test_reap_of_fused_experts(qwen: nn.Module, experts: Spaces) -> None:
    calls, _ = calls_of(qwen, lambda: qwen(**moe_zoo.tokens()))
    seen: list[Tensor] = []
    hook = qwen.model.layers[0].mlp.experts.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].detach())
    )
    qwen(**moe_zoo.tokens())
    hook.remove()
    module, (hidden,), call = qwen.model.layers[0].mlp.experts, seen, calls[0]
    sums, counts = np.zeros(12), np.zeros(12)
    for token, e, weight in zip(call.token.tolist(), call.expert.tolist(), call.weight.tolist(), strict=True):
        gate, up = (module.gate_up_proj[e] @ hidden[token]).chunk(2)
        sums[e] += weight * float((module.down_proj[e] @ (F.silu(gate) * up)).detach().norm())
        counts[e] += 1
    scores = fp.score(qwen, [moe_zoo.tokens()], spaces=experts, removal="reap")
    np.testing.assert_allclose(scores.removal[experts[0].name], sums / np.maximum(counts, 1), rtol=1e-9)


def test_dense_blocks_show_the_same_routing() -> None:
    """All experts on all tokens, weights of zero for those not chosen."""
    sparse = hand_made()

    dense = nn.Sequential(Dense(width=4, hidden=3, experts=4, top_k=2))
    dense.load_state_dict(sparse.state_dict())
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    tallies = []
    for net in (sparse, dense):
        calls, _ = calls_of(net, lambda net=net: net(x))
        tallies.append(calls[0].tally(torch.ones(15, dtype=torch.bool)))
    for quantity, values in tallies[0].items():
        torch.testing.assert_close(tallies[1][quantity], values, rtol=1e-5, atol=1e-6)


def test_probabilities_are_not_normalised_twice() -> None:
    logits = torch.randn(5, 4)
    torch.testing.assert_close(probabilities(logits.softmax(1)), probabilities(logits))


# --- The same tokens in other batches ---


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(qwen: nn.Module, experts: Spaces, side: str) -> None:
    rows = texts(9, 6, 4, 8)
    alone = fp.score(qwen, [{"input_ids": row[None]} for row in rows], spaces=experts, removal=REMOVAL)
    together = fp.score(
        qwen, [padded(rows[:2], side), padded(rows[2:], side)], spaces=experts, removal=REMOVAL
    )
    assert_same(alone, together)


def test_unscored_tokens_do_not_count(qwen: nn.Module, experts: Spaces) -> None:
    row = texts(9)[0][None]
    labels = row.clone()
    labels[:, 5:] = -100
    masked = fp.score(qwen, [{"input_ids": row, "labels": labels}], spaces=experts, removal=REMOVAL)
    assert_same(masked, fp.score(qwen, [{"input_ids": row[:, :5]}], spaces=experts, removal=REMOVAL))


def test_packed_texts_are_scored_like_single_ones(qwen: nn.Module, experts: Spaces) -> None:
    rows = texts(7, 5)
    labels = [torch.cat([torch.tensor([-100]), row[1:]]) for row in rows]
    alone = [{"input_ids": row[None], "labels": own[None]} for row, own in zip(rows, labels, strict=True)]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    packed = [
        {
            "input_ids": torch.cat(rows)[None],
            "position_ids": positions,
            "use_cache": False,
            "labels": torch.cat(labels)[None],
        }
    ]
    assert_same(
        fp.score(qwen, alone, spaces=experts, removal=REMOVAL),
        fp.score(qwen, packed, spaces=experts, removal=REMOVAL),
    )


def test_batch_size_does_not_matter(qwen: nn.Module, experts: Spaces) -> None:
    ids = torch.stack(texts(*[6] * 8))
    whole, parts = ([{"input_ids": part} for part in ids.split(size)] for size in (8, 2))
    assert_same(
        fp.score(qwen, whole, spaces=experts, removal=REMOVAL),
        fp.score(qwen, parts, spaces=experts, removal=REMOVAL),
    )


def test_halves_are_the_scores_of_the_halves(qwen: nn.Module, experts: Spaces) -> None:
    ids = torch.stack(texts(*[6] * 4))
    data = [{"input_ids": part} for part in ids.split(2)]
    both = fp.score(qwen, data, spaces=experts)
    single = [fp.score(qwen, [batch], spaces=experts) for batch in data]
    for signal, own in (
        (both.active[0], [s.removal for s in single]),
        (both.active[1], [s.protection for s in single]),
    ):
        for name, halves in both.halves[signal].items():
            np.testing.assert_allclose(halves, [values[name] for values in own], rtol=1e-9)


def test_processes_join(qwen: nn.Module, experts: Spaces) -> None:
    """Two accumulators that saw half each, joined, read what one reads that saw all."""
    tally = {s.name: {"weight": torch.rand(s.size).double(), "tokens": torch.tensor([9.0])} for s in experts}
    other = {s.name: {"weight": torch.rand(s.size).double(), "tokens": torch.tensor([5.0])} for s in experts}
    context = Context(qwen, experts, "removal", 1, 0)
    alone, here, there = (SOFT_ACTIVATION.start(context) for _ in range(3))
    for accumulator, tallies, half in (
        (alone, tally, 0),
        (alone, other, 1),
        (here, tally, 0),
        (there, other, 1),
    ):
        accumulator.see_routing(tallies, BatchInfo(4, half))

    class Two:
        size = 2

        def gathered(self, value: Any) -> list[Any]:
            return [value, (there._means._sums, there._means._counts)]

    here.join(Two())
    for name, values in alone.result().scores.items():
        np.testing.assert_array_equal(here.result().scores[name], values)


# --- The model stays as it is ---


def test_the_model_is_left_as_it_was(qwen: nn.Module, experts: Spaces) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    state = {name: tensor.clone() for name, tensor in qwen.state_dict().items()}
    qwen.model.layers[0].mlp.gate.weight.requires_grad_(False)
    random = torch.random.get_rng_state()

    def failing(output: Any, labels: Tensor) -> Tensor:
        raise ValueError("no loss today")

    told = pytest.raises(fp.FairprunerError, match=r"The loss failed on batch 0.*no loss today")
    for loss, outcome in ((None, nullcontext()), (failing, told)):
        with outcome:
            fp.score(qwen, [moe_zoo.tokens()], spaces=experts, loss=loss)
        assert qwen.config._experts_implementation == "eager"
        assert "fairpruner" not in ALL_EXPERTS_FUNCTIONS
        assert torch.equal(torch.random.get_rng_state(), random)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in qwen.modules())
        assert all(p.grad is None for p in qwen.parameters())
        assert [name for name, p in qwen.named_parameters() if not p.requires_grad] == [
            "model.layers.0.mlp.gate.weight"
        ]
        assert all(torch.equal(tensor, state[name]) for name, tensor in qwen.state_dict().items())
    qwen.model.layers[0].mlp.gate.weight.requires_grad_(True)


def test_no_weight_of_an_expert_gets_a_gradient(qwen: nn.Module, spaces: Spaces) -> None:
    made: list[str] = []
    hooks = [
        p.register_hook(lambda gradient, name=name: made.append(name)) for name, p in qwen.named_parameters()
    ]
    fp.score(qwen, [moe_zoo.tokens()], spaces=spaces.only(["expert"]))
    assert made == []
    fp.score(qwen, [moe_zoo.tokens()], spaces=spaces.only(["expert", "head"]))
    for hook in hooks:
        hook.remove()
    assert made
    assert all(".self_attn." in name for name in made)


# --- Kinds of spaces together ---


def test_each_kind_has_its_own_default(qwen: nn.Module, spaces: Spaces, experts: Spaces) -> None:
    data = [moe_zoo.tokens()]
    assert fp.score(qwen, data, spaces=experts).active == ("soft_activation", "routed_taylor")
    assert fp.score(qwen, data, spaces=spaces.only(["head"])).active == ("activation", "taylor")
    mixed = fp.score(qwen, data, spaces=spaces)
    assert mixed.active == (
        "hidden=activation+head=activation+expert=soft_activation",
        "hidden=taylor+head=taylor+expert=routed_taylor",
    )
    for kind, removal, protection in (
        ("head", "activation", "taylor"),
        ("expert", "soft_activation", "routed_taylor"),
    ):
        single = fp.score(qwen, data, spaces=spaces.only([kind]), removal=removal, protection=protection)
        for name in single.spaces.names:
            np.testing.assert_allclose(mixed.removal[name], single.removal[name], rtol=1e-9)
            np.testing.assert_allclose(mixed.protection[name], single.protection[name], rtol=1e-9)
    labelled = [(moe_zoo.tokens(), torch.tensor([0, 1]))]
    assert (
        fp.score(qwen, labelled, spaces=spaces.only(["head", "expert"])).active[0]
        == "head=wasserstein+expert=soft_activation"
    )


def test_a_mapping_and_its_name_ask_for_the_same(qwen: nn.Module, spaces: Spaces) -> None:
    some = spaces.only(["head", "expert"])
    # a kind that the model has not does no harm
    asked = {"expert": "reap", "head": "l2", "channel": "l1"}
    scores = fp.score(qwen, [moe_zoo.tokens()], spaces=some, removal=[asked, "random"])
    assert tuple(scores.removals) == ("head=l2+expert=reap", "random")
    again = fp.score(qwen, [moe_zoo.tokens()], spaces=some, removal="head=l2+expert=reap")
    for name in some.names:
        np.testing.assert_array_equal(again.removal[name], scores.removal[name])


@pytest.mark.parametrize(
    ("removal", "message"),
    [
        (
            "activation",
            (
                r"'activation' cannot score spaces of kind expert, only channel, hidden, head, stream: write"
                r" removal=\{.*'expert': 'soft_activation'\}"
            ),
        ),
        ({"expert": "reap"}, r"'reap' cannot score spaces of kind head.*'head': 'wasserstein'"),
        ({"expert": "activation"}, "'activation' cannot score spaces of kind expert"),
        (
            {"expert": "reap", "channel": "l2"},
            r"There is no removal signal for spaces of kind head: write removal=\{.*'head'",
        ),
        ({"experts": "reap"}, "Unknown kind 'experts': did you mean 'expert'"),
        ("head=l2+expert=reep", "Unknown removal signal 'reep': did you mean 'reap'"),
        ([], "expected at least one"),
    ],
)
def test_what_cannot_be_scored_says_what_to_write(
    qwen: nn.Module, spaces: Spaces, removal: Any, message: str
) -> None:
    with pytest.raises(fp.FairprunerError, match=message):
        fp.score(qwen, [moe_zoo.tokens()], spaces=spaces.only(["head", "expert"]), removal=removal)


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "llama4"])
def test_hidden_units_inside_experts_are_observed(family: str) -> None:
    """The mean absolute value that the real tokens' experts compute, against the experts' own loop."""
    model, rows = moe_zoo.moe(family), texts(9, 5)
    batch = padded(rows, "right")
    found = fp.discover(model, moe_zoo.tokens(), kinds=["hidden"])
    name = expert_blocks(model)[0].experts
    scores = fp.score(model, [batch], spaces=found, removal="activation")
    calls, _ = calls_of(model, lambda: model(**batch))
    seen: list[Tensor] = []
    real = batch["attention_mask"].bool().reshape(-1)
    module = model.get_submodule(name)
    hidden: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    model(**batch)
    hook.remove()
    call = calls[0]
    source = hidden[0] if len(hidden[0]) == call.tokens else None  # Llama 4 hands over all experts' rows
    for p in range(len(call.token)):
        if real[call.token[p]]:
            e = int(call.expert[p])
            x = source[call.token[p]] if source is not None else hidden[0][e * call.tokens + call.token[p]]
            weight = module.gate_up_proj[e]
            z = x @ (weight if weight.shape[0] == len(x) else weight.T)
            z = z + module.gate_up_proj_bias[e] if hasattr(module, "gate_up_proj_bias") else z
            gate, up = z.chunk(2)
            seen.append(module._apply_gate(z) if hasattr(module, "_apply_gate") else up * module.act_fn(gate))
    np.testing.assert_allclose(scores.removal[name], torch.stack(seen).abs().mean(0).detach(), rtol=1e-9)


# --- What cannot be followed ---


def test_experts_with_hidden_parameters_are_refused_for_taylor_only() -> None:
    class Scaled(moe_zoo.Expert):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    block = moe_zoo.PlainMoE(width=4, hidden=3, experts=4, top_k=2)
    block.experts = nn.ModuleList(Scaled() for _ in range(4))
    net = nn.Sequential(block)
    found = fp.discover(net, torch.randn(1, 5, 4), kinds=["expert"])
    data = [(torch.randn(2, 5, 4), torch.zeros(2, 5, 4))]
    assert (
        fp.score(net, data, spaces=found, loss=F.mse_loss, protection="random").active[0] == "soft_activation"
    )
    with pytest.raises(fp.FairprunerError, match="parameters outside of linear and norm modules"):
        fp.score(net, data, spaces=found, loss=F.mse_loss)


# --- Listed experts ---


class Dense(moe_zoo.PlainMoE):
    """All experts on all tokens, weights of zero for those not chosen."""

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        kept = logits.topk(self.top_k, dim=-1)
        weights = torch.zeros_like(logits).scatter(-1, kept.indices, kept.values.softmax(-1))
        return sum(weights[..., [number]] * expert(x) for number, expert in enumerate(self.experts))


class Rounds(moe_zoo.PlainMoE):
    """The first choices of all tokens, then the second ones: an expert is called several times."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).topk(self.top_k, dim=-1)
        weights, out = weights.softmax(-1), torch.zeros_like(x)
        for rank in range(self.top_k):
            for number, expert in enumerate(self.experts):
                sent = chosen[..., rank] == number
                out[sent] = out[sent] + expert(x[sent]) * weights[..., rank][sent][:, None]
        return out


class Named(moe_zoo.PlainMoE):
    """Experts called by keyword, on one token after the other."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).topk(self.top_k, dim=-1)
        weights = weights.softmax(-1)
        rows = [
            [
                sum(w * self.experts[e](x=t) for e, w in zip(c, ws, strict=True))
                for t, c, ws in zip(*text, strict=True)
            ]
            for text in zip(x, chosen, weights, strict=True)
        ]
        return torch.stack([torch.stack(row) for row in rows])


class Normed(moe_zoo.PlainMoE):
    """A norm and a projection behind the sum, which nothing in the block is called after."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.norm, self.out = nn.LayerNorm(sizes["width"]), nn.Linear(sizes["width"], sizes["width"])

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x + super().forward(x)))


class Squared(moe_zoo.PlainMoE):
    """Not what the experts give is added up, but its squares."""

    def forward(self, x: Tensor) -> Tensor:
        return sum(
            expert(x).square() * share[..., None]
            for expert, share in zip(self.experts, self.router(x).softmax(-1).unbind(-1), strict=True)
        )


class TextMoE(nn.Module):
    """Tokens [N, T] -> logits of the next ones, or of classes: what people write by hand."""

    def __init__(self, block: type[moe_zoo.PlainMoE] = moe_zoo.PlainMoE, classes: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.moe, self.classes = (
            nn.Embedding(90, 8),
            block(width=8, hidden=6, experts=5, top_k=2),
            classes,
        )
        self.head = nn.Linear(8, classes or 90)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        h = self.embed(input_ids)
        h = h + self.moe(h)
        return self.head(h.mean(1) if self.classes else h)


HIDDEN = "moe.experts.0.up"


def test_hidden_units_of_listed_experts_are_observed() -> None:
    """The mean absolute value over the real tokens and the experts they were sent to."""
    net, batch = TextMoE().double(), padded(texts(9, 5), "left")
    seen = []
    h = net.embed(batch["input_ids"])[batch["attention_mask"].bool()]  # [tokens, 8]
    for token, chosen in zip(h, net.moe.router(h).topk(2).indices.tolist(), strict=True):
        seen += [F.gelu(net.moe.experts[e].up(token)) for e in chosen]
    scores = fp.score(net, [batch])
    assert scores.active == ("hidden=activation+expert=soft_activation", "hidden=taylor+expert=routed_taylor")
    np.testing.assert_allclose(scores.removal[HIDDEN], torch.stack(seen).abs().mean(0).detach(), rtol=1e-9)


@pytest.mark.parametrize("block", [Dense, Rounds, Named])
def test_the_way_experts_are_called_does_not_matter(block: type[moe_zoo.PlainMoE]) -> None:
    data = [({"input_ids": torch.stack(texts(*[7] * 6, seed=s))}, torch.arange(6) % 3) for s in (1, 2)]
    scores = []
    for kind in (moe_zoo.PlainMoE, block):
        net = TextMoE(kind, classes=3).double()
        spaces = fp.discover(net, data[0][0])
        removal = [{"hidden": name, "expert": "reap"} for name in ("wasserstein", "activation")]
        scores.append(
            fp.score(
                net,
                data,
                spaces=spaces,
                removal=removal,
                protection={"hidden": "taylor2", "expert": "routed_taylor"},
            )
        )
    assert_same(*scores, tolerance=1e-9)


def test_second_order_terms_of_hidden_units_against_a_gate() -> None:
    net, ids = TextMoE(classes=3).double(), torch.stack(texts(7, 7, 7))
    labels, gate = torch.tensor([0, 1, 2]), torch.ones(6, dtype=torch.float64, requires_grad=True)
    hooks = [
        expert.down.register_forward_pre_hook(lambda module, args: args[0] * gate)
        for expert in net.moe.experts
    ]
    terms = torch.stack(
        [
            torch.autograd.grad(F.cross_entropy(net(row[None]), label[None]), gate)[0]
            for row, label in zip(ids, labels, strict=True)
        ]
    )  # [N, J]
    for hook in hooks:
        hook.remove()
    spaces = fp.discover(net, {"input_ids": ids}, kinds=["hidden"])
    scores = fp.score(net, [({"input_ids": ids}, labels)], spaces=spaces, protection="taylor2")
    np.testing.assert_allclose(
        scores.protection[HIDDEN], (-terms + terms.square() / 2).mean(0).abs(), rtol=1e-9
    )


def test_what_comes_behind_the_sum_does_not_hide_it() -> None:
    plain, normed = TextMoE().double(), TextMoE(Normed).double()
    normed.moe.load_state_dict(plain.moe.state_dict(), strict=False)
    normed.embed.load_state_dict(plain.embed.state_dict())
    data = [padded(texts(9, 5, seed=s), "left") for s in (1, 2)]
    names = [{"hidden": "activation", "expert": name} for name in REMOVAL]
    one, other = (fp.score(net, data, removal=names, protection="random") for net in (plain, normed))
    for signal in one.removals:
        for name in ("moe", HIDDEN):
            np.testing.assert_allclose(other.removals[signal][name], one.removals[signal][name], rtol=1e-9)


@pytest.mark.parametrize("signal", ["l1", "l2", "fpgm"])
def test_norms_of_listed_experts_are_those_of_their_matrices(signal: str) -> None:
    net = TextMoE().double()
    rows = np.stack(
        [
            np.concatenate([e.up.weight.detach().numpy().ravel(), e.down.weight.detach().numpy().ravel()])
            for e in net.moe.experts
        ]
    )
    by_hand = {
        "l1": np.abs(rows).sum(1),
        "l2": np.linalg.norm(rows, axis=1),
        "fpgm": np.linalg.norm(rows[:, None] - rows, axis=2).sum(1),
    }
    spaces = fp.discover(net, padded(texts(9), "right"), kinds=["expert"])
    scores = fp.score(net, [padded(texts(9), "right")], spaces=spaces, removal=signal, protection="random")
    np.testing.assert_allclose(scores.removal["moe"], by_hand[signal], rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["plain", "qwen2_moe", "deepseek_v3", "llama4"])
def test_deletion_is_the_change_of_the_loss_without_the_unit(family: str) -> None:
    """Of experts, whose logit is masked, and of the hidden units inside all of them."""
    net, batch = TextMoE().double() if family == "plain" else moe_zoo.moe(family), moe_zoo.tokens(5)
    spaces = fp.discover(net, batch, kinds=["expert", "hidden"])
    block = expert_blocks(net)[0]
    inner = next(
        s for s in spaces if s.kind == "hidden" and s.slices[0].tensor.startswith(f"{block.experts}.")
    )
    some = spaces.without({s.name: "" for s in spaces if s not in (spaces[block.name], inner)})
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    scores = fp.score(net, [batch], spaces=some, removal="l2", protection="deletion")
    assert all(torch.equal(tensor, state[name]) for name, tensor in net.state_dict().items())

    def loss(model: nn.Module) -> float:
        out = model(**batch)
        logits = out if isinstance(out, Tensor) else out.logits
        return F.cross_entropy(logits[:, :-1].movedim(2, 1), batch["input_ids"][:, 1:]).item()

    for space in some:
        for unit in range(4):
            change = loss(mask_units(net, some, {space.name: (unit,)})) - loss(net)
            assert scores.protection[space.name][unit] == pytest.approx(abs(change), rel=1e-6, abs=1e-12)
        assert scores.protection[space.name].max() > 0


class Keeping(moe_zoo.PlainMoE):
    """Keeps a loss and its logits from call to call, as code that is trained with a balancing loss does."""

    loss: Tensor | None

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.loss = None

    def forward(self, x: Tensor) -> Tensor:
        self.logits = self.router(x)
        self.loss = self.logits.softmax(-1).mean((0, 1)).square().sum()
        return super().forward(x)


def test_what_a_block_keeps_from_its_last_call_is_no_obstacle() -> None:
    net, batch = TextMoE(Keeping), padded(texts(9, 5), "right")
    scores = fp.score(net, [batch])
    assert net.moe.loss is None
    assert not hasattr(net.moe, "logits")
    net(**batch)
    before = net.moe.loss
    plan = fp.allocate(
        fp.score(net, [batch], spaces=fp.discover(net, batch)), keep=fp.Budget("experts", 3), exact=True
    )
    assert net.moe.loss is before
    assert before.grad_fn is not None
    assert len(fp.cut(net, plan).moe.experts) == len(scores.removal["moe"]) - 2


class Tuples(moe_zoo.PlainMoE):
    """Experts that return more than a tensor."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        for expert in self.experts:
            expert.register_forward_hook(lambda module, args, output: (output, output.mean()))

    def forward(self, x: Tensor) -> Tensor:
        return sum(
            expert(x)[0] * share[..., None]
            for expert, share in zip(self.experts, self.router(x).softmax(-1).unbind(-1), strict=True)
        )


def test_experts_that_return_more_than_a_tensor_are_refused() -> None:
    net = TextMoE(Tuples)
    with pytest.raises(
        fp.FairprunerError, match=r"Block 'moe' does not just add up.*removal='l2' and protection='deletion'"
    ):
        fp.score(net, [padded(texts(9, 5), "right")])


def test_what_cannot_be_seen_is_left_out_and_the_rest_is_scored() -> None:
    net = nn.Sequential(
        moe_zoo.PlainMoE(width=4, hidden=3, experts=4, top_k=2),
        Squared(width=4, hidden=3, experts=4, top_k=2),
    )
    data = [(torch.randn(2, 5, 4), torch.zeros(2, 5, 4))] * 2
    with pytest.warns(
        fp.FairprunerWarning,
        match=r"Left out of the scores: 1, 1\.experts\.0\.up\. Block '1' does not just add up",
    ) as warned:
        scores = fp.score(net, data, loss=F.mse_loss, removal={"hidden": "activation", "expert": "reap"})
    assert warned[0].filename == __file__
    assert scores.spaces.names == ("0", "0.experts.0.up")
    assert all("does not just add up" in scores.spaces.left_out[name] for name in ("1", "1.experts.0.up"))
    assert fp.allocate(scores, keep=fp.Budget("experts", 0.5)).removed.keys() == {"0", "0.experts.0.up"}
    with pytest.warns(fp.FairprunerWarning, match=r"Left out of the scores: 1, 1\.experts\.0\.up\."):
        once = fp.score(net, iter(data), loss=F.mse_loss, removal={"hidden": "activation", "expert": "reap"})
    np.testing.assert_array_equal(once.removal["0"], scores.removal["0"])  # data that can be read once


def test_blocks_that_mix_otherwise_are_refused() -> None:
    net = nn.Sequential(Squared(width=4, hidden=3, experts=4, top_k=2))
    with pytest.raises(fp.FairprunerError, match="does not just add up its experts' outputs"):
        calls_of(net, lambda: net(torch.randn(1, 5, 4)))


def test_the_exact_version_needs_the_losses_of_tokens(qwen: nn.Module, experts: Spaces) -> None:
    with pytest.raises(fp.FairprunerError, match="needs the loss of every token"):
        fp.score(
            qwen,
            [moe_zoo.tokens()],
            spaces=experts,
            loss=lambda output, labels: output.logits.mean(),
            protection="routed_taylor_exact",
        )


def test_too_few_tokens_are_warned_of(qwen: nn.Module, experts: Spaces) -> None:
    with pytest.warns(
        fp.FairprunerWarning,
        match=(
            r"The 2 samples are too few to rank experts for removal by 'soft_activation': .* expected at"
            r" least 0.9"
        ),
    ) as warned:
        fp.score(qwen, [moe_zoo.tokens()], spaces=experts)
    assert warned[0].filename == __file__


def test_a_single_text_is_warned_of(qwen: nn.Module, experts: Spaces) -> None:
    with pytest.warns(fp.FairprunerWarning, match="One sample cannot rank experts: .* Give more tokens"):
        fp.score(qwen, [{"input_ids": torch.tensor([[5, 6]])}], spaces=experts)


def test_models_without_numbers_or_gradients_are_refused(qwen: nn.Module, experts: Spaces) -> None:
    with torch.inference_mode():
        frozen = TextMoE()
    batch = padded(texts(9, 5), "right")
    with pytest.raises(fp.FairprunerError, match=r"made under torch.inference_mode.*copy.deepcopy"):
        fp.score(frozen, [batch])
    assert fp.score(copy.deepcopy(frozen), [batch]).samples == 2
    empty = TextMoE().to("meta")
    for attempt in (lambda: fp.discover(empty, batch), lambda: fp.score(empty, [batch])):
        with pytest.raises(fp.FairprunerError, match=r"holds no numbers: embed.weight is on the meta device"):
            attempt()


def test_train_mode_noise_and_bfloat16_are_no_obstacle() -> None:
    class Noisy(moe_zoo.PlainMoE):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.randn_like(x) if self.training else x)

    data = [padded(texts(9, 5, seed=s), "left") for s in (1, 2)]
    quiet, noisy = TextMoE(Noisy), TextMoE(Noisy).train()
    random = torch.random.get_rng_state()
    assert_same(fp.score(quiet, data), fp.score(noisy, data), tolerance=0)
    assert noisy.moe.training
    assert torch.equal(torch.random.get_rng_state(), random)
    with torch.inference_mode():
        assert_same(fp.score(quiet, data), fp.score(noisy, data), tolerance=0)
    half = fp.score(TextMoE().bfloat16(), data)
    for name, values in fp.score(TextMoE(), data).removal.items():
        np.testing.assert_allclose(half.removal[name], values, rtol=0.2, atol=0.05)


def test_enough_tokens_are_not_warned_of(qwen: nn.Module, experts: Spaces) -> None:
    alike = [moe_zoo.tokens()] * 2  # two halves that agree
    with warnings.catch_warnings():
        warnings.simplefilter("error", fp.FairprunerWarning)
        fp.score(qwen, alike, spaces=experts)
