"""Operations that move elements: each is run on the id maps themselves, so any reshaping is exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fairpruner.discovery.ids import NONE, Usage, as_ids, compact
from fairpruner.discovery.rules.operation import Operation, no_rule
from fairpruner.discovery.shadow import EMPTY, IdMap, Shadow, extent
from fairpruner.models.calling import is_out_of_memory
from fairpruner.models.torch_private import base_of, is_in_place, tree_map_only

CHOOSING = ("index", "index_select", "gather")  # their further tensors are places in the first one


def movement(op: Operation) -> None:
    """view, permute, cat, index, pad, …"""
    shadows = [op.shadow(t) for t in op.tensors]
    if op.name in CHOOSING:
        for places in shadows[1:]:
            op.algebra.lock(places, f"chooses places in {op.name}")
        shadows[1:] = [EMPTY] * len(shadows[1:])
    buffer = not any(s.maps for s in shadows)
    weight = all(s.weight or not s.maps for s in shadows)
    if buffer or op.name == "cat":
        # A buffer or zeros become a part of what they are joined to: of a weight (the zero bias of keys in a
        # fused qkv) or of an activation (the initial state of a recurrence).
        held = [s if s.maps else op.shadow(t, buffers=True) for s, t in zip(shadows, op.tensors, strict=True)]
        joins_data = op.name == "cat" and not all(s.maps for s in held)  # an initial state beside an input
        dim = None if weight and not joins_data else op.option(1, "dim", 0)
        shadows = [s if s.maps else _along(h, dim) for s, h in zip(shadows, held, strict=True)]
    depth = max(len(s.maps) for s in shadows)
    try:
        moved = [
            _moved(op, {id(t): _stand_in(t, s, k) for t, s in zip(op.tensors, shadows, strict=True)})
            for k in range(depth)
        ]
    except (RuntimeError, NotImplementedError, TypeError) as error:
        # The operation does not take integers, or needs other strides.
        if is_out_of_memory(error):
            raise
        return no_rule(op)
    if any(
        result.shape != idmap.shape for maps in moved for result, idmap in zip(op.results, maps, strict=True)
    ):
        return no_rule(op)
    for position, result in enumerate(op.results):
        maps_of_result = tuple(compact(maps[position]) for maps in moved)
        op.recorder.put(result, Shadow(maps_of_result, weight, buffer))
    if op.name in ("split_with_sizes", "unsafe_split_with_sizes"):
        _note_sizes(op)
    return None


def _note_sizes(op: Operation) -> None:
    """Sizes into which a module splits its units may stand in one of its attributes."""
    dim = op.option(2, "dim", 0) % op.args[0].ndim
    parts = [[idmap for idmap in op.shadow(result).maps if _only_along(idmap, dim)] for result in op.results]
    if all(parts):
        op.recorder.count_parts(
            [op.algebra.single(maps, dim, t.shape[dim]) for maps, t in zip(parts, op.results, strict=True)]
        )


def _only_along(idmap: IdMap, dim: int) -> bool:
    return [d for d, changes in enumerate(extent(idmap)) if changes] == [dim]


def _along(shadow: Shadow, dim: int | None) -> Shadow:
    """The shadow with the maps along one dimension alone, since an activation mostly has just one map."""
    return (
        shadow
        if dim is None
        else replace(shadow, maps=tuple(idmap for idmap in shadow.maps if extent(idmap)[dim]))
    )


def _stand_in(tensor: torch.Tensor, shadow: Shadow, position: int) -> IdMap:
    """The map that stands for a tensor: all NONE where it has no map, itself where it holds indices."""
    if position < len(shadow.maps):
        return shadow.maps[position]
    if not shadow.maps and not tensor.is_floating_point():
        return tensor.cpu()
    return torch.zeros((), dtype=torch.int64, device="cpu").expand(tensor.shape)


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
    """Padding holds no unit, unless it lies beside a unit along a dimension without units, such as space."""
    pad, shape, changes = list(pad), list(idmap.shape), extent(idmap)
    for position in range(len(pad) // 2):
        dim = idmap.ndim - 1 - position
        if shape[dim] and not changes[dim]:
            shape[dim] += pad[2 * position] + pad[2 * position + 1]
            pad[2 * position : 2 * position + 2] = [0, 0]
            idmap = idmap.narrow(dim, 0, 1)
    return torch.constant_pad_nd(idmap.expand(shape), pad, NONE) if any(pad) else idmap.expand(shape)


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
    op.recorder.put(op.result, op.shadow(op.args[0], buffers=True))


def copied(op: Operation) -> None:
    """copy_: the target takes the shadow of the source.

    If the target is a slice of a tensor along dimensions without units, the whole tensor takes it. Along
    other dimensions, only that part of the tensor takes it.
    """
    target, source = op.args[:2]
    maps = [idmap.expand(target.shape) for idmap in op.shadow(source).maps]
    if is_whole(target):
        return op.put(maps, result=target)
    base = base_of(target)
    if base is target or base.ndim != target.ndim:
        return no_rule(op)
    sliced = [d for d in range(base.ndim) if base.shape[d] != target.shape[d]]
    across = [idmap for idmap in maps if any(extent(idmap)[d] for d in sliced)]
    if across and len(across) == len(maps):
        return _written_into(op, base, maps)
    for idmap in across:  # such as a table of positions, beside heads that all positions have
        op.ids.lock(as_ids(idmap), f"written in place into part of a tensor by {op.name}")
    maps = [idmap for idmap in maps if not any(idmap is other for other in across)]
    for d in sliced:
        maps = [idmap.narrow(d, 0, 1) for idmap in maps]
    spread = Shadow(tuple(idmap.expand(base.shape) for idmap in maps))
    for tensor, shadow in ((target, Shadow(tuple(i.expand(target.shape) for i in maps))), (base, spread)):
        op.put(op.algebra.combine(op.shadow(tensor), shadow, tensor.shape), result=tensor)
    return None


def _written_into(op: Operation, base: torch.Tensor, maps: Sequence[IdMap]) -> None:
    """Units written into a part of a tensor, such as a concatenation in place: this part gets their ids."""
    target = op.args[0]
    held = op.shadow(base).maps
    if len(maps) != 1 or len(held) > 1 or not (is_whole(base) and base.is_contiguous()):
        return no_rule(op)
    blank = torch.full(base.shape, NONE, device="cpu")
    whole = held[0].clone(memory_format=torch.contiguous_format) if held else blank
    whole.as_strided(target.shape, target.stride(), target.storage_offset()).copy_(maps[0])
    op.put([whole], result=base)
    return op.put(maps, result=target)


def packed(op: Operation) -> None:
    """_pack_padded_sequence: steps and samples become rows, [steps, batch, features] -> [rows, features]."""
    shadow = op.shadow(op.args[0])
    rows = op.algebra.reduce_all(shadow.maps, (0, 1))
    op.put([idmap.flatten(0, 1).expand(op.result.shape) for idmap in rows], shadow.weight)


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of its storage, rather than a view of a part."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def restrided(op: Operation) -> None:
    """as_strided, as pooling uses it: only the strides of dimensions of length one change."""
    plain = torch.empty(op.result.shape, device="meta").stride()
    same = all(n == 1 or a == b for n, a, b in zip(op.result.shape, op.result.stride(), plain, strict=True))
    return None if is_in_place(op.func) and same else no_rule(op)


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
