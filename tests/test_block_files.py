"""Language models without some of their blocks, in memory and in folders that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fairpruner as fp

transformers = pytest.importorskip("transformers")

TOKENS = {"input_ids": torch.arange(10)[None] % 7}
SIZES: dict[str, int] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()


def gemma() -> Any:
    config = transformers.Gemma3TextConfig(**SIZES, head_dim=4, sliding_window=3)
    config.layer_types = ["sliding_attention", "full_attention", "full_attention"]
    return transformers.Gemma3ForCausalLM(config).eval()


def generated(model: Any) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(
        **TOKENS, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    return tokens


@pytest.mark.parametrize(
    ("make", "units", "layers", "stock"),
    [
        (llama, [0, 1], 2, True),  # the whole first layer
        (llama, [0, 5], 3, False),  # the first attention, and an MLP
        (gemma, [2, 3, 0], 2, False),  # a layer, and the first attention
    ],
)
def test_folders_without_blocks(
    make: Any, units: list[int], layers: int, stock: bool, tmp_path: Path
) -> None:
    model = make()
    spaces = fp.discover(model, TOKENS, kinds=["block"])
    assert spaces["blocks"].size == 6
    plan = fp.Plan.removing(spaces, {"blocks": units})
    small, masked = fp.cut(model, plan), fp.mask(model, plan)
    logits = small(**TOKENS).logits
    torch.testing.assert_close(logits, masked(**TOKENS).logits)
    assert fp.count_params(small) == plan.predicted["params"]
    assert fp.count_flops(small, TOKENS) == plan.predicted["flops"]
    # With a cache of keys and values, too, in which a removed attention still counts tokens.
    tokens = generated(small)
    assert torch.equal(tokens, generated(masked))
    fp.save(small, plan, tmp_path / "small")
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["num_hidden_layers"] == layers
    assert ("auto_map" not in config) == stock
    assert (tmp_path / "small" / "modeling_pruned.py").exists() != stock
    loaded = [fp.load(tmp_path / "small")]
    loaded.append(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small", trust_remote_code=not stock)
    )
    for again in loaded:
        assert torch.equal(again(**TOKENS).logits, logits)
        assert torch.equal(generated(again), tokens)


def test_types_of_layers_follow(tmp_path: Path) -> None:
    model = gemma()
    plan = fp.Plan.removing(fp.discover(model, TOKENS, kinds=["block"]), {"blocks": [2, 3]})
    fp.save(fp.cut(model, plan), plan, tmp_path / "small")
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert model.config.num_hidden_layers == 3


def test_a_layer_that_loses_its_experts_and_its_attention() -> None:
    config = transformers.Qwen2MoeConfig(
        **SIZES,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    )
    model = transformers.Qwen2MoeForCausalLM(config).eval()
    spaces = fp.discover(model, TOKENS, kinds=["expert", "block"])
    assert spaces.enclosing["model.layers.1.mlp"] == ("blocks", 3)
    plan = fp.Plan.removing(spaces, {"blocks": [3, 4], "model.layers.0.mlp": [1], "model.layers.1.mlp": [0]})
    small = fp.cut(model, plan)
    torch.testing.assert_close(small(**TOKENS).logits, fp.mask(model, plan)(**TOKENS).logits)
    assert plan.predicted["experts"] == 3 + 0 + 4
    assert fp.count_params(small) == plan.predicted["params"]
