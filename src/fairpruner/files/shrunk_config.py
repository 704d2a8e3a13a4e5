"""The numbers of a Hugging Face configuration after a cut, guessed from equal numbers.

A configuration does not record which of its numbers is the size of which space. So every number that equals
the size of some space is replaced by the number of units that this space keeps. Example: hidden spaces of 64
units keep 48, so `intermediate_size: 64` becomes 48. The guess is wrong if spaces of equal size keep
different numbers. Therefore a model is built from the new configuration and compared (`pretrained_files`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from fairpruner.core.plan import Plan
from fairpruner.core.units import KINDS

# The names that configurations use for the hidden units of a block, its heads, epsilons and routed experts.
HIDDEN = (
    "intermediate_size",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "ffn_dim",
    "ffn_hidden_size",
    "d_ff",
    "hidden_dim",
    "n_inner",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
)
HEADS = ("num_attention_heads", "num_key_value_heads", "encoder_attention_heads", "decoder_attention_heads")
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

KeptBySize = Mapping[int, int]  # size of a space -> how many units such a space keeps


def shrunk(config: Any, plan: Plan) -> Any:
    """A copy of a configuration with the numbers that the plan keeps, as far as they can be guessed."""
    kept: dict[str, dict[int, int]] = {kind: {} for kind in KINDS}
    for name, left in plan.kept.items():
        if left:  # 0 units are left if the whole block was removed
            kept[plan.spaces[name].kind][plan.spaces[name].size] = left
    config = copy.deepcopy(config)
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        _shrink_hidden(part, kept["hidden"])
        _shrink_experts(part, kept["expert"])
        _shrink_heads(part, kept["head"])
        _shrink_stream(part, kept["stream"])
    return config


def _shrink_stream(part: Any, kept: KeptBySize) -> None:
    """Set a narrower residual stream: heads keep their width, and epsilons are those that `cut` set."""
    width = getattr(part, "hidden_size", 0)
    if kept.get(width, width) == width:
        return
    if not isinstance(getattr(type(part), "head_dim", None), property):
        part.head_dim = _head_width(part)
    for name in _own_names(part, EPSILONS):
        setattr(part, name, getattr(part, name) * width / kept[width])
    part.hidden_size = kept[width]


def _shrink_hidden(part: Any, kept: KeptBySize) -> None:
    for name in _own_names(part, HIDDEN):
        width = getattr(part, name) or 4 * part.hidden_size  # GPT-2's default
        if type(width) is int and width in kept:
            setattr(part, name, kept[width])


def _shrink_experts(part: Any, kept: KeptBySize) -> None:
    for name in _own_names(part, EXPERTS):
        if getattr(part, name) in kept:
            setattr(part, name, kept[getattr(part, name)])


def _shrink_heads(part: Any, kept: KeptBySize) -> None:
    """Set fewer heads of the same width; `head_dim` is set too, because it no longer equals width / heads."""
    heads = {name: getattr(part, name) for name in _own_names(part, HEADS)}
    if not all(type(count) is int or count is None for count in heads.values()):
        return  # a list has one number for each stage (Swin, SegFormer), but blocks of a stage may differ
    width = _head_width(part)
    if heads.get("num_key_value_heads") == 1:
        del heads["num_key_value_heads"]  # all query heads share it, and each of them is a unit
    for name, count in heads.items():
        units = heads.get("num_key_value_heads") or count  # a unit is a key-value head with its query heads
        if count is not None and units in kept and kept[units] < units:
            setattr(part, name, count * kept[units] // units)
            if not isinstance(getattr(type(part), "head_dim", None), property):  # Falcon computes it
                part.head_dim = width


def _head_width(part: Any) -> int:
    width = getattr(part, "head_dim", None)
    return int(width or getattr(part, "hidden_size", 0) // (getattr(part, "num_attention_heads", None) or 1))


def _own_names(config: Any, names: tuple[str, ...]) -> Iterator[str]:
    """The names that a configuration has; a number with two names is listed once."""
    return iter(
        dict.fromkeys(config.attribute_map.get(name, name) for name in names if hasattr(config, name))
    )
