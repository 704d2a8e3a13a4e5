"""The table from operations to their rules for shadows; to support an operation, add an entry."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from fairpruner.discovery.rules.contracting import attention, convolution, matmul
from fairpruner.discovery.rules.mixing import (
    batch_norm,
    elementwise,
    gathered,
    glu,
    group_norm,
    layer_norm,
    pooling,
    reduction,
    sampled,
)
from fairpruner.discovery.rules.moving import (
    copied,
    embedding,
    movement,
    packed,
    restrided,
    to_complex,
    to_real,
    unchanged,
)
from fairpruner.discovery.rules.operation import Operation, Rule, fresh, no_rule, number
from fairpruner.models.torch_private import is_in_place, operation_name

__all__ = ["FOLLOW_BUFFERS", "Operation", "rule_for"]

_GROUPS: dict[Rule, str] = {
    movement: (  # torch's product with a vector squeezes in place
        "view _unsafe_view reshape cat stack constant_pad_nd index index_select roll flip repeat gather"
        " pixel_shuffle pixel_unshuffle channel_shuffle rot90 tril triu squeeze unsqueeze t transpose"
        " unsafe_split unsafe_split_with_sizes unsafe_chunk"
    ),
    unchanged: "clone _to_copy contiguous lift_fresh dropout native_dropout masked_fill",
    fresh: (
        "new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like rand_like randn_like"
        " zero fill"
    ),
    number: "_local_scalar_dense",
    copied: "copy",
    packed: "_pack_padded_sequence",
    restrided: "as_strided",
    embedding: "embedding",
    to_complex: "view_as_complex",
    to_real: "view_as_real",
    gathered: "index_add index_put scatter scatter_add scatter_reduce",
    sampled: "grid_sampler_2d grid_sampler_3d cudnn_grid_sampler roi_align ps_roi_align roi_pool",
    glu: "glu",
    elementwise: (
        "_weight_norm_interface hardswish leaky_relu log_sigmoid_forward rrelu_with_noise _prelu_kernel"
        " addcmul addcdiv lerp"
    ),
    reduction(1): "sum mean amax amin logsumexp var std var_mean prod any all max min",
    reduction(2): "linalg_vector_norm",
    reduction(1, keeps_shape=True): "_softmax _safe_softmax _log_softmax cumsum",
    pooling(1): (
        "avg_pool1d max_pool1d adaptive_avg_pool1d upsample_nearest1d upsample_linear1d reflection_pad1d"
        " replication_pad1d"
    ),
    pooling(2): (
        "avg_pool2d max_pool2d_with_indices _adaptive_avg_pool2d adaptive_max_pool2d upsample_nearest2d"
        " upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"
        " reflection_pad2d replication_pad2d"
    ),
    pooling(3): (
        "avg_pool3d max_pool3d_with_indices _adaptive_avg_pool3d adaptive_max_pool3d upsample_nearest3d"
        " upsample_trilinear3d replication_pad3d"
    ),
    batch_norm: (
        "native_batch_norm _native_batch_norm_legit_no_training _native_batch_norm_legit cudnn_batch_norm"
        " miopen_batch_norm _batch_norm_no_update"
    ),
    layer_norm: "native_layer_norm _fused_rms_norm",
    group_norm: "native_group_norm",
    matmul(0): "mm bmm",
    matmul(1): "addmm baddbmm",
    convolution: "convolution",
    attention: (
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention"
        " _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
        " _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math_for_mps"
    ),
}
# Rules that also apply where only buffers meet: what they compute may meet units later.
FOLLOW_BUFFERS = (movement, unchanged, elementwise)
OPERATION_RULES: dict[str, Rule] = {name: rule for rule, names in _GROUPS.items() for name in names.split()}


@cache
def rule_for(func: Any) -> Rule:
    """The rule of an operation: by its name, else by its tags in torch, else `no_rule`."""
    name = operation_name(func)
    plain = name.removesuffix("_") if is_in_place(func) else name  # relu_ is relu
    if plain in OPERATION_RULES:
        return OPERATION_RULES[plain]
    if func.is_view:
        return movement
    forms = getattr(torch.ops.aten, plain, func.overloadpacket)
    if any(torch.Tag.pointwise in getattr(forms, overload).tags for overload in forms.overloads()):
        return elementwise
    return no_rule
