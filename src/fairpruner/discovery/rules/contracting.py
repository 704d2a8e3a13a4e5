"""Matrix products, convolutions and attention: where weights read and write units."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fairpruner.core.arrays import Ints
from fairpruner.discovery.ids import NONE, Usage, as_ids
from fairpruner.discovery.rules.operation import Operation, Rule
from fairpruner.discovery.shadow import IdMap, Shadow, extent

FIXED = "meets a size that the model's input or code fixes"
SHARED = "shared by all heads"
IdMaps = tuple[IdMap, ...]


def _read(op: Operation, seen: Ints, reading: Ints) -> None:
    """A weight reads units along one axis: `seen` and `reading` are their ids and its own, [k]."""
    op.ids.mark(reading, Usage.READ)
    op.ids.unite(seen, reading)
    op.ids.lock(reading[seen == NONE], FIXED)
    op.ids.lock(seen[reading == NONE], FIXED)


def matmul(first: int) -> Rule:
    """mm, bmm, and their forms with an added bias, whose matrices are arguments `first` and `first + 1`."""

    def rule(op: Operation) -> IdMaps:
        a, b = op.args[first : first + 2]
        batch = a.shape[0] if a.ndim == 3 else 1
        (n, k), m = a.shape[-2:], b.shape[-1]
        shadow_a, shadow_b = op.shadow(a), op.shadow(b)
        if shadow_b.weight and not shadow_a.maps:  # an initial state, or a table in a buffer
            shadow_a = op.shadow(a, buffers=True)
        lifted_a = [idmap.reshape(-1, n, k, 1) for idmap in shadow_a.maps]
        lifted_b = [idmap.reshape(-1, 1, k, m) for idmap in shadow_b.maps]
        if shadow_b.weight:
            result, axes = _apply_weight(op, lifted_a, lifted_b, (batch, n, k, m))
        elif shadow_a.weight:
            turned, axes = _apply_weight(
                op,
                [t.transpose(1, 3) for t in lifted_b],
                [t.transpose(1, 3) for t in lifted_a],
                (batch, m, k, n),
            )
            result = tuple(idmap.transpose(1, 2) for idmap in turned)
        else:
            result, axes = _multiply(op, lifted_a, lifted_b, (batch, n, m))
        maps = tuple(idmap.reshape(op.result.shape) for idmap in result)
        if first:
            added = op.shadow(op.args[0])
            op.touch(added)
            maps = op.algebra.combine_all((Shadow(maps), added), op.result.shape)
        op.put(maps)
        return axes

    return rule


def _apply_weight(
    op: Operation, x: Sequence[IdMap], w: Sequence[IdMap], shape: tuple[int, int, int, int]
) -> tuple[IdMaps, IdMaps]:
    """Sum over k of x[batch, n, k, 1] * w[batch, 1, k, m]; each term of this sum can be removed alone."""
    algebra = op.algebra
    batch, n, k, m = shape
    if _shared_by_heads(op, x, 2, k):
        return _within_heads(op, x, w, (batch, n, 1, m))
    readers = [idmap for idmap in w if extent(idmap)[2]]
    writers = [idmap for idmap in w if not extent(idmap)[2]]
    reading = algebra.single(readers, 2, k)
    _read(op, algebra.single(x, 2, k), reading)
    for idmap in writers:
        algebra.mark(idmap, Usage.WRITE)
    rows = [
        idmap
        for idmap in x
        if any(extent(idmap)) and not extent(idmap)[2] and not op.ids.all_of_buffers(as_ids(idmap))
    ]
    result = algebra.combine(
        Shadow(algebra.reduce_all(rows, (2,))),
        Shadow(algebra.reduce_all(writers, (2,)), weight=True),
        (batch, n, 1, m),
    )
    return tuple(idmap.squeeze(2) for idmap in result), (*result, torch.from_numpy(reading))


def _shared_by_heads(op: Operation, x: Sequence[IdMap], dim: int, width: int) -> bool:
    """Whether one weight is applied to each head, whose numbers lie along `dim`."""
    maps = [idmap for idmap in x if extent(idmap)[dim] and sum(extent(idmap)) > 1]
    return len(maps) == 1 and op.recorder.heads_share(as_ids(maps[0]), width)


def _within_heads(
    op: Operation, x: Sequence[IdMap], w: Sequence[IdMap], shape: tuple[int, ...]
) -> tuple[IdMaps, IdMaps]:
    """A sum over dimension 2 of x[batch, n, k, 1] and a weight that all heads share: a head stays a head."""
    for idmap in w:
        op.ids.lock(as_ids(idmap), SHARED)
    heads = op.algebra.reduce_all(x, (2,))
    return tuple(idmap.expand(shape).squeeze(2) for idmap in heads), heads


def _multiply(
    op: Operation, a: Sequence[IdMap], b: Sequence[IdMap], shape: tuple[int, int, int]
) -> tuple[IdMaps, IdMaps]:
    """The same sum of two activations: all elements that are summed become one unit, a head."""
    batch, n, m = shape
    left, right = (Shadow(op.algebra.reduce_all(side, (2,))) for side in (a, b))
    result = op.algebra.combine(left, right, (batch, n, 1, m))
    for idmap in result:
        op.algebra.mark(idmap, Usage.HEAD)
    return tuple(idmap.squeeze(2) for idmap in result), result


def convolution(op: Operation) -> IdMaps:
    """The weight's input side reads channels and its output side writes them; groups stay of equal size."""
    x, weight, bias, transposed, groups = (op.args[i] for i in (0, 1, 2, 6, 8))
    channels, in_dim = x.shape[1], 0 if transposed else 1
    if _shared_by_heads(op, op.shadow(x).maps, 1, channels):
        for shadow in (op.shadow(weight), op.along(bias, 1, x.ndim)):
            op.algebra.lock(shadow, SHARED)
        heads = op.algebra.reduce_all(op.shadow(x).maps, range(1, x.ndim))
        op.put([idmap.expand(op.result.shape) for idmap in heads])
        return heads
    seen = op.algebra.single(op.shadow(x, buffers=True).maps, 1, channels)
    maps = op.shadow(weight).maps
    reading = op.algebra.single(maps, in_dim, weight.shape[in_dim])
    writing = op.algebra.single(maps, 1 - in_dim, weight.shape[1 - in_dim])
    op.ids.mark(writing, Usage.WRITE)
    if groups == 1:
        _read(op, seen, reading)
        written = writing
    elif groups >= channels // groups:
        written = _whole_groups(op, seen, reading, writing)
    else:
        written = _positions(op, seen, reading, writing)
    shape = op.result.shape
    idmap = torch.from_numpy(written).reshape(1, -1, *[1] * (len(shape) - 2)).expand(shape)
    added = op.along(bias, 1, len(shape))
    op.touch(added)
    op.put(op.algebra.combine_all((Shadow((idmap,)), added), shape))
    return torch.from_numpy(reading), torch.from_numpy(writing)


def _whole_groups(op: Operation, seen: Ints, reading: Ints, writing: Ints) -> Ints:
    """Many narrow groups, as in a depthwise convolution: one unit is one whole group."""
    transposed, groups, width = op.args[6], op.args[8], op.result.shape[1]
    # The weight's dimension over all groups, and its dimension within one group.
    own, shared = (reading, writing) if transposed else (writing, reading)
    by_group, own_by_group = seen.reshape(groups, -1), own.reshape(groups, -1)
    op.ids.mark(own, Usage.WRITE)
    op.ids.lock(shared, FIXED)
    op.ids.lock(own_by_group[(by_group == NONE).all(axis=1)], FIXED)
    members = np.concatenate([by_group, own_by_group], axis=1)
    op.ids.unite_all(members)
    op.recorder.count("groups", groups, members.max(axis=1))
    return np.repeat(members.max(axis=1), width // groups)


def _positions(op: Operation, seen: Ints, reading: Ints, writing: Ints) -> Ints:
    """Few wide groups: one unit is the same position in every group, so that groups stay equally large."""
    transposed, groups = op.args[6], op.args[8]
    op.ids.unite_all(seen.reshape(groups, -1).T)
    op.ids.unite_all((reading if transposed else writing).reshape(groups, -1).T)
    if transposed:
        _read(op, seen, reading)
        return np.tile(writing, groups)
    _read(op, seen.reshape(groups, -1).max(axis=0), reading)
    return writing


def attention(op: Operation) -> IdMaps:
    """Scaled dot-product attention, [batch, heads, tokens, width]: q, k and v of one head are one unit."""
    algebra = op.algebra
    query, key, value = op.args[:3]
    heads = query.shape[1]

    def per_query_head(tensor: torch.Tensor) -> list[IdMap]:
        """The maps of keys or values, repeated for the query heads that share them."""
        return [
            idmap.repeat_interleave(heads // tensor.shape[1], 1) if tensor.shape[1] != heads else idmap
            for idmap in op.shadow(tensor).maps
        ]

    mask = op.shadow(
        op.kwargs.get("attn_mask", next((a for a in op.args[3:] if isinstance(a, torch.Tensor)), None))
    )
    shape = (*query.shape[:3], key.shape[2])  # of the scores
    asked = Shadow(algebra.reduce_all(op.shadow(query).maps, (3,)))
    offered = Shadow(tuple(idmap.transpose(2, 3) for idmap in algebra.reduce_all(per_query_head(key), (3,))))
    scores = Shadow(algebra.combine(asked, offered, shape))
    scores = algebra.settle(algebra.combine_all((scores, mask), shape), (scores, mask), "attention")
    answered = Shadow(algebra.reduce_all(per_query_head(value), (2,)))
    maps = algebra.combine(Shadow(algebra.reduce_all(scores.maps, (3,))), answered, op.result.shape)
    for idmap in maps:
        algebra.mark(idmap, Usage.HEAD)
    op.put(maps)
    return algebra.reduce_all(maps, (2, 3))
