"""Tiny language models with random weights, saved as folders, for the tests of models larger than memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TEXT: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
ROUTED = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 8,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen2_moe": ("Qwen2Moe", {**ROUTED, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("Qwen3Moe", {**ROUTED, "head_dim": 8}),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
}


def saved_model(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Write a tiny model into a folder, and return it in float32 with the numbers that the folder holds."""
    import transformers

    name, options = FAMILIES[family]
    config_class = getattr(transformers, f"{name}Config", None) or getattr(transformers, f"{name}TextConfig")
    if name == "Gemma3":
        config_class = transformers.Gemma3TextConfig
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForCausalLM")(config_class(**{**TEXT, **options})).to(dtype)
    model.save_pretrained(folder, max_shard_size="60KB")
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()


def token_batches(count: int = 3) -> list[dict[str, torch.Tensor]]:
    """Batches of tokens, of which the second has padding."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(count):
        ids = torch.randint(3, 99, (3, 9 + number), generator=generator)
        mask = torch.ones_like(ids)
        if number == 1:
            mask[0, 7:] = 0
        found.append({"input_ids": ids, "attention_mask": mask})
    return found
