"""Saving a Hugging Face model that lost whole layers as a model with fewer layers.

In memory a removed layer is replaced by a module without weights, so that the names of all tensors stay the
same. A saved folder has only the remaining layers, with new numbers, and a configuration with their number.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fairpruner.models.copying import deep_copy
from fairpruner.models.removed import PassesInput, Removed

# What configurations call the number of layers.
LAYERS = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")


def without_removed_layers(small: Any) -> Any:
    """A copy of `small` whose lists of layers have only the remaining layers; it shares all tensors.

    It is `small` itself if no layer was removed, or if no configuration describes the remaining layers.
    """
    paths = [path for path, _ in _lists(small)]
    if not paths:
        return small
    shared: dict[int, Any] = {id(t): t for t in (*small.parameters(), *small.buffers())}
    compact: Any = deep_copy(small, shared)
    for path in paths:
        _drop(compact.get_submodule(path), compact.config)
    return compact if _describes(compact.config, compact) else small


def _describes(config: Any, model: Any) -> bool:
    """Whether a configuration gives a model that has all tensors of `model`.

    It does not if it lists the numbers of special layers: these numbers would have to change too.
    """
    config = copy.deepcopy(config)
    config.__dict__.pop("pruned", None)
    try:
        with torch.device("meta"):
            built = getattr(type(model), "unpruned", type(model))(config)
    except Exception:  # the model's code may raise anything if numbers do not fit each other
        return False
    return bool(model.state_dict().keys() <= built.state_dict().keys())


def _lists(small: Any) -> Iterator[tuple[str, nn.ModuleList]]:
    """The lists that lost layers, if exactly one number of the configuration is their length."""
    for path, module in small.named_modules():
        if not isinstance(module, nn.ModuleList) or not any(isinstance(one, PassesInput) for one in module):
            continue
        if len(list(_numbers(small.config, len(module)))) == 1:
            yield path, module


def _numbers(config: Any, length: int) -> Iterator[tuple[Any, str]]:
    """(part of the configuration, name) of every number of layers that equals `length`."""
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        names = dict.fromkeys(part.attribute_map.get(n, n) for n in LAYERS if hasattr(part, n))
        yield from ((part, name) for name in names if getattr(part, name) == length)


def _drop(layers: nn.ModuleList, config: Any) -> None:
    """Delete the removed layers from a list, and their entries and number from a configuration."""
    part, name = next(_numbers(config, len(layers)))
    stays = [i for i, layer in enumerate(layers) if not isinstance(layer, PassesInput)]
    for key, value in list(vars(part).items()):
        if isinstance(value, (list, tuple)) and len(value) == len(layers):  # one entry per layer: layer_types
            setattr(part, key, type(value)(value[i] for i in stays))
    setattr(part, name, len(stays))
    for i in sorted(set(range(len(layers))) - set(stays), reverse=True):
        del layers[i]
    for now, before in enumerate(stays):
        for module in layers[now].modules():
            if vars(module).get("layer_idx") == before:
                module.layer_idx = now  # type: ignore[assignment]


def removed_modules(model: nn.Module) -> list[dict[str, Any]]:
    """Path, behaviour and arguments of every module that replaced a removed one, as JSON values."""
    return [
        {
            "module": path,
            "by": "input" if isinstance(module, PassesInput) else "zeros",
            "argument": module.argument,
            "outputs": module.outputs,
        }
        for path, module in model.named_modules()
        if isinstance(module, Removed)
    ]
