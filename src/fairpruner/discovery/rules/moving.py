"""Operations that move elements about: the operation itself, run on the shadow, so that any reshaping is
exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from fairpruner.discovery.ids import NONE, Use
from fairpruner.discovery.rules.call import Call, unknown
from fairpruner.discovery.shadow import Layer, Shadow


def movement(call: Call) -> None:
    """view, permute, cat, index, pad, …: exact by construction."""
    shadows = [call.shadow(t) for t in call.tensors]
    weight = all(s.weight or not s.layers for s in shadows)
    if call.name == "cat" and weight:
        # A buffer among weights is a part of one: the zero bias of the keys in a fused projection.
        shadows = [
            s if s.layers else call.tracer.slots_of(t) for s, t in zip(shadows, call.tensors, strict=True)
        ]
    depth = max(len(s.layers) for s in shadows)
    try:
        moved = [
            _moved(call, {id(t): _layer(t, s, k) for t, s in zip(call.tensors, shadows, strict=True)})
            for k in range(depth)
        ]
    except Exception:  # an operation that does not take integers, or another layout of strides: be safe
        return unknown(call)
    if any(
        result.shape != layer.shape
        for layers in moved
        for result, layer in zip(call.results, layers, strict=True)
    ):
        return unknown(call)
    for position, result in enumerate(call.results):
        call.put([layers[position] for layers in moved], weight, result)
    return None


def _layer(tensor: torch.Tensor, shadow: Shadow, position: int) -> Layer:
    """A source's layer; what has no id is NONE, but whole-number tensors without a shadow are indices and
    stay themselves.
    """
    if position < len(shadow.layers):
        return shadow.layers[position]
    if not shadow.layers and not tensor.is_floating_point():
        return tensor.cpu()
    return torch.zeros((), dtype=torch.int64).expand(tensor.shape)


def _moved(call: Call, stand_in: dict[int, Layer]) -> list[Layer]:
    args, kwargs = tree_map_only(
        torch.Tensor, lambda t: stand_in[id(t)][...], (call.args, call.kwargs)
    )  # aliases: squeeze_ changes what it is given
    kwargs.pop("memory_format", None)
    run = {
        "view": _reshape,
        "_unsafe_view": _reshape,
        "reshape": _reshape,
        "cat": _cat,
        "constant_pad_nd": _pad,
    }.get(call.name, call.func)
    moved = run(*args, **kwargs)
    return list(moved) if isinstance(moved, (tuple, list)) else [moved]


def _reshape(layer: Layer, shape: Sequence[int]) -> Layer:
    return layer.reshape(shape)


def _pad(layer: Layer, pad: Sequence[int], value: Any = 0) -> Layer:
    return torch.constant_pad_nd(layer, list(pad), NONE)


def _cat(layers: Sequence[Layer], dim: int = 0) -> Layer:
    """Concatenate without writing out the dimensions along which no layer changes."""
    layers = [layer for layer in layers if layer.shape != (0,)]
    dim %= layers[0].ndim
    shape = list(layers[0].shape)
    shape[dim] = sum(layer.shape[dim] for layer in layers)
    flat = [d for d in range(len(shape)) if d != dim and all(layer.stride(d) == 0 for layer in layers)]
    for d in flat:
        layers = [layer.narrow(d, 0, min(1, layer.shape[d])) for layer in layers]
    return torch.cat(list(layers), dim).expand(shape)


def unchanged(call: Call) -> None:
    """clone, dropout in eval mode, conversions: the result is the first argument, element by element."""
    call.tracer.put(call.result, call.shadow(call.args[0]))


def copied(call: Call) -> None:
    """Writing into a tensor: into a whole one the source's shadow moves in, into a part of one nothing is
    known.
    """
    target, source = call.args[:2]
    if not is_whole(target):
        return unknown(call)
    return call.put([layer.expand(target.shape) for layer in call.shadow(source).layers], result=target)


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of its storage, rather than a view of a part."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def restrided(call: Call) -> None:
    """Harmless only where it changes the strides of dimensions of length one, as pooling does."""
    plain = torch.empty(call.result.shape, device="meta").stride()
    same = all(
        n == 1 or a == b for n, a, b in zip(call.result.shape, call.result.stride(), plain, strict=True)
    )
    return None if call.func._schema.is_mutable and same else unknown(call)


def embedding(call: Call) -> None:
    """Rows are looked up by data; only the columns are units."""
    table = call.args[0]
    columns = call.algebra.single(call.shadow(table).layers, 1, table.shape[1])
    call.ids.mark(columns, Use.WRITE)
    call.put([torch.from_numpy(columns).expand(call.result.shape)])


def to_complex(call: Call) -> None:
    """A pair of real elements becomes one number."""
    shadow = call.shadow(call.args[0])
    pairs = call.algebra.reduce_all(shadow.layers, (call.args[0].ndim - 1,))
    call.put([layer.squeeze(-1) for layer in pairs], shadow.weight)


def to_real(call: Call) -> None:
    shadow = call.shadow(call.args[0])
    call.put([layer.unsqueeze(-1).expand(call.result.shape) for layer in shadow.layers], shadow.weight)
