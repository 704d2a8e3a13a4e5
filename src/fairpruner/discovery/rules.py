"""What each operation does to shadows: a table from operation to rule.

A rule sees the tracer, the operation, its arguments and its real result, gives the result its shadow,
and returns the layers whose lengths its cost is proportional to. An operation without a rule locks
all it touches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..types import Ints
from .ids import NONE, Use
from .shadow import EMPTY, Layer, Shadow, extent

if TYPE_CHECKING:
    from .trace import Tracer

Rule = Callable[["Tracer", Any, Any, Any, Any], "tuple[Layer, ...] | None"]
aten = torch.ops.aten


@cache
def rule_for(func: Any) -> Rule:
    """The rule of an operation: by name, else by what torch says of it, else `unknown`."""
    packet = func._overloadpacket
    name = packet.__name__
    plain = name.removesuffix("_") if func._schema.is_mutable else name  # relu_ is relu
    if plain in RULES:
        return RULES[plain]
    if func.is_view:
        return movement
    forms = getattr(aten, plain, packet)
    if any(torch.Tag.pointwise in getattr(forms, overload).tags for overload in forms.overloads()):
        return elementwise
    return unknown


def outputs(out: Any) -> list[torch.Tensor]:
    return [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor)]


def tensor_args(args: Any, kwargs: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]


# ── moving elements about: the operation itself, run on the shadow ──────────────────────────────


def movement(tracer: Tracer, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """view, permute, cat, index, pad, …: exact by construction."""
    sources = tensor_args(args, kwargs)
    shadows = [tracer.shadow(t) for t in sources]
    if func._overloadpacket is aten.cat and all(s.weight or not s.layers for s in shadows):
        # A buffer among weights is a part of one: the zero bias of the keys in a fused projection.
        shadows = [s if s.layers else tracer.slots_of(t) for s, t in zip(shadows, sources, strict=True)]
    depth = max(len(s.layers) for s in shadows)
    weight = all(s.weight or not s.layers for s in shadows)
    stand_ins = [{id(t): _layer(t, s, k) for t, s in zip(sources, shadows, strict=True)} for k in range(depth)]
    try:
        moved = [outputs(_move(func, stand_in, args, kwargs)) for stand_in in stand_ins]
    except Exception:  # an operation that does not take integers, or another layout of strides: be safe
        return unknown(tracer, func, args, kwargs, out)
    for position, result in enumerate(outputs(out)):
        if result.shape != moved[0][position].shape:
            return unknown(tracer, func, args, kwargs, out)
        tracer.put(result, Shadow(tuple(m[position] for m in moved), weight))
    return None


def _layer(tensor: torch.Tensor, shadow: Shadow, position: int) -> torch.Tensor:
    """A source's layer; what has no id is NONE, but whole-number tensors without a shadow are indices and stay themselves."""
    if position < len(shadow.layers):
        return shadow.layers[position]
    if not shadow.layers and not tensor.is_floating_point():
        return tensor.cpu()
    return torch.zeros((), dtype=torch.int64).expand(tensor.shape)


def _move(func: Any, stand_in: dict[int, torch.Tensor], args: Any, kwargs: Any) -> Any:
    name = func._overloadpacket.__name__
    swapped, swapped_kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: stand_in[id(t)], (args, kwargs))
    if name in ("view", "_unsafe_view", "reshape"):
        return swapped[0].reshape(swapped[1])
    if name == "cat":
        return _cat(*swapped, **swapped_kwargs)
    if name == "constant_pad_nd":
        return func(swapped[0], swapped[1], NONE)
    swapped_kwargs.pop("memory_format", None)
    return func(*swapped, **swapped_kwargs)


def _cat(layers: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Concatenate without writing out the dimensions along which no layer changes."""
    layers = [layer for layer in layers if layer.shape != (0,)]
    dim %= layers[0].ndim
    shape = list(layers[0].shape)
    shape[dim] = sum(layer.shape[dim] for layer in layers)
    flat = [d for d in range(len(shape)) if d != dim and all(layer.stride(d) == 0 for layer in layers)]
    for d in flat:
        layers = [layer.narrow(d, 0, min(1, layer.shape[d])) for layer in layers]
    return torch.cat(list(layers), dim).expand(shape)


def _unchanged(tracer: Tracer, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """clone, dropout in eval mode, conversions: the result is the first argument, element by element."""
    shadow = tracer.shadow(args[0])
    tracer.put(outputs(out)[0], shadow)


def _copy(tracer: Tracer, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Writing into a tensor: into a whole one the source's shadow moves in, into a part of one nothing is known."""
    target, source = args[0], args[1]
    whole = target.untyped_storage().nbytes() == target.numel() * target.element_size()
    if not whole:
        return unknown(tracer, func, args, kwargs, out)
    tracer.put(target, Shadow(tuple(layer.expand(target.shape) for layer in tracer.shadow(source).layers)))
    return None


def _restride(tracer: Tracer, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Harmless only where it changes the strides of dimensions of length one, as pooling does."""
    shape, strides = out.shape, out.stride()
    plain = torch.empty(shape, device="meta").stride()
    if func._schema.is_mutable and all(n == 1 or a == b for n, a, b in zip(shape, strides, plain, strict=True)):
        return None
    return unknown(tracer, func, args, kwargs, out)


def _embedding(tracer: Tracer, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Rows are looked up by data; only the columns are units."""
    columns = tracer.algebra.single(tracer.shadow(args[0]).layers, 1, args[0].shape[1])
    tracer.ids.mark(columns, Use.WRITE)
    tracer.put(out, Shadow((torch.from_numpy(columns).expand(out.shape),)))


# ── elementwise, reductions, pooling ────────────────────────────────────────────────────────────


def _touch(tracer: Tracer, operands: Sequence[Shadow]) -> None:
    """Note that these weights were used now."""
    for operand in operands:
        for layer in operand.layers if operand.weight else ():
            tracer.algebra.mark(layer, Use.TOUCHED)


def _combine_all(tracer: Tracer, operands: Sequence[Shadow], shape: Sequence[int]) -> tuple[Layer, ...]:
    """Layers of many operands together, activations first so that weights meet them rather than each other."""
    total = EMPTY
    for operand in sorted((o for o in operands if o.layers), key=lambda o: o.weight):
        total = Shadow(
            tracer.algebra.combine(total, operand, shape) if total.layers else tuple(layer.expand(shape) for layer in operand.layers),
            operand.weight and (total.weight or not total.layers),
        )
    return total.layers


def elementwise(tracer: Tracer, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """add, mul, relu, where, …: units that meet position by position are one."""
    result = outputs(out)[0]
    operands = [tracer.shadow(t) for t in tensor_args(args, kwargs)]
    layers = _combine_all(tracer, operands, result.shape)
    in_place_part = (
        func._schema.is_mutable and len([o for o in operands if o.layers]) > 1 and result.untyped_storage().nbytes() != result.numel() * result.element_size()
    )
    if in_place_part:
        for operand in operands:
            tracer.algebra.lock(operand, f"written in place into part of a tensor by {func._overloadpacket.__name__}")
    _touch(tracer, operands)
    tracer.put(result, tracer.algebra.settle(layers, operands, func._overloadpacket.__name__))


def _glu(tracer: Tracer, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """One half times the gate in the other half."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    shadow = tracer.shadow(args[0])
    halves = [tuple(layer.chunk(2, dim)[half] for layer in shadow.layers) for half in (0, 1)]
    tracer.put(out, Shadow(tracer.algebra.combine(Shadow(halves[0]), Shadow(halves[1]), out.shape), shadow.weight))


def _to_complex(tracer: Tracer, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """A pair of real elements becomes one number."""
    shadow = tracer.shadow(args[0])
    tracer.put(out, Shadow(tuple(layer.squeeze(-1) for layer in tracer.algebra.reduce_all(shadow.layers, (args[0].ndim - 1,))), shadow.weight))


def _to_real(tracer: Tracer, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    shadow = tracer.shadow(args[0])
    tracer.put(out, Shadow(tuple(layer.unsqueeze(-1).expand(out.shape) for layer in shadow.layers), shadow.weight))


def _reduction(dims_at: int, *, keeps_shape: bool = False) -> Rule:
    """sum, mean, softmax, …: ids that are mixed become one class."""

    def rule(tracer: Tracer, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        tensor, shadow = args[0], tracer.shadow(args[0])
        dims = kwargs.get("dim", args[dims_at] if len(args) > dims_at else None)
        dims = [dims] if isinstance(dims, int) else (list(dims) if dims else list(range(tensor.ndim)))
        dims = [d % max(tensor.ndim, 1) for d in dims]
        reduced = tracer.algebra.reduce_all(shadow.layers, dims)
        for result in outputs(out):
            shape = result.shape
            layers = shadow.layers if keeps_shape else tuple(layer.reshape(shape) for layer in reduced)
            tracer.put(result, Shadow(layers, shadow.weight))

    return rule


def _pooling(spatial: int) -> Rule:
    """Pooling and resizing over the last dimensions: a channel stays a channel."""

    def rule(tracer: Tracer, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        shadow, ndim = tracer.shadow(args[0]), args[0].ndim
        dims = range(ndim - spatial, ndim)
        for result in outputs(out):
            tracer.put(result, Shadow(tuple(layer.expand(result.shape) for layer in tracer.algebra.reduce_all(shadow.layers, dims)), shadow.weight))

    return rule


# ── norms ───────────────────────────────────────────────────────────────────────────────────────


def _along(tracer: Tracer, parameter: Any, dim: int, ndim: int) -> Shadow:
    """A vector parameter's or statistic's ids, lying along one dimension of an activation."""
    if parameter is None:
        return EMPTY
    known = tracer.shadow(parameter)
    shadow = known if known.layers else tracer.slots_of(parameter)
    shape = [-1 if d == dim else 1 for d in range(ndim)]
    return Shadow(tuple(layer.reshape(shape) for layer in shadow.layers), weight=True)


def _with_affine(tracer: Tracer, func: Any, x: torch.Tensor, parameters: Sequence[Any], dim: int, out: Any) -> None:
    operands = [tracer.shadow(x), *(_along(tracer, p, dim, x.ndim) for p in parameters)]
    _touch(tracer, operands)
    layers = _combine_all(tracer, operands, x.shape)
    tracer.put(outputs(out)[0], tracer.algebra.settle(layers, operands, func._overloadpacket.__name__))


def _batch_norm(tracer: Tracer, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Per-channel; with batch statistics (instance norm, standardised weights) everything but the channel is mixed."""
    x, weight, bias, mean, variance = args[:5]
    training = args[5] is True
    if training:
        others = [d for d in range(x.ndim) if d != 1]
        tracer.algebra.reduce_all(tracer.shadow(x).layers, others)
    _with_affine(tracer, func, x, (weight, bias, mean, variance), 1, out)


def _layer_norm(tracer: Tracer, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Mixes the normalised dimensions; inside one head that is one unit, over the whole width it leaves nothing to remove."""
    x, shape = args[0], args[1]
    dims = range(x.ndim - len(shape), x.ndim)
    tracer.algebra.reduce_all(tracer.shadow(x).layers, dims)
    _with_affine(tracer, func, x, args[2:4], x.ndim - 1, out)


def _group_norm(tracer: Tracer, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """One group of channels is one unit."""
    x, weight, bias, batch, channels, _, groups = args[:7]
    layers = tracer.shadow(x).layers
    for layer in layers:
        tracer.algebra.reduce(layer.reshape(batch, groups, channels // groups, -1), (2, 3))
    _with_affine(tracer, func, x, (weight, bias), 1, out)
    tracer.count("num_groups", groups, tracer.algebra.single(layers, 1, channels).reshape(groups, -1)[:, 0])


# ── contractions: matmul, convolution, attention ────────────────────────────────────────────────

FIXED = "meets a size that the model's input or code fixes"


def _read(tracer: Tracer, seen: Ints, reading: Ints) -> None:
    """A weight reads units along one axis: `seen` and `reading` are their ids and its own, [k]."""
    tracer.ids.mark(reading, Use.READ)
    tracer.ids.unite(seen, reading)
    tracer.ids.lock(reading[seen == NONE], FIXED)
    tracer.ids.lock(seen[reading == NONE], FIXED)


def _apply_weight(tracer: Tracer, x: Sequence[Layer], w: Sequence[Layer], shape: Sequence[int]) -> tuple[tuple[Layer, ...], tuple[Layer, ...]]:
    """Sum over k of x[batch, n, k, 1] * w[batch, 1, k, m]: nothing along k is tied, since a term of the sum may simply go."""
    algebra = tracer.algebra
    batch, n, k, m = shape
    seen = algebra.single(x, 2, k)
    readers = [layer for layer in w if extent(layer)[2]]
    reading = algebra.single(readers, 2, k)
    _read(tracer, seen, reading)
    rows = [layer for layer in x if any(extent(layer)) and not extent(layer)[2]]
    writers = [layer for layer in w if not any(layer is reader for reader in readers)]
    for layer in writers:
        algebra.mark(layer, Use.WRITE)
    result = algebra.combine(Shadow(algebra.reduce_all(rows, (2,))), Shadow(algebra.reduce_all(writers, (2,)), weight=True), (batch, n, 1, m))
    return tuple(layer.squeeze(2) for layer in result), (*result, torch.from_numpy(reading))


def _multiply(tracer: Tracer, a: Sequence[Layer], b: Sequence[Layer], shape: Sequence[int]) -> tuple[tuple[Layer, ...], tuple[Layer, ...]]:
    """The same sum where both sides are activations: all that is summed is one unit, a head."""
    batch, n, _, m = shape
    left, right = (Shadow(tracer.algebra.reduce_all(side, (2,))) for side in (a, b))
    result = tracer.algebra.combine(left, right, (batch, n, 1, m))
    for layer in result:
        tracer.algebra.mark(layer, Use.HEAD)
    return tuple(layer.squeeze(2) for layer in result), result


def _matmul(first: int) -> Rule:
    """mm, bmm and their forms with an added bias; the matrices stand at `first` and `first + 1`."""

    def rule(tracer: Tracer, func: Any, args: Any, kwargs: Any, out: Any) -> tuple[Layer, ...]:
        a, b = args[first], args[first + 1]
        batch = a.shape[0] if a.ndim == 3 else 1
        (n, k), m = a.shape[-2:], b.shape[-1]
        shadow_a, shadow_b = tracer.shadow(a), tracer.shadow(b)
        lifted_a = [layer.reshape(-1, n, k, 1) if layer.ndim == 2 else layer.unsqueeze(3) for layer in shadow_a.layers]
        lifted_b = [layer.reshape(-1, 1, k, m) if layer.ndim == 2 else layer.unsqueeze(1) for layer in shadow_b.layers]
        if shadow_b.weight:
            result, axes = _apply_weight(tracer, lifted_a, lifted_b, (batch, n, k, m))
        elif shadow_a.weight:
            turned, axes = _apply_weight(tracer, [t.transpose(1, 3) for t in lifted_b], [t.transpose(1, 3) for t in lifted_a], (batch, m, k, n))
            result = tuple(layer.transpose(1, 2) for layer in turned)
        else:
            result, axes = _multiply(tracer, lifted_a, lifted_b, (batch, n, k, m))
        layers = tuple(layer.reshape(out.shape) for layer in result)
        if first:
            added = tracer.shadow(args[0])
            _touch(tracer, [added])
            layers = _combine_all(tracer, (Shadow(layers), added), out.shape)
        tracer.put(out, Shadow(layers))
        return axes

    return rule


def _convolution(tracer: Tracer, func: Any, args: Any, kwargs: Any, out: Any) -> tuple[Layer, ...]:
    x, weight, bias, transposed, groups = args[0], args[1], args[2], args[6], args[8]
    algebra, ids = tracer.algebra, tracer.ids
    channels, in_dim = x.shape[1], 0 if transposed else 1
    seen = algebra.single(tracer.shadow(x).layers, 1, channels)
    shadow = tracer.shadow(weight)
    reading = algebra.single(shadow.layers, in_dim, weight.shape[in_dim])
    writing = algebra.single(shadow.layers, 1 - in_dim, weight.shape[1 - in_dim])
    axes = (torch.from_numpy(reading), torch.from_numpy(writing))
    ids.mark(writing, Use.WRITE)
    if groups == 1:
        _read(tracer, seen, reading)
        written = writing
    elif groups >= channels // groups:
        # Many narrow groups (a depthwise convolution is the narrowest): one unit is one whole group.
        by_group = seen.reshape(groups, -1)
        own = reading if transposed else writing  # the dimension of the weight that runs over all groups
        ids.mark(own, Use.WRITE)
        ids.lock(writing if transposed else reading, FIXED)
        ids.lock(own.reshape(groups, -1)[(by_group == NONE).all(axis=1)], FIXED)
        ids.unite_all(np.concatenate([by_group, own.reshape(groups, -1)], axis=1))
        written = np.repeat(np.maximum(by_group.max(axis=1), own.reshape(groups, -1).max(axis=1)), out.shape[1] // groups)
        tracer.count("groups", groups, written[:: out.shape[1] // groups])
    else:
        # Few wide groups: one unit is the same position in every group, so that all groups stay equal.
        positions = seen.reshape(groups, -1)
        ids.unite_all(positions.T)
        if transposed:
            ids.unite_all(reading.reshape(groups, -1).T)
            _read(tracer, seen, reading)
            written = np.tile(writing, groups)
        else:
            _read(tracer, positions.max(axis=0), reading)
            ids.unite_all(writing.reshape(groups, -1).T)
            written = writing
    layer = torch.from_numpy(written).reshape(1, -1, *[1] * (out.ndim - 2)).expand(out.shape)
    added = _along(tracer, bias, 1, out.ndim)
    _touch(tracer, [added])
    tracer.put(out, Shadow(_combine_all(tracer, (Shadow((layer,)), added), out.shape)))
    return axes


def _attention(tracer: Tracer, func: Any, args: Any, kwargs: Any, out: Any) -> tuple[Layer, ...]:
    """Scaled dot-product attention over [batch, heads, tokens, width]: q, k and v of one head are one unit."""
    algebra = tracer.algebra
    query, key, value = args[:3]
    heads = query.shape[1]

    def per_query_head(tensor: torch.Tensor) -> list[Layer]:
        """Key and value layers, repeated for the query heads that share them."""
        return [layer.repeat_interleave(heads // tensor.shape[1], 1) if tensor.shape[1] != heads else layer for layer in tracer.shadow(tensor).layers]

    mask = tracer.shadow(kwargs.get("attn_mask", next((a for a in args[3:] if isinstance(a, torch.Tensor)), None)))
    scores_shape = (*query.shape[:3], key.shape[2])
    asked = Shadow(algebra.reduce_all(tracer.shadow(query).layers, (3,)))
    offered = Shadow(tuple(layer.transpose(2, 3) for layer in algebra.reduce_all(per_query_head(key), (3,))))
    scores = Shadow(algebra.combine(asked, offered, scores_shape))
    scores = algebra.settle(_combine_all(tracer, (scores, mask), scores_shape), (scores, mask), "attention")
    result = outputs(out)[0]
    answered = Shadow(algebra.reduce_all(per_query_head(value), (2,)))
    layers = algebra.combine(Shadow(algebra.reduce_all(scores.layers, (3,))), answered, result.shape)
    for layer in layers:
        algebra.mark(layer, Use.HEAD)
    tracer.put(result, Shadow(layers))
    return algebra.reduce_all(layers, (2, 3))


def _fresh(tracer: Tracer, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """A new constant that only takes its shape from a tensor, or a number read from one: no unit goes into it."""


def unknown(tracer: Tracer, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Nothing is known of this operation: what it touches stays."""
    for tensor in tensor_args(args, kwargs):
        tracer.algebra.lock(tracer.shadow(tensor), f"passes through {func._overloadpacket.__name__}, which fairpruner has no rule for")


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "view",
            "_unsafe_view",
            "reshape",
            "cat",
            "stack",
            "constant_pad_nd",
            "index",
            "index_select",
            "roll",
            "flip",
            "repeat",
            "gather",
            "pixel_shuffle",
            "pixel_unshuffle",
            "channel_shuffle",
            "rot90",
            "tril",
            "triu",
        ),
        movement,
    ),
    **dict.fromkeys(("clone", "_to_copy", "contiguous", "lift_fresh", "dropout", "native_dropout", "masked_fill"), _unchanged),
    **dict.fromkeys(
        (
            "new_zeros",
            "new_ones",
            "new_full",
            "new_empty",
            "zeros_like",
            "ones_like",
            "full_like",
            "empty_like",
            "rand_like",
            "randn_like",
            "_local_scalar_dense",
        ),
        _fresh,
    ),
    "copy": _copy,
    "as_strided": _restride,
    "embedding": _embedding,
    "glu": _glu,
    "view_as_complex": _to_complex,
    "view_as_real": _to_real,
    **dict.fromkeys(("hardswish", "log_sigmoid_forward", "rrelu_with_noise", "_prelu_kernel", "addcmul", "addcdiv", "lerp"), elementwise),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "logsumexp", "var", "std", "var_mean", "prod", "any", "all", "max", "min"), _reduction(1)),
    "linalg_vector_norm": _reduction(2),
    **dict.fromkeys(("_softmax", "_safe_softmax", "_log_softmax", "cumsum"), _reduction(1, keeps_shape=True)),
    **dict.fromkeys(("avg_pool1d", "max_pool1d", "adaptive_avg_pool1d", "upsample_nearest1d", "upsample_linear1d"), _pooling(1)),
    **dict.fromkeys(
        (
            "avg_pool2d",
            "max_pool2d_with_indices",
            "_adaptive_avg_pool2d",
            "adaptive_max_pool2d",
            "upsample_nearest2d",
            "upsample_bilinear2d",
            "upsample_bicubic2d",
            "_upsample_bilinear2d_aa",
            "_upsample_bicubic2d_aa",
            "reflection_pad2d",
            "replication_pad2d",
        ),
        _pooling(2),
    ),
    **dict.fromkeys(("reflection_pad1d", "replication_pad1d"), _pooling(1)),
    **dict.fromkeys(
        (
            "avg_pool3d",
            "max_pool3d_with_indices",
            "_adaptive_avg_pool3d",
            "adaptive_max_pool3d",
            "upsample_nearest3d",
            "upsample_trilinear3d",
            "replication_pad3d",
        ),
        _pooling(3),
    ),
    **dict.fromkeys(
        (
            "native_batch_norm",
            "_native_batch_norm_legit_no_training",
            "_native_batch_norm_legit",
            "cudnn_batch_norm",
            "miopen_batch_norm",
            "_batch_norm_no_update",
        ),
        _batch_norm,
    ),
    "native_layer_norm": _layer_norm,
    "native_group_norm": _group_norm,
    "mm": _matmul(0),
    "bmm": _matmul(0),
    "addmm": _matmul(1),
    "baddbmm": _matmul(1),
    "convolution": _convolution,
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
        ),
        _attention,
    ),
}
