"""All that fairpruner uses of torch beyond its documented interface, in one place.

A release of torch may change any of it. `tests/test_private_interfaces.py` names each of these, so that such
a change shows there first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.data import DataLoader
from torch.utils.data._utils.signal_handling import _set_SIGCHLD_handler
from torch.utils.flop_counter import flop_registry

__all__ = [
    "FLOP_FORMULAS",
    "AnyBatchNorm",
    "AnyConvolution",
    "TorchDispatchMode",
    "as_products",
    "base_of",
    "draws_random_numbers",
    "flop_formula",
    "held_tensors",
    "hooked_modules",
    "is_compiled",
    "is_compiled_in_place",
    "is_in_place",
    "is_transformed",
    "multiplied",
    "multiplies_bfloat16",
    "operation_name",
    "plain_function",
    "replaced_children",
    "tree_flatten",
    "tree_map_only",
    "unsaved_buffers",
    "watch_worker_processes",
    "with_new_workers",
    "without_reentrant_checkpoints",
    "written_tensors",
]

AnyConvolution = _ConvNd  # of any number of dimensions, transposed ones too
AnyBatchNorm = _BatchNorm
watch_worker_processes = _set_SIGCHLD_handler  # as a loader does before it starts its first worker
plain_function = torch._C.DisableTorchFunctionSubclass  # inside, tensor subclasses are plain tensors


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for products in bfloat16, so that they are faster than in float32.

    A CPU with AMX is not counted: some virtual machines announce AMX and end the process that uses it.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    cpu = torch.cpu
    return device.type == "cpu" and cpu._is_avx512_bf16_supported() and not cpu._is_amx_tile_supported()


def multiplied(left: Tensor, right: Tensor) -> Tensor:
    """The product of matrices, [m, k] and [k, n] or [G, m, k] and [G, k, n].

    On x86, large ones in float32 are multiplied by oneDNN, which computes convolutions too: `@` calls MKL,
    which takes twice as long on processors of AMD.
    """
    if left.ndim == 3 and len(left) == 1:
        return multiplied(left[0], right[0])[None]
    if left.ndim == 3 or left.numel() * right.shape[-1] < FEW_PRODUCTS or not _by_onednn(left, right):
        return left @ right
    product: Tensor = torch.ops.mkldnn._linear_pointwise(
        _dense(left), _dense(right).t(), None, "none", [], ""
    )
    return product


FEW_PRODUCTS = 2**20  # below it, `@` starts sooner


def _by_onednn(*operands: Tensor) -> bool:
    there = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    plain = all(operand.device.type == "cpu" and operand.dtype == torch.float32 for operand in operands)
    return there and plain and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _dense(matrix: Tensor) -> Tensor:
    """The matrix without gaps in memory: with gaps, oneDNN can be a thousand times slower."""
    return matrix.contiguous() if matrix.stride(1) == 1 else matrix.t().contiguous().t()


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    """FLOPs of the two products of attention, tensors [batch, heads, tokens, width] or their shapes."""
    batch, heads, tokens, width = query.shape if isinstance(query, Tensor) else query
    keys, value_width = (value.shape if isinstance(value, Tensor) else value)[2:]
    return int(2 * batch * heads * tokens * keys * (width + value_width))


# Formulas that torch's counter lacks: operation -> FLOPs from the arguments. Torch counts no attention on the
# CPU and on MPS, and on GPUs none whose keys have fewer heads than its queries. Without these formulas, the
# FLOPs of a model would depend on its device.
FLOP_FORMULAS: dict[Any, Callable[..., int]] = dict.fromkeys(
    [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch.ops.aten._scaled_dot_product_attention_math_for_mps,
        torch.ops.aten._scaled_dot_product_flash_attention,
        torch.ops.aten._scaled_dot_product_efficient_attention,
        torch.ops.aten._scaled_dot_product_cudnn_attention,
        torch.ops.aten._scaled_dot_product_fused_attention_overrideable,
    ],
    _attention_flops,
)


def operation_name(func: Any) -> str:
    """The name of an operation as dispatch modes get it: `add_` of `aten.add_.Tensor`."""
    return str(func._overloadpacket.__name__)


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` made this module."""
    return type(module).__module__.startswith("torch._dynamo")


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


def is_in_place(func: Any) -> bool:
    """Whether an operation writes into one of its arguments."""
    return bool(func._schema.is_mutable)


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor stands for others, inside torch.vmap or torch.func.grad."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def draws_random_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of an operation draws random numbers; attention does only with a dropout above 0."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    return bool({"dropout_p": 0.0, **dict(zip(names, args, strict=False)), **kwargs}["dropout_p"])


def flop_formula(func: Any) -> Callable[..., Any] | None:
    """The formula for an operation's FLOPs; None for one that has none."""
    packet = func._overloadpacket
    formula: Callable[..., Any] | None = FLOP_FORMULAS.get(packet) or flop_registry.get(packet)
    return formula


def as_products(func: Any) -> Callable[..., Any] | None:
    """A function that computes a fused operation by products; None for all other operations.

    On MPS `aten.linear` is one operation; other devices decompose it into a transpose and `addmm`.
    """
    return func.decompose if func._overloadpacket is torch.ops.aten.linear else None


def base_of(tensor: Tensor) -> Tensor:
    """The tensor that a view was made from; the tensor itself if it is not a view."""
    return tensor if tensor._base is None else tensor._base


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors into which a call of an operation writes."""
    written: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            written += [t for t in (given if isinstance(given, (list, tuple)) else [given]) if t is not None]
    return written


def unsaved_buffers(model: nn.Module) -> set[str]:
    """The names of buffers that a model does not save."""
    return {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }


def held_tensors(module: nn.Module, name: str) -> dict[str, Any]:
    """The dict in which a module holds its parameter or buffer of this name."""
    return module._parameters if name in module._parameters else module._buffers


@contextmanager
def replaced_children(module: nn.Module, children: dict[str, nn.Module]) -> Iterator[None]:
    """Inside, a module has these children instead of its own."""
    own = module._modules
    module._modules = dict(children)
    try:
        yield
    finally:
        module._modules = own


@contextmanager
def without_reentrant_checkpoints() -> Iterator[None]:
    """Inside, `torch.utils.checkpoint.checkpoint(..., use_reentrant=True)` only calls its function.

    However a model imported `checkpoint`, it ends in this `apply`, which the class inherits.
    """
    reentrant: Any = CheckpointFunction
    own = vars(reentrant).get("apply")

    def call(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)

    reentrant.apply = staticmethod(call)
    try:
        yield
    finally:
        if own is None:
            del reentrant.apply
        else:
            reentrant.apply = own


def with_new_workers(data: Any) -> Any:
    """A loader with the same settings that starts its own workers; data that is no loader, as it is.

    Reading it does not change the random states in persistent workers of the loader given.
    """
    if not isinstance(data, DataLoader):
        return data
    loader = copy.copy(data)
    loader._iterator = None
    return loader


@contextmanager
def hooked_modules(
    enter: Callable[[nn.Module, Any], None] | None,
    leave: Callable[[nn.Module, Any, Any, Any], None],
    *,
    always_leave: bool = False,
) -> Iterator[None]:
    """Call `enter(module, args)` and `leave(module, args, kwargs, output)` around every call of a module.

    The hooks are global, so that no module of the user gets one. With `always_leave`, `leave` is called after
    an exception too. torch 2.13 forgets to remove one entry of such a hook, and `torch.compile` then warns
    for the rest of the process.
    """
    handles = [register_module_forward_hook(leave, with_kwargs=True, always_call=always_leave)]
    if enter is not None:
        handles.append(register_module_forward_pre_hook(enter))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
            _global_forward_hooks_with_kwargs.pop(handle.id, None)
