"""Metrics of language models: the bytes of the cache of keys and values, and the parameters of a token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fairpruner as fp
from fairpruner.models.caching import cached_layers
from fairpruner.models.experts import expert_blocks

transformers = pytest.importorskip("transformers")

TOKENS = {"input_ids": torch.arange(10)[None] % 7}
SIZES: dict[str, int] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def cached(model: Any) -> int:
    return sum(layer.bytes for layer in cached_layers(model, TOKENS))


def test_the_bytes_of_a_cache_follow_heads_and_blocks() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    spaces = fp.discover(model, TOKENS, kinds=["head", "hidden", "block"])
    whole = fp.Plan.removing(spaces, {})
    # Keys and values, in 2 layers, of 2 heads of width 4, in 4 bytes each.
    assert whole.predicted["cache_bytes"] == cached(model) == 2 * 2 * 2 * 4 * 4
    for removed in ({"model.layers.0.self_attn.q_proj": [1]}, {"blocks": [2]}, {"blocks": [1]}):
        plan = fp.Plan.removing(spaces, removed)
        assert plan.predicted["cache_bytes"] == cached(fp.cut(model, plan))
    scores = fp.score(model, [TOKENS], spaces=spaces.only(kinds=["head", "hidden"]))
    plan = fp.allocate(scores, keep=fp.Budget("cache_bytes", 0.75), exact=True)
    assert cached(fp.cut(model, plan)) == 0.75 * cached(model)


def test_a_token_uses_as_many_experts_as_it_is_sent_to() -> None:
    config = transformers.Qwen2MoeConfig(
        **SIZES,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=8,
    )
    model = transformers.Qwen2MoeForCausalLM(config).eval()
    spaces = fp.discover(model, TOKENS)

    def used(model: Any) -> int:
        """All parameters but those of the experts that a token is not sent to."""
        total = fp.count_params(model)
        for block in expert_blocks(model):
            assert block.top_k is not None
            held = sum(p.numel() for p in model.get_submodule(block.experts).parameters())
            total -= held // block.size * (block.size - block.top_k)
        return total

    hidden = next(s for s in spaces if s.kind == "hidden" and "experts" in s.slices[0].tensor)
    expert = next(s for s in spaces if s.kind == "expert")
    for removed in ({}, {expert.name: [0, 3]}, {hidden.name: np.arange(8).tolist(), expert.name: [1]}):
        plan = fp.Plan.removing(spaces, removed)
        assert plan.predicted["active_params"] == used(fp.cut(model, plan))


@pytest.mark.parametrize("tied", [True, False])
def test_inner_parameters_leave_embeddings_and_the_head_out(tied: bool) -> None:
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config).eval()
    spaces = fp.discover(model, TOKENS)
    outer = (1 if tied else 2) * 32 * 16
    plan = fp.Plan.removing(spaces, {"model.layers.1.mlp.gate_proj": [0, 5]})
    assert plan.original["inner_params"] == fp.count_params(model) - outer
    assert plan.predicted["inner_params"] == fp.count_params(fp.cut(model, plan)) - outer
    scores = fp.score(model, [TOKENS], spaces=spaces)
    plan = fp.allocate(scores, keep=fp.Budget("inner_params", 0.8), exact=True)
    assert plan.share("inner_params") == pytest.approx(0.8, abs=0.06)


def test_models_without_a_cache_or_experts_have_neither() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    data = [(torch.randn(8, 3), torch.arange(8) % 2)]
    scores = fp.score(model, data, spaces=fp.discover(model, torch.zeros(1, 3)))
    for metric in ("cache_bytes", "active_params", "inner_params"):
        with pytest.raises(fp.FairprunerError, match=f"Budget {metric} keep=0.5 cannot be met: the model"):
            fp.allocate(scores, keep=fp.Budget(metric, 0.5))  # type: ignore[arg-type]
