"""The cache of keys and values that a language model of transformers fills while it generates."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairpruner.models.calling import call, evaluating
from fairpruner.models.removed import Removed


class CachedLayer(NamedTuple):
    """The attention of one layer: its module's path, and the bytes that it caches for one token."""

    module: str
    bytes: int


def cached_layers(model: nn.Module, example: Any) -> tuple[CachedLayer, ...]:
    """What each attention caches for one token, from one forward pass; empty for models without a cache.

    A removed attention is left out: it only counts tokens.
    """
    modules = {
        vars(module)["layer_idx"]: (path, module)
        for path, module in model.named_modules()
        if type(vars(module).get("layer_idx")) is int
    }
    if not modules:
        return ()
    with evaluating(model), torch.no_grad():
        output = call(model, example)
    layers = getattr(getattr(output, "past_key_values", None), "layers", ())
    found = []
    for number, layer in enumerate(layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if number not in modules or not isinstance(keys, Tensor) or not isinstance(values, Tensor):
            return ()  # another kind of memory, whose size does not depend on heads
        path, module = modules[number]
        if not isinstance(module, Removed):
            found.append(CachedLayer(path, _per_token(keys) + _per_token(values)))
    return tuple(found)


def _per_token(cached: Tensor) -> int:
    """The bytes of keys or values, [batch, heads, tokens, width], for one token of one text."""
    return cached.shape[1] * cached.shape[3] * cached.element_size()
