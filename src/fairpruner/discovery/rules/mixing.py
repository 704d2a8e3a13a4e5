"""Elementwise operations, reductions, pooling and norms: elements that meet or are mixed become one unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fairpruner.discovery.rules.moving import is_whole
from fairpruner.discovery.rules.operation import Operation, Rule, no_rule
from fairpruner.discovery.shadow import Shadow, extent
from fairpruner.models.torch_private import is_in_place

STANDARDISED = (
    "a weight that reads it is standardised over its inputs in every forward pass; first replace that module"
    " by a plain one with the standardised weight"
)


def elementwise(op: Operation) -> None:
    """add, mul, relu, where, …: units at the same position become one.

    That also holds in place and in a part of a tensor, unless that part held no unit before.
    """
    operands = [op.shadow(t, buffers=True) for t in op.tensors]
    if is_in_place(op.func) and not is_whole(op.result) and not operands[0].maps:
        op.lock(f"written in place into part of a tensor by {op.name}")
    _settle(op, operands)


def _settle(op: Operation, operands: Sequence[Shadow]) -> None:
    op.touch(*operands)
    maps = op.algebra.combine_all(operands, op.result.shape)
    op.recorder.put(op.result, op.algebra.settle(maps, operands, op.name))


def gathered(op: Operation) -> None:
    """index_add, scatter_add, scatter_reduce, and index_put: rows of a source are added to rows of a target.

    Graph networks add the messages of nodes in this way, and blocks of experts their outputs.
    """
    target = op.args[0]
    by_rows = op.name.startswith("index_put")
    dim, source = (0, op.args[2]) if by_rows else (op.args[1] % max(target.ndim, 1), op.option(3, "src"))
    rows = op.shadow(source).maps
    plain = (
        is_whole(target)
        and source.ndim == target.ndim
        and all(n == m for d, (n, m) in enumerate(zip(source.shape, target.shape, strict=True)) if d != dim)
        and (not by_rows or len(op.args[1]) == 1)
    )
    if not plain or any(extent(idmap)[dim] for idmap in rows):
        return no_rule(op)
    if source.shape[dim]:
        spread = tuple(idmap.narrow(dim, 0, 1).expand(target.shape) for idmap in rows)
        op.put(op.algebra.combine(op.shadow(target), Shadow(spread), target.shape))
    return None


def sampled(op: Operation) -> None:
    """grid_sample, roi_align: the channels of an image at positions that another tensor gives."""
    image, places = op.args[:2]
    op.algebra.lock(op.shadow(places), f"chooses places in {op.name}")
    shadow = op.shadow(image)
    pooled = op.algebra.reduce_all(shadow.maps, [d for d in range(image.ndim) if d != 1])
    op.put([idmap.expand(op.result.shape) for idmap in pooled], shadow.weight)


def glu(op: Operation) -> None:
    """One half times the gate in the other half."""
    shadow, dim = op.shadow(op.args[0]), op.option(1, "dim", -1)
    value, gate = (Shadow(tuple(idmap.chunk(2, dim)[half] for idmap in shadow.maps)) for half in (0, 1))
    op.put(op.algebra.combine(value, gate, op.result.shape), shadow.weight)


def reduction(dims_at: int, *, keeps_shape: bool = False) -> Rule:
    """sum, mean, softmax, …: ids that are mixed become one class.

    `dims_at` is the position of the argument that names the dimensions.
    """

    def rule(op: Operation) -> None:
        tensor, shadow = op.args[0], op.shadow(op.args[0])
        dims = op.option(dims_at, "dim")
        dims = [dims] if isinstance(dims, int) else (list(dims) if dims else list(range(tensor.ndim)))
        reduced = op.algebra.reduce_all(shadow.maps, [d % max(tensor.ndim, 1) for d in dims])
        for result in op.results:
            op.put(
                shadow.maps if keeps_shape else [idmap.reshape(result.shape) for idmap in reduced],
                shadow.weight,
                result,
            )

    return rule


def pooling(spatial: int) -> Rule:
    """Pooling and resizing over the last dimensions: a channel stays a channel."""

    def rule(op: Operation) -> None:
        tensor, shadow = op.args[0], op.shadow(op.args[0])
        pooled = op.algebra.reduce_all(shadow.maps, range(tensor.ndim - spatial, tensor.ndim))
        for result in op.results:
            op.put([idmap.expand(result.shape) for idmap in pooled], shadow.weight, result)

    return rule


def _scaled(op: Operation, x: torch.Tensor, parameters: Sequence[Any], dim: int) -> None:
    """A norm's result: its input, scaled and shifted by vectors along one dimension."""
    _settle(op, [op.shadow(x), *(op.along(p, dim, x.ndim) for p in parameters)])


def batch_norm(op: Operation) -> None:
    """Each channel alone; statistics of the input (instance norm, standardised weights) mix all else."""
    x, shadow = op.args[0], op.shadow(op.args[0])
    if op.args[5] is True:
        mixed = [d for d in range(x.ndim) if d != 1]
        if shadow.weight:
            across = tuple(idmap for idmap in shadow.maps if any(extent(idmap)[d] for d in mixed))
            op.algebra.lock(Shadow(across), STANDARDISED)
        op.algebra.reduce_all(shadow.maps, mixed)
        _count_features(op)
    _scaled(op, x, op.args[1:5], 1)


def _count_features(op: Operation) -> None:
    """A norm without tensors knows its channels by a number alone. The input of an instance norm comes here
    as [1, samples * channels, …].
    """
    x, plain = op.args[0], not any(isinstance(tensor, torch.Tensor) for tensor in op.args[1:5])
    module = op.recorder.running[-1] if op.recorder.running else None
    features = getattr(module, "num_features", None)
    if plain and type(features) is int and features > 0 and x.shape[1] % features == 0:
        channels = op.algebra.single(op.shadow(x).maps, 1, x.shape[1])[:features]
        op.recorder.count("num_features", features, channels)


def layer_norm(op: Operation) -> None:
    """Mixes the normalised dimensions.

    Inside one head they belong to one unit anyway. Over the whole width, no single channel can be removed.
    """
    x, shape = op.args[:2]
    op.algebra.reduce_all(op.shadow(x).maps, range(x.ndim - len(shape), x.ndim))
    weights = [op.shadow(a, buffers=True) for a in op.args[2:4] if isinstance(a, torch.Tensor)]
    _settle(op, [op.shadow(x), *weights])


def group_norm(op: Operation) -> None:
    """One group of channels is one unit."""
    x, weight, bias, batch, channels, _, groups = op.args[:7]
    maps = op.shadow(x).maps
    for idmap in maps:
        op.algebra.reduce(idmap.reshape(batch, groups, channels // groups, -1), (2, 3))
    _scaled(op, x, (weight, bias), 1)
    op.recorder.count("num_groups", groups, op.algebra.single(maps, 1, channels).reshape(groups, -1)[:, 0])
