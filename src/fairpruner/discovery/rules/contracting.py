"""Matrix products, convolutions and attention: where weights read and write units."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fairpruner.core.arrays import Ints
from fairpruner.discovery.ids import NONE, Use
from fairpruner.discovery.rules.call import Call, Rule
from fairpruner.discovery.shadow import Layer, Shadow, extent

FIXED = "meets a size that the model's input or code fixes"
Layers = tuple[Layer, ...]


def _read(call: Call, seen: Ints, reading: Ints) -> None:
    """A weight reads units along one axis: `seen` and `reading` are their ids and its own, [k]."""
    call.ids.mark(reading, Use.READ)
    call.ids.unite(seen, reading)
    call.ids.lock(reading[seen == NONE], FIXED)
    call.ids.lock(seen[reading == NONE], FIXED)


def matmul(first: int) -> Rule:
    """mm, bmm and their forms with an added bias; the matrices stand at `first` and `first + 1`."""

    def rule(call: Call) -> Layers:
        a, b = call.args[first : first + 2]
        batch = a.shape[0] if a.ndim == 3 else 1
        (n, k), m = a.shape[-2:], b.shape[-1]
        shadow_a, shadow_b = call.shadow(a), call.shadow(b)
        lifted_a = [layer.reshape(-1, n, k, 1) for layer in shadow_a.layers]
        lifted_b = [layer.reshape(-1, 1, k, m) for layer in shadow_b.layers]
        if shadow_b.weight:
            result, axes = _apply_weight(call, lifted_a, lifted_b, (batch, n, k, m))
        elif shadow_a.weight:
            turned, axes = _apply_weight(
                call,
                [t.transpose(1, 3) for t in lifted_b],
                [t.transpose(1, 3) for t in lifted_a],
                (batch, m, k, n),
            )
            result = tuple(layer.transpose(1, 2) for layer in turned)
        else:
            result, axes = _multiply(call, lifted_a, lifted_b, (batch, n, m))
        layers = tuple(layer.reshape(call.result.shape) for layer in result)
        if first:
            added = call.shadow(call.args[0])
            call.touch(added)
            layers = call.algebra.combine_all((Shadow(layers), added), call.result.shape)
        call.put(layers)
        return axes

    return rule


def _apply_weight(
    call: Call, x: Sequence[Layer], w: Sequence[Layer], shape: tuple[int, int, int, int]
) -> tuple[Layers, Layers]:
    """Sum over k of x[batch, n, k, 1] * w[batch, 1, k, m]: nothing along k is tied, since a term of the
    sum may simply go.
    """
    algebra = call.algebra
    batch, n, k, m = shape
    readers = [layer for layer in w if extent(layer)[2]]
    writers = [layer for layer in w if not extent(layer)[2]]
    reading = algebra.single(readers, 2, k)
    _read(call, algebra.single(x, 2, k), reading)
    for layer in writers:
        algebra.mark(layer, Use.WRITE)
    rows = [layer for layer in x if any(extent(layer)) and not extent(layer)[2]]
    result = algebra.combine(
        Shadow(algebra.reduce_all(rows, (2,))),
        Shadow(algebra.reduce_all(writers, (2,)), weight=True),
        (batch, n, 1, m),
    )
    return tuple(layer.squeeze(2) for layer in result), (*result, torch.from_numpy(reading))


def _multiply(
    call: Call, a: Sequence[Layer], b: Sequence[Layer], shape: tuple[int, int, int]
) -> tuple[Layers, Layers]:
    """The same sum where both sides are activations: all that is summed is one unit, a head."""
    batch, n, m = shape
    left, right = (Shadow(call.algebra.reduce_all(side, (2,))) for side in (a, b))
    result = call.algebra.combine(left, right, (batch, n, 1, m))
    for layer in result:
        call.algebra.mark(layer, Use.HEAD)
    return tuple(layer.squeeze(2) for layer in result), result


def convolution(call: Call) -> Layers:
    """The weight's input side reads the channels, its output side writes them; grouped ones keep their
    groups equal.
    """
    x, weight, bias, transposed, groups = (call.args[i] for i in (0, 1, 2, 6, 8))
    channels, in_dim = x.shape[1], 0 if transposed else 1
    seen = call.algebra.single(call.shadow(x).layers, 1, channels)
    layers = call.shadow(weight).layers
    reading = call.algebra.single(layers, in_dim, weight.shape[in_dim])
    writing = call.algebra.single(layers, 1 - in_dim, weight.shape[1 - in_dim])
    call.ids.mark(writing, Use.WRITE)
    if groups == 1:
        _read(call, seen, reading)
        written = writing
    elif groups >= channels // groups:
        written = _whole_groups(call, seen, reading, writing)
    else:
        written = _positions(call, seen, reading, writing)
    shape = call.result.shape
    layer = torch.from_numpy(written).reshape(1, -1, *[1] * (len(shape) - 2)).expand(shape)
    added = call.along(bias, 1, len(shape))
    call.touch(added)
    call.put(call.algebra.combine_all((Shadow((layer,)), added), shape))
    return torch.from_numpy(reading), torch.from_numpy(writing)


def _whole_groups(call: Call, seen: Ints, reading: Ints, writing: Ints) -> Ints:
    """Many narrow groups (a depthwise convolution is the narrowest): one unit is one whole group."""
    transposed, groups, width = call.args[6], call.args[8], call.result.shape[1]
    own, shared = (
        (reading, writing) if transposed else (writing, reading)
    )  # the weight's dimension over all groups, and that within one
    by_group, own_by_group = seen.reshape(groups, -1), own.reshape(groups, -1)
    call.ids.mark(own, Use.WRITE)
    call.ids.lock(shared, FIXED)
    call.ids.lock(own_by_group[(by_group == NONE).all(axis=1)], FIXED)
    members = np.concatenate([by_group, own_by_group], axis=1)
    call.ids.unite_all(members)
    call.tracer.count("groups", groups, members.max(axis=1))
    return np.repeat(members.max(axis=1), width // groups)


def _positions(call: Call, seen: Ints, reading: Ints, writing: Ints) -> Ints:
    """Few wide groups: one unit is the same position in every group, so that all groups stay equal."""
    transposed, groups = call.args[6], call.args[8]
    call.ids.unite_all(seen.reshape(groups, -1).T)
    call.ids.unite_all((reading if transposed else writing).reshape(groups, -1).T)
    if transposed:
        _read(call, seen, reading)
        return np.tile(writing, groups)
    _read(call, seen.reshape(groups, -1).max(axis=0), reading)
    return writing


def attention(call: Call) -> Layers:
    """Scaled dot-product attention over [batch, heads, tokens, width]: q, k and v of one head are one
    unit.
    """
    algebra = call.algebra
    query, key, value = call.args[:3]
    heads = query.shape[1]

    def per_query_head(tensor: torch.Tensor) -> list[Layer]:
        """Key and value layers, repeated for the query heads that share them."""
        return [
            layer.repeat_interleave(heads // tensor.shape[1], 1) if tensor.shape[1] != heads else layer
            for layer in call.shadow(tensor).layers
        ]

    mask = call.shadow(
        call.kwargs.get("attn_mask", next((a for a in call.args[3:] if isinstance(a, torch.Tensor)), None))
    )
    shape = (*query.shape[:3], key.shape[2])  # of the scores
    asked = Shadow(algebra.reduce_all(call.shadow(query).layers, (3,)))
    offered = Shadow(tuple(layer.transpose(2, 3) for layer in algebra.reduce_all(per_query_head(key), (3,))))
    scores = Shadow(algebra.combine(asked, offered, shape))
    scores = algebra.settle(algebra.combine_all((scores, mask), shape), (scores, mask), "attention")
    answered = Shadow(algebra.reduce_all(per_query_head(value), (2,)))
    layers = algebra.combine(Shadow(algebra.reduce_all(scores.layers, (3,))), answered, call.result.shape)
    for layer in layers:
        algebra.mark(layer, Use.HEAD)
    call.put(layers)
    return algebra.reduce_all(layers, (2, 3))
