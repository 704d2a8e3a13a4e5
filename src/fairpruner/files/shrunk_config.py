"""The numbers of a Hugging Face configuration after a cut, guessed from equal numbers.

A configuration does not say which of its numbers is the size of which space. So every number that equals the
size of some space becomes what such a space keeps: with `intermediate_size: 64` and hidden spaces of 64 units
that keep 48, it becomes 48. The guess is wrong if spaces of equal size keep different numbers, so a model is
built from it and compared.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from fairpruner.core.plan import Plan
from fairpruner.core.units import KINDS

# What configurations call the number of hidden units of a block, of its heads, and of its routed experts.
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

Kept = Mapping[int, int]  # size of a space -> how many units such a space keeps


def shrunk(config: Any, plan: Plan) -> Any:
    """A copy of a configuration with the numbers that the plan leaves, as far as they can be guessed."""
    kept: dict[str, dict[int, int]] = {kind: {} for kind in KINDS}
    for name, left in plan.kept.items():
        if left:  # else it went with its block
            kept[plan.spaces[name].kind][plan.spaces[name].size] = left
    config = copy.deepcopy(config)
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        _shrink_hidden(part, kept["hidden"])
        _shrink_experts(part, kept["expert"])
        _shrink_heads(part, kept["head"])
        _shrink_stream(part, kept["stream"])
    return config


def _shrink_stream(part: Any, kept: Kept) -> None:
    """A narrower stream: heads keep their width, and epsilons of norms grow as its norms were rescaled."""
    width = getattr(part, "hidden_size", 0)
    if kept.get(width, width) == width:
        return
    if not isinstance(getattr(type(part), "head_dim", None), property):
        part.head_dim = _head_width(part)
    for name in _own_names(part, EPSILONS):
        setattr(part, name, getattr(part, name) * width / kept[width])
    part.hidden_size = kept[width]


def _shrink_hidden(part: Any, kept: Kept) -> None:
    for name in _own_names(part, HIDDEN):
        width = getattr(part, name) or 4 * part.hidden_size  # GPT-2's default
        if type(width) is int and width in kept:
            setattr(part, name, kept[width])


def _shrink_experts(part: Any, kept: Kept) -> None:
    for name in _own_names(part, EXPERTS):
        if getattr(part, name) in kept:
            setattr(part, name, kept[getattr(part, name)])


def _shrink_heads(part: Any, kept: Kept) -> None:
    """Fewer heads of the same width: `head_dim` then no longer follows from the other numbers."""
    heads = {name: getattr(part, name) for name in _own_names(part, HEADS)}
    if not all(type(count) is int or count is None for count in heads.values()):
        return  # one number for each stage, as Swin and SegFormer have: no number says what each block keeps
    width = _head_width(part)
    for name, count in heads.items():
        units = heads.get("num_key_value_heads") or count  # a unit is a key-value head with its query heads
        if count is not None and units in kept and kept[units] < units:
            setattr(part, name, count * kept[units] // units)
            if not isinstance(getattr(type(part), "head_dim", None), property):  # Falcon's cannot be set
                part.head_dim = width


def _head_width(part: Any) -> int:
    width = getattr(part, "head_dim", None)
    return int(width or getattr(part, "hidden_size", 0) // (getattr(part, "num_attention_heads", None) or 1))


def _own_names(config: Any, names: tuple[str, ...]) -> Iterator[str]:
    """Those of the names that a configuration has, each of its numbers once: some go by two names."""
    return iter(
        dict.fromkeys(config.attribute_map.get(name, name) for name in names if hasattr(config, name))
    )
