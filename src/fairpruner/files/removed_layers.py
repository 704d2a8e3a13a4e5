"""Layers of a Hugging Face model that were removed whole leave their list, and its configuration follows.

In memory a removed layer stays as a module without weights, so that the names of all tensors stay. A folder
holds the layers that are left, numbered anew, as in any other model of fewer layers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fairpruner.models.removed import PassesInput, Removed

# What configurations call the number of layers.
LAYERS = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")


def without_removed_layers(small: Any) -> Any:
    """A model that shares all tensors with `small` and whose lists of layers hold only those that are left;
    `small` itself if no layer was removed, or if its configuration cannot describe the rest.
    """
    paths = [path for path, _ in _lists(small)]
    if not paths:
        return small
    shared: dict[int, Any] = {id(t): t for t in (*small.parameters(), *small.buffers())}
    compact = copy.deepcopy(small, shared)
    for path in paths:
        _drop(compact.get_submodule(path), compact.config)
    return compact if _describes(compact.config, compact) else small


def _describes(config: Any, model: Any) -> bool:
    """Whether a configuration gives a model with all these tensors: some name the numbers of layers that
    differ from others, which would have to follow.
    """
    config = copy.deepcopy(config)
    config.__dict__.pop("pruned", None)
    try:
        with torch.device("meta"):
            built = getattr(type(model), "unpruned", type(model))(config)
    except Exception:  # the user's code may raise anything at numbers that do not fit each other
        return False
    return bool(model.state_dict().keys() <= built.state_dict().keys())


def _lists(small: Any) -> Iterator[tuple[str, nn.ModuleList]]:
    """The lists of layers that lost some, and whose length one number of the configuration is."""
    for path, module in small.named_modules():
        if not isinstance(module, nn.ModuleList) or not any(isinstance(one, PassesInput) for one in module):
            continue
        if len(list(_numbers(small.config, len(module)))) == 1:
            yield path, module


def _numbers(config: Any, length: int) -> Iterator[tuple[Any, str]]:
    """The parts of a configuration and their names of a number of layers that equals a length."""
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        names = dict.fromkeys(part.attribute_map.get(n, n) for n in LAYERS if hasattr(part, n))
        yield from ((part, name) for name in names if getattr(part, name) == length)


def _drop(layers: nn.ModuleList, config: Any) -> None:
    """Remove the layers that pass their input on, from a list and from a configuration."""
    part, name = next(_numbers(config, len(layers)))
    stays = [i for i, layer in enumerate(layers) if not isinstance(layer, PassesInput)]
    for key, value in list(vars(part).items()):
        if isinstance(value, (list, tuple)) and len(value) == len(layers):  # layer_types and their like
            setattr(part, key, type(value)(value[i] for i in stays))
    setattr(part, name, len(stays))
    for i in sorted(set(range(len(layers))) - set(stays), reverse=True):
        del layers[i]
    for now, before in enumerate(stays):
        for module in layers[now].modules():
            if vars(module).get("layer_idx") == before:
                module.layer_idx = now  # type: ignore[assignment]


def removed_modules(model: nn.Module) -> list[dict[str, Any]]:
    """The stand-ins of a model, as plain values: where each is and what it returns."""
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
