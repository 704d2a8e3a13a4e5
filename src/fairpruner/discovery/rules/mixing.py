"""Elementwise operations, reductions, pooling and norms: elements that meet, or are mixed, become one
unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fairpruner.discovery.rules.call import Call, Rule, unknown
from fairpruner.discovery.rules.moving import is_whole
from fairpruner.discovery.shadow import Shadow, extent


def elementwise(call: Call) -> None:
    """add, mul, relu, where, …: units that meet position by position are one."""
    operands = [call.shadow(t) for t in call.tensors]
    if (
        call.func._schema.is_mutable
        and sum(bool(o.layers) for o in operands) > 1
        and not is_whole(call.result)
    ):
        call.lock(f"written in place into part of a tensor by {call.name}")
    _settle(call, operands)


def _settle(call: Call, operands: Sequence[Shadow]) -> None:
    call.touch(*operands)
    layers = call.algebra.combine_all(operands, call.result.shape)
    call.tracer.put(call.result, call.algebra.settle(layers, operands, call.name))


def gathered(call: Call) -> None:
    """index_add, and index_put of rows: rows of the source go to rows of the target, as results of
    experts do.
    """
    target = call.args[0]
    dim, source = (call.args[1], call.args[3]) if call.name.startswith("index_add") else (0, call.args[2])
    rows = call.shadow(source).layers
    plain = (
        is_whole(target)
        and source.ndim == target.ndim
        and (call.name.startswith("index_add") or len(call.args[1]) == 1)
    )
    if not plain or any(extent(layer)[dim] for layer in rows):
        return unknown(call)
    if source.shape[dim]:
        spread = tuple(layer.narrow(dim, 0, 1).expand(target.shape) for layer in rows)
        call.put(call.algebra.combine(call.shadow(target), Shadow(spread), target.shape))
    return None


def glu(call: Call) -> None:
    """One half times the gate in the other half."""
    shadow, dim = call.shadow(call.args[0]), call.option(1, "dim", -1)
    value, gate = (Shadow(tuple(layer.chunk(2, dim)[half] for layer in shadow.layers)) for half in (0, 1))
    call.put(call.algebra.combine(value, gate, call.result.shape), shadow.weight)


def reduction(dims_at: int, *, keeps_shape: bool = False) -> Rule:
    """sum, mean, softmax, …: ids that are mixed become one class."""

    def rule(call: Call) -> None:
        tensor, shadow = call.args[0], call.shadow(call.args[0])
        dims = call.option(dims_at, "dim")
        dims = [dims] if isinstance(dims, int) else (list(dims) if dims else list(range(tensor.ndim)))
        reduced = call.algebra.reduce_all(shadow.layers, [d % max(tensor.ndim, 1) for d in dims])
        for result in call.results:
            call.put(
                shadow.layers if keeps_shape else [layer.reshape(result.shape) for layer in reduced],
                shadow.weight,
                result,
            )

    return rule


def pooling(spatial: int) -> Rule:
    """Pooling and resizing over the last dimensions: a channel stays a channel."""

    def rule(call: Call) -> None:
        tensor, shadow = call.args[0], call.shadow(call.args[0])
        pooled = call.algebra.reduce_all(shadow.layers, range(tensor.ndim - spatial, tensor.ndim))
        for result in call.results:
            call.put([layer.expand(result.shape) for layer in pooled], shadow.weight, result)

    return rule


def _scaled(call: Call, x: torch.Tensor, parameters: Sequence[Any], dim: int) -> None:
    """A norm's result: its input times and plus vectors along one dimension."""
    _settle(call, [call.shadow(x), *(call.along(p, dim, x.ndim) for p in parameters)])


def batch_norm(call: Call) -> None:
    """Per channel; with batch statistics (instance norm, standardised weights) everything but the channel
    is mixed.
    """
    x = call.args[0]
    if call.args[5] is True:
        call.algebra.reduce_all(call.shadow(x).layers, [d for d in range(x.ndim) if d != 1])
    _scaled(call, x, call.args[1:5], 1)


def layer_norm(call: Call) -> None:
    """Mixes the normalised dimensions; inside one head that is one unit, over the whole width it leaves
    nothing to remove.
    """
    x, shape = call.args[:2]
    call.algebra.reduce_all(call.shadow(x).layers, range(x.ndim - len(shape), x.ndim))
    vectors = [a for a in call.args[2:4] if isinstance(a, torch.Tensor)]
    _scaled(call, x, vectors, x.ndim - 1)


def group_norm(call: Call) -> None:
    """One group of channels is one unit."""
    x, weight, bias, batch, channels, _, groups = call.args[:7]
    layers = call.shadow(x).layers
    for layer in layers:
        call.algebra.reduce(layer.reshape(batch, groups, channels // groups, -1), (2, 3))
    _scaled(call, x, (weight, bias), 1)
    call.tracer.count(
        "num_groups", groups, call.algebra.single(layers, 1, channels).reshape(groups, -1)[:, 0]
    )
