"""Small transformers of the families people have, built from their configurations with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn


def tokens(length: int = 7) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, 90, (2, length))}


def pixels() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32, dtype=torch.float64)}


TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
DECODER = {**TEXT, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}

# family -> (class, configuration class, options, example)
HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any], Callable[[], dict[str, torch.Tensor]]]] = {
    "bert": ("BertForSequenceClassification", "BertConfig", TEXT, tokens),
    "distilbert": (
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
        tokens,
    ),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", TEXT, tokens),
    "vit": ("ViTForImageClassification", "ViTConfig", VISION, pixels),
    "deit": ("DeiTForImageClassification", "DeiTConfig", VISION, pixels),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": 99,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        tokens,
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER, tokens),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", DECODER, tokens),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 8}, tokens),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**DECODER, "head_dim": 8}, tokens),
    "gemma3": (  # all query heads share one key; the first layer has a sliding window
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **DECODER,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        tokens,
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 99,
            "d_model": 32,
            "d_kv": 8,
            "num_heads": 4,
            "d_ff": 48,
            "num_layers": 2,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "decoder_start_token_id": 0,
        },
        lambda: {**tokens(), "decoder_input_ids": torch.randint(3, 90, (2, 5))},
    ),
    "whisper_encoder": (
        "WhisperModel",
        "WhisperConfig",
        {
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
        }
        | {
            "vocab_size": 99,
            "max_source_positions": 20,
            "num_mel_bins": 8,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        lambda: {"input_features": torch.randn(2, 8, 40, dtype=torch.float64)},
    ),
    "clip": (
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**TEXT, "bos_token_id": 1, "eos_token_id": 2},
            "vision_config": VISION,
            "projection_dim": 16,
        },
        lambda: {**tokens(), **pixels()},
    ),
}


def hugging_face(family: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    model_class, config_class, options, _ = HUGGING_FACE[family]
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**options))
    return (model.encoder if family == "whisper_encoder" else model).eval()


# timm name -> (options that make it small, image size)
TIMM: dict[str, tuple[dict[str, Any], int]] = {
    "deit_tiny_patch16_224": ({"img_size": 64, "depth": 2}, 64),
    "deit_small_patch16_224": ({"img_size": 32, "depth": 2}, 32),
    "deit_base_patch16_224": ({"img_size": 32, "depth": 1}, 32),
    "vit_tiny_patch16_224": (
        {"img_size": 64, "depth": 2, "global_pool": "avg", "qk_norm": True, "init_values": 0.1},
        64,
    ),
    "vit_small_patch16_rope_224": ({"img_size": 64, "depth": 2}, 64),
    "swin_tiny_patch4_window7_224": (
        {"img_size": 56, "depths": (2, 2), "num_heads": (3, 6), "embed_dim": 24},
        56,
    ),
    "convnext_tiny": ({"depths": (1, 1, 1, 1), "dims": (12, 24, 36, 48)}, 64),
    "convnextv2_atto": ({"depths": (1, 1, 1, 1)}, 64),
    "mixer_s32_224": ({"img_size": 64}, 64),
    "efficientformer_l1": ({"depths": (1, 1, 1, 2)}, 224),
    "levit_128s": ({}, 224),
    "mobilevit_xxs": ({}, 64),
    "eva02_tiny_patch14_224": ({"img_size": 56, "depth": 2}, 56),
    "beit_base_patch16_224": ({"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 4}, 64),
}

WITHOUT_HEADS = {"convnext_tiny", "mixer_s32_224"}
