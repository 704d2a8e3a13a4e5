"""Diffusion models for the zoo, small, and an example for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import nn


def _denoiser(name: str, inputs: Callable[[], dict[str, Any]], **options: Any) -> Any:
    def example() -> dict[str, Any]:
        return {**inputs(), "timestep": torch.tensor([7]), "return_dict": False}

    return lambda: getattr(diffusers, name)(**options), example


def _autoencoder() -> nn.Module:
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        block_out_channels=(16, 32),
        norm_num_groups=4,
        latent_channels=4,
        sample_size=32,
    )


DIFFUSERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "unet2d_condition": _denoiser(
        "UNet2DConditionModel",
        lambda: {"sample": torch.randn(1, 4, 16, 16), "encoder_hidden_states": torch.randn(1, 5, 24)},
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=24,
        attention_head_dim=4,
        norm_num_groups=4,
    ),
    "unet2d": _denoiser(
        "UNet2DModel",
        lambda: {"sample": torch.randn(1, 3, 16, 16)},
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=8,
    ),
    "dit": _denoiser(
        "DiTTransformer2DModel",
        lambda: {"hidden_states": torch.randn(1, 4, 8, 8), "class_labels": torch.tensor([3])},
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=10,
    ),
    "sd3": _denoiser(
        "SD3Transformer2DModel",
        lambda: {
            "hidden_states": torch.randn(1, 4, 8, 8),
            "encoder_hidden_states": torch.randn(1, 5, 24),
            "pooled_projections": torch.randn(1, 16),
        },
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=24,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=8,
    ),
    "autoencoder_kl": (
        _autoencoder,
        lambda: {"sample": torch.randn(1, 3, 32, 32), "return_dict": False},
    ),
}
