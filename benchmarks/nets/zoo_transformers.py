"""Families of transformers for the zoo: classes, small configurations and examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Example = dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    """A model class, its configuration class and options, and what the model is called with."""

    model: str
    config: str
    options: Callable[[], dict[str, Any]]
    example: Callable[[], Example]


def tokens(length: int = 7) -> Example:
    return {"input_ids": torch.randint(5, 90, (1, length))}


def both() -> Example:
    return {**tokens(), "decoder_input_ids": torch.randint(5, 90, (1, 5))}


def pixels(size: int = 32) -> Example:
    return {"pixel_values": torch.randn(1, 3, size, size)}


def waves() -> Example:
    return {"input_values": torch.randn(1, 800)}


IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
DECODER = {**TEXT, **IDS, "num_key_value_heads": 2}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
SEQUENCES = {  # encoder and decoder
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
    **IDS,
}
SPEECH = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
DETECTION = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_queries": 5,
    "num_labels": 4,
}
RESNET = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 24, 32, 40],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage2", "stage3", "stage4"],
}


def family(
    model: str, config: str, options: dict[str, Any], example: Callable[[], Example] = tokens
) -> Family:
    return Family(model, f"{config}Config", lambda: dict(options), example)


def causal(name: str, **options: Any) -> Family:
    return family(f"{name}ForCausalLM", name, {**DECODER, **options})


def classifier(name: str, **options: Any) -> Family:
    return family(f"{name}ForSequenceClassification", name, {**TEXT, **options})


def image_classifier(name: str, **options: Any) -> Family:
    return family(f"{name}ForImageClassification", name, options, pixels)


def _image_and_text(
    images: Callable[[], Tensor], count: int, token: int, **more: Any
) -> Callable[[], Example]:
    """An example with `count` image tokens before a few words."""

    def example() -> Example:
        words = torch.randint(5, 90, (1, 6))
        ids = torch.cat([torch.full((1, count), token), words], 1)
        return {"input_ids": ids, "pixel_values": images(), **{k: v() for k, v in more.items()}}

    return example


TRANSFORMERS: dict[str, Family] = {
    # text
    "albert": classifier("Albert", embedding_size=16),
    "bert": classifier("Bert"),
    "deberta_v2": classifier("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "distilbert": family(
        "DistilBertForSequenceClassification",
        "DistilBert",
        {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    ),
    "electra": classifier("Electra", embedding_size=16),
    "modernbert": classifier(
        "ModernBert", **IDS, cls_token_id=1, sep_token_id=2, global_attn_every_n_layers=2
    ),
    "mpnet": classifier("MPNet"),
    "roberta": classifier("Roberta"),
    "xlnet": family(
        "XLNetForSequenceClassification",
        "XLNet",
        {"vocab_size": 99, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
    ),
    "bart": family("BartForConditionalGeneration", "Bart", SEQUENCES, both),
    "t5": family(
        "T5ForConditionalGeneration",
        "T5",
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
        both,
    ),
    # language models
    "bloom": family(
        "BloomForCausalLM", "Bloom", {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4, **IDS}
    ),
    "cohere": causal("Cohere"),
    "falcon": family(
        "FalconForCausalLM",
        "Falcon",
        {
            "vocab_size": 99,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "multi_query": False,
            **IDS,
        },
    ),
    "gemma": causal("Gemma", head_dim=8),
    "gemma2": causal("Gemma2", head_dim=8),
    "gemma3": family("Gemma3ForCausalLM", "Gemma3Text", {**DECODER, "head_dim": 8}),
    "glm4": causal("Glm4", head_dim=8),
    "gpt2": family(
        "GPT2LMHeadModel",
        "GPT2",
        {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **IDS},
    ),
    "gpt_neo": family(
        "GPTNeoForCausalLM",
        "GPTNeo",
        {
            "vocab_size": 99,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "intermediate_size": 48,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 64,
            **IDS,
        },
    ),
    "gpt_neox": causal("GPTNeoX"),
    "gptj": family(
        "GPTJForCausalLM",
        "GPTJ",
        {
            "vocab_size": 99,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "rotary_dim": 4,
            **IDS,
        },
    ),
    "granite": causal("Granite"),
    "llama": causal("Llama"),
    "mistral": causal("Mistral"),
    "mpt": family(
        "MptForCausalLM",
        "Mpt",
        {"vocab_size": 99, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, **IDS},
    ),
    "olmo2": causal("Olmo2"),
    "opt": family(
        "OPTForCausalLM",
        "OPT",
        {
            "vocab_size": 99,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 48,
            "max_position_embeddings": 64,
            **IDS,
        },
    ),
    "phi": causal("Phi"),
    "phi3": causal("Phi3"),
    "qwen2": causal("Qwen2"),
    "qwen3": causal("Qwen3", head_dim=8),
    "smollm3": causal("SmolLM3"),
    "stablelm": causal("StableLm"),
    "starcoder2": causal("Starcoder2"),
    # state space
    "mamba": family(
        "MambaForCausalLM",
        "Mamba",
        {"vocab_size": 99, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, **IDS},
    ),
    "mamba2": family(
        "Mamba2ForCausalLM",
        "Mamba2",
        {
            "vocab_size": 99,
            "hidden_size": 32,
            "state_size": 8,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 4,
            **IDS,
        },
    ),
    # vision
    "beit": image_classifier("Beit", **VISION),
    "convnext": image_classifier(
        "ConvNext", hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1, 1], image_size=32
    ),
    "convnextv2": image_classifier(
        "ConvNextV2", hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1, 1], image_size=32
    ),
    "deit": image_classifier("DeiT", **VISION),
    "dinov2": image_classifier("Dinov2", **VISION),
    "dinov3": family("DINOv3ViTModel", "DINOv3ViT", {**VISION, "num_register_tokens": 2}, pixels),
    "hiera": image_classifier(
        "Hiera", image_size=[32, 32], embed_dim=8, depths=[1, 1, 1], num_heads=[1, 2, 4], num_query_pool=2
    ),
    "pvt_v2": image_classifier(
        "PvtV2",
        image_size=32,
        hidden_sizes=[8, 16, 24, 32],
        num_attention_heads=[1, 2, 3, 4],
        depths=[1, 1, 1, 1],
        mlp_ratios=[2, 2, 2, 2],
    ),
    "resnet": image_classifier(
        "ResNet", embedding_size=16, hidden_sizes=[16, 24, 32, 40], depths=[1, 1, 1, 1]
    ),
    "segformer": family(
        "SegformerForSemanticSegmentation",
        "Segformer",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [16, 32],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [2, 4],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 24,
        },
        pixels,
    ),
    "swin": image_classifier(
        "Swin", image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    ),
    "swinv2": image_classifier(
        "Swinv2", image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    ),
    "vit": image_classifier("ViT", **VISION),
    # vision and language
    "blip": family(
        "BlipForConditionalGeneration",
        "Blip",
        {
            "text_config": {**TEXT, **IDS, "encoder_hidden_size": 32},
            "vision_config": VISION,
            "projection_dim": 16,
        },
        lambda: {**tokens(), **pixels()},
    ),
    "clip": family(
        "CLIPModel",
        "CLIP",
        {"text_config": {**TEXT, **IDS}, "vision_config": VISION, "projection_dim": 16},
        lambda: {**tokens(), **pixels()},
    ),
    "siglip": family(
        "SiglipModel",
        "Siglip",
        {"text_config": {**TEXT, **IDS}, "vision_config": VISION},
        lambda: {**tokens(), **pixels()},
    ),
    "llava": family(
        "LlavaForConditionalGeneration",
        "Llava",
        {
            "text_config": {"model_type": "llama", **DECODER},
            "vision_config": {"model_type": "clip_vision_model", **VISION},
            "image_token_id": 98,
            "vision_feature_layer": -1,
        },
        _image_and_text(lambda: torch.randn(1, 3, 32, 32), 16, 98),
    ),
    "paligemma": family(
        "PaliGemmaForConditionalGeneration",
        "PaliGemma",
        {
            "text_config": {"model_type": "gemma", **DECODER, "head_dim": 8},
            "vision_config": {"model_type": "siglip_vision_model", **VISION},
            "image_token_id": 98,
            "projection_dim": 32,
        },
        _image_and_text(
            lambda: torch.randn(1, 3, 32, 32), 16, 98, token_type_ids=lambda: torch.zeros(1, 22).long()
        ),
    ),
    "qwen2_vl": family(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VL",
        {
            "text_config": {
                **DECODER,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
            },
            "vision_config": {
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 32,
                "num_heads": 4,
                "mlp_ratio": 2,
                "patch_size": 8,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
            "image_token_id": 98,
            "video_token_id": 97,
            "vision_start_token_id": 96,
            "vision_end_token_id": 95,
        },
        _image_and_text(
            lambda: torch.randn(16, 3 * 2 * 8 * 8),
            4,
            98,
            image_grid_thw=lambda: torch.tensor([[1, 4, 4]]),
            mm_token_type_ids=lambda: torch.tensor([[1] * 4 + [0] * 6]),
        ),
    ),
    "smolvlm": family(
        "SmolVLMForConditionalGeneration",
        "SmolVLM",
        {
            "text_config": {"model_type": "llama", **DECODER},
            "vision_config": VISION,
            "image_token_id": 98,
            "scale_factor": 2,
        },
        _image_and_text(lambda: torch.randn(1, 1, 3, 32, 32), 4, 98),
    ),
    # speech
    "hubert": family("HubertForCTC", "Hubert", SPEECH, waves),
    "wav2vec2": family("Wav2Vec2ForCTC", "Wav2Vec2", SPEECH, waves),
    "wav2vec2_conformer": family(
        "Wav2Vec2ConformerForCTC", "Wav2Vec2Conformer", {**SPEECH, "conv_depthwise_kernel_size": 5}, waves
    ),
    "wavlm": family("WavLMForCTC", "WavLM", SPEECH, waves),
    "whisper": family(
        "WhisperForConditionalGeneration",
        "Whisper",
        {**SEQUENCES, "max_source_positions": 20, "max_target_positions": 20, "num_mel_bins": 8},
        lambda: {
            "input_features": torch.randn(1, 8, 40),
            "decoder_input_ids": torch.randint(5, 90, (1, 5)),
        },
    ),
    # segmentation and detection
    "sam": family(
        "SamModel",
        "Sam",
        {
            "vision_config": {
                "hidden_size": 32,
                "output_channels": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 64,
                "patch_size": 8,
                "window_size": 4,
                "global_attn_indexes": [1],
                "mlp_dim": 48,
                "num_pos_feats": 8,
            },
            "prompt_encoder_config": {"hidden_size": 16, "image_size": 64, "patch_size": 8},
            "mask_decoder_config": {
                "hidden_size": 16,
                "mlp_dim": 24,
                "num_attention_heads": 2,
                "iou_head_hidden_dim": 16,
            },
        },
        lambda: {**pixels(64), "input_points": torch.rand(1, 1, 1, 2) * 64},
    ),
    "mask2former": family(
        "Mask2FormerForUniversalSegmentation",
        "Mask2Former",
        {
            "backbone_config": {
                "model_type": "swin",
                "image_size": 64,
                "patch_size": 4,
                "embed_dim": 16,
                "depths": [1, 1, 1, 1],
                "num_heads": [2, 2, 4, 4],
                "window_size": 2,
                "out_features": ["stage1", "stage2", "stage3", "stage4"],
            },
            "feature_size": 32,  # its group norms have 32 groups
            "mask_feature_size": 32,
            "hidden_dim": 32,
            "encoder_feedforward_dim": 24,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "num_attention_heads": 2,
            "dim_feedforward": 24,
            "num_queries": 5,
            "num_labels": 3,
        },
        lambda: pixels(64),
    ),
    "detr": family(
        "DetrForObjectDetection",
        "Detr",
        {
            **DETECTION,
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone_config": RESNET,
        },
        lambda: pixels(64),
    ),
    "rt_detr": family(
        "RTDetrForObjectDetection",
        "RTDetr",
        {
            "backbone_config": {**RESNET, "model_type": "rt_detr_resnet", "layer_type": "basic"},
            "d_model": 32,
            "encoder_hidden_dim": 32,
            "encoder_in_channels": [24, 32, 40],
            "decoder_in_channels": [32, 32, 32],
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "num_queries": 6,
            "num_labels": 4,
            "hidden_expansion": 0.5,
        },
        lambda: pixels(64),
    ),
    "yolos": family("YolosForObjectDetection", "Yolos", {**VISION, "image_size": [32, 32]}, pixels),
    # time series
    "patchtst": family(
        "PatchTSTForPrediction",
        "PatchTST",
        {
            "num_input_channels": 3,
            "context_length": 32,
            "patch_length": 8,
            "patch_stride": 8,
            "d_model": 32,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "ffn_dim": 48,
            "prediction_length": 4,
        },
        lambda: {"past_values": torch.randn(1, 32, 3)},
    ),
    "informer": family(
        "InformerModel",
        "Informer",
        {
            "prediction_length": 4,
            "context_length": 8,
            "lags_sequence": [1, 2],
            "num_time_features": 2,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
        },
        lambda: {
            "past_values": torch.randn(1, 10),
            "past_time_features": torch.randn(1, 10, 2),
            "past_observed_mask": torch.ones(1, 10),
            "future_values": torch.randn(1, 4),
            "future_time_features": torch.randn(1, 4, 2),
        },
    ),
}
