"""Operations that move elements: each is run on the id maps themselves, so any reshaping is exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fairpruner.discovery.failing import OUT_OF_MEMORY
from fairpruner.discovery.ids import NONE, Usage
from fairpruner.discovery.rules.operation import Operation, unknown
from fairpruner.discovery.shadow import IdMap, Shadow
from fairpruner.models.torch_private import is_in_place, tree_map_only


def movement(op: Operation) -> None:
    """view, permute, cat, index, pad, …"""
    shadows = [op.shadow(t) for t in op.tensors]
    weight = all(s.weight or not s.maps for s in shadows)
    if op.name == "cat" and weight:
        # A buffer concatenated with weights is a part of a weight, as the zero bias of keys in a fused qkv.
        shadows = [
            s if s.maps else op.recorder.named_shadow(t) for s, t in zip(shadows, op.tensors, strict=True)
        ]
    depth = max(len(s.maps) for s in shadows)
    try:
        moved = [
            _moved(op, {id(t): _layer(t, s, k) for t, s in zip(op.tensors, shadows, strict=True)})
            for k in range(depth)
        ]
    except (RuntimeError, NotImplementedError, TypeError) as error:
        # The operation does not take integers, or wants other strides.
        if any(words in str(error) for words in OUT_OF_MEMORY):
            raise
        return unknown(op)
    if any(
        result.shape != idmap.shape for maps in moved for result, idmap in zip(op.results, maps, strict=True)
    ):
        return unknown(op)
    for position, result in enumerate(op.results):
        op.put([maps[position] for maps in moved], weight, result)
    return None


def _layer(tensor: torch.Tensor, shadow: Shadow, position: int) -> IdMap:
    """The map that stands for a tensor: all NONE where it has no map, itself where it holds indices."""
    if position < len(shadow.maps):
        return shadow.maps[position]
    if not shadow.maps and not tensor.is_floating_point():
        return tensor.cpu()
    return torch.zeros((), dtype=torch.int64).expand(tensor.shape)


def _moved(op: Operation, stand_in: dict[int, IdMap]) -> list[IdMap]:
    # Aliases of the maps, since squeeze_ changes what it is given.
    args, kwargs = tree_map_only(torch.Tensor, lambda t: stand_in[id(t)][...], (op.args, op.kwargs))
    kwargs.pop("memory_format", None)
    run = {
        "view": _reshape,
        "_unsafe_view": _reshape,
        "reshape": _reshape,
        "cat": _cat,
        "constant_pad_nd": _pad,
    }.get(op.name, op.func)
    moved = run(*args, **kwargs)
    return list(moved) if isinstance(moved, (tuple, list)) else [moved]


def _reshape(idmap: IdMap, shape: Sequence[int]) -> IdMap:
    return idmap.reshape(shape)


def _pad(idmap: IdMap, pad: Sequence[int], value: Any = 0) -> IdMap:
    return torch.constant_pad_nd(idmap, list(pad), NONE)


def _cat(maps: Sequence[IdMap], dim: int = 0) -> IdMap:
    """Concatenate without writing out the dimensions along which no map changes."""
    maps = [idmap for idmap in maps if idmap.shape != (0,)]
    dim %= maps[0].ndim
    shape = list(maps[0].shape)
    shape[dim] = sum(idmap.shape[dim] for idmap in maps)
    flat = [d for d in range(len(shape)) if d != dim and all(idmap.stride(d) == 0 for idmap in maps)]
    for d in flat:
        maps = [idmap.narrow(d, 0, min(1, idmap.shape[d])) for idmap in maps]
    return torch.cat(list(maps), dim).expand(shape)


def unchanged(op: Operation) -> None:
    """clone, dropout in eval mode, conversions: the result is the first argument, element by element."""
    op.recorder.put(op.result, op.shadow(op.args[0]))


def copied(op: Operation) -> None:
    """copy_ into a whole tensor: it takes the shadow of the source. A part of a tensor is not followed."""
    target, source = op.args[:2]
    if not is_whole(target):
        return unknown(op)
    return op.put([idmap.expand(target.shape) for idmap in op.shadow(source).maps], result=target)


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of its storage, rather than a view of a part."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def restrided(op: Operation) -> None:
    """as_strided, as pooling uses it: only the strides of dimensions of length one change."""
    plain = torch.empty(op.result.shape, device="meta").stride()
    same = all(n == 1 or a == b for n, a, b in zip(op.result.shape, op.result.stride(), plain, strict=True))
    return None if is_in_place(op.func) and same else unknown(op)


def embedding(op: Operation) -> None:
    """The data chooses rows, so only columns are units."""
    table = op.args[0]
    columns = op.algebra.single(op.shadow(table).maps, 1, table.shape[1])
    op.ids.mark(columns, Usage.WRITE)
    op.put([torch.from_numpy(columns).expand(op.result.shape)])


def to_complex(op: Operation) -> None:
    """A pair of real numbers becomes one complex number."""
    shadow = op.shadow(op.args[0])
    pairs = op.algebra.reduce_all(shadow.maps, (op.args[0].ndim - 1,))
    op.put([idmap.squeeze(-1) for idmap in pairs], shadow.weight)


def to_real(op: Operation) -> None:
    shadow = op.shadow(op.args[0])
    op.put([idmap.unsqueeze(-1).expand(op.result.shape) for idmap in shadow.maps], shadow.weight)
