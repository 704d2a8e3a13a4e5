"""Tiny Mixture-of-Experts models of the families that transformers has, and a plain block, with random
weights.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

EXPERTS, TOP_K = 12, 3
BLOCKS = 2  # of routed experts in every model

TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROUTED = {"moe_intermediate_size": 20, "num_experts_per_tok": TOP_K}
LOCAL = {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
GROUPED = {
    **ROUTED,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "n_group": 2,
    "topk_group": 1,
}

# family -> (model class, configuration class, options)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**ROUTED, "num_experts": EXPERTS, "shared_expert_intermediate_size": 28},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**ROUTED, "num_experts": EXPERTS, "head_dim": 8, "norm_topk_prob": True},
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **ROUTED,
            "num_experts": EXPERTS,
            "head_dim": 8,
            "shared_expert_intermediate_size": 28,
            "layer_types": ["full_attention"] * BLOCKS,
        },
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", LOCAL),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K}),
    "flex_olmo": (
        "FlexOlmoForCausalLM",
        "FlexOlmoConfig",
        {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K},
    ),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {**GROUPED, **LATENT, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**GROUPED, **LATENT}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**LOCAL, "head_dim": 8, "sliding_window": 4}),
    "phimoe": ("PhimoeForCausalLM", "PhimoeConfig", {**LOCAL, "num_experts_per_tok": 2}),
    "granitemoe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", LOCAL),
    "granitemoeshared": (
        "GraniteMoeSharedForCausalLM",
        "GraniteMoeSharedConfig",
        {**LOCAL, "shared_intermediate_size": 28},
    ),
    "glm4_moe": ("Glm4MoeForCausalLM", "Glm4MoeConfig", {**GROUPED, "head_dim": 8}),
    "glm4_moe_lite": (
        "Glm4MoeLiteForCausalLM",
        "Glm4MoeLiteConfig",
        {**GROUPED, **LATENT, "mlp_layer_types": ["sparse"] * BLOCKS},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        {
            "moe_num_experts": EXPERTS,
            "moe_k": TOP_K,
            "moe_intermediate_size": 20,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 0,
        },
    ),
    "jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        {
            "num_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
            "attn_layer_period": 1,
            "attn_layer_offset": 0,
            "use_mamba_kernels": False,
        },
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1ForCausalLM",
        "HunYuanMoEV1Config",
        {"num_experts": EXPERTS, "moe_topk": TOP_K, "head_dim": 8},
    ),
    "dots1": ("Dots1ForCausalLM", "Dots1Config", {**GROUPED, "head_dim": 8}),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **LOCAL,
            "num_experts_per_tok": 1,
            "head_dim": 8,
            "intermediate_size_mlp": 24,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 8,
        },
    ),
    "minimax": (
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        {**LOCAL, "head_dim": 8, "layer_types": ["full_attention"] * BLOCKS},
    ),
    "minimax_m2": ("MiniMaxM2ForCausalLM", "MiniMaxM2Config", {**LOCAL, "head_dim": 8, "rotary_dim": 8}),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        {**ROUTED, "num_experts": EXPERTS, "num_dense_layers": 0, "layer_types": ["full_attention"] * BLOCKS},
    ),
    "aria_text": (
        "AriaTextForCausalLM",
        "AriaTextConfig",
        {"moe_num_experts": EXPERTS, "moe_topk": TOP_K, "moe_num_shared_experts": 1},
    ),
    "gemma4": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            **ROUTED,
            "num_experts": EXPERTS,
            "top_k_experts": TOP_K,
            "enable_moe_block": True,
            "head_dim": 8,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 99,
            "num_kv_shared_layers": 0,
            "layer_types": ["full_attention"] * BLOCKS,
        },
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **GROUPED,
            "layers_block_type": ["attention", "moe"] * BLOCKS,
            "head_dim": 8,
            "moe_shared_expert_intermediate_size": 28,
        },
    ),
    "afmoe": (
        "AfmoeForCausalLM",
        "AfmoeConfig",
        {
            **ROUTED,
            "num_experts": EXPERTS,
            "num_shared_experts": 1,
            "num_dense_layers": 0,
            "head_dim": 8,
            "global_attn_every_n_layers": 1,
        },
    ),
    "solar_open": ("SolarOpenForCausalLM", "SolarOpenConfig", {**GROUPED, "head_dim": 8}),
    "exaone_moe": (
        "ExaoneMoeForCausalLM",
        "ExaoneMoeConfig",
        {
            **ROUTED,
            "num_experts": EXPERTS,
            "num_shared_experts": 1,
            "head_dim": 8,
            "mlp_layer_types": ["sparse"] * BLOCKS,
            "layer_types": ["full_attention"] * BLOCKS,
        },
    ),
    "mistral4": ("Mistral4ForCausalLM", "Mistral4Config", {**GROUPED, **LATENT, "head_dim": 16}),
}

# Families that bring nothing new to the adapter: (model class, configuration class), all with the options
# above at once.
FURTHER: dict[str, tuple[str, str]] = {
    "bailing_hybrid": ("BailingHybridForCausalLM", "BailingHybridConfig"),
    "cohere2_moe": ("Cohere2MoeForCausalLM", "Cohere2MoeConfig"),
    "granitemoe_swa": ("GraniteMoeSWAForCausalLM", "GraniteMoeSWAConfig"),
    "hy_v3": ("HYV3ForCausalLM", "HYV3Config"),
    "kimi_linear": ("KimiLinearForCausalLM", "KimiLinearConfig"),
    "laguna": ("LagunaForCausalLM", "LagunaConfig"),
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", "MiMoV2FlashConfig"),
    "minimax_m3": ("MiniMaxM3VLForCausalLM", "MiniMaxM3VLTextConfig"),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig"),
}
ALL_OPTIONS = {
    **GROUPED,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "num_shared_experts": 1,
    "shared_expert_intermediate_size": 28,
    "num_dense_layers": 0,
    "head_dim": 8,
    "layer_types": ["full_attention"] * BLOCKS,
    "mlp_layer_types": ["sparse"] * BLOCKS,
}
LATENT_TOO = {"bailing_hybrid", "kimi_linear"}


def moe(family: str, dtype: torch.dtype = torch.float64, **sizes: int) -> nn.Module:
    """A model of the family with lively random weights and non-zero biases, its experts run by the plain
    loop.
    """
    transformers = pytest.importorskip("transformers")
    model_class, config_class, options = (
        FAMILIES[family]
        if family in FAMILIES
        else (*FURTHER[family], ALL_OPTIONS | (LATENT if family in LATENT_TOO else {}))
    )
    if not hasattr(transformers, model_class):
        pytest.skip(f"transformers {transformers.__version__} has no {model_class}")
    config = getattr(transformers, config_class)(**{**TEXT, **options, **sizes})
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config).eval()
    model.set_experts_implementation("eager")
    return enliven(model).to(dtype)


def enliven(model: nn.Module) -> nn.Module:
    """Weights under which routing differs from token to token, and correction biases that matter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():  # other buffers are not saved with the model
            if tensor.ndim >= 2:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / max(tensor.shape[-2:]) ** 0.5)
            elif "bias" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / 4)
            elif "scale" in name:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return model


def tokens(length: int = 9) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, 90, (2, length), generator=torch.Generator().manual_seed(2))}


class Expert(nn.Module):
    """A two-matrix network: [n, width] -> [n, width]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class PlainMoE(nn.Module):
    """What people write by hand: a linear router, its top-k softmax, and a list of experts, [batch,
    tokens, width].
    """

    def __init__(self, width: int = 16, hidden: int = 20, experts: int = EXPERTS, top_k: int = TOP_K) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(flat).topk(self.top_k, dim=-1)  # [tokens, k]
        weights = weights.softmax(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == number)
            if token.numel():
                out.index_add_(0, token, expert(flat[token]) * weights[token, rank, None])
        return out.reshape(x.shape)


class PlainMoENet(nn.Module):
    """Two residual blocks of plain experts between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(PlainMoE() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(self.norm(h))


def plain_moe(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return PlainMoENet().to(dtype).eval()


def plain_example(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(2, 15, 6, generator=torch.Generator().manual_seed(3), dtype=dtype)
