"""Which models fairpruner can change: plain modules of Python code that hold their own weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.ao.nn.quantized import FloatFunctional
from torch.nn.parameter import is_lazy

from fairpruner.errors import FairprunerError
from fairpruner.models.torch_private import is_compiled, is_compiled_in_place

# Packages of torch whose modules hold packed integer weights, which are not named parameters.
QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")
# Wrappers that hold a model as `module`, and copy or divide its tensors when it is called.
PARALLEL = (
    "torch.nn.parallel.data_parallel.DataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
)


def check_supported(model: Any) -> None:
    """Refuse a model that cannot be cut, counted, saved and loaded again as plain modules.

    >>> check_supported(nn.Linear(3, 2))
    """
    if isinstance(model, torch.export.ExportedProgram):
        raise FairprunerError(_fixed("", model, "an exported graph"))
    if not isinstance(model, nn.Module):
        raise FairprunerError(f"The model is of type {type(model).__name__}, expected a torch.nn.Module.")
    for path, module in model.named_modules():
        reason = _reason(path, module)
        if reason:
            raise FairprunerError(reason)


def check_has_numbers(model: nn.Module) -> None:
    """`check_supported`, and refuse a model whose tensors are on the meta device."""
    check_supported(model)
    name = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if name is not None:
        raise FairprunerError(
            f"{type(model).__name__} holds no numbers: {name} is on the meta device. Load its weights first."
        )


def _reason(path: str, module: nn.Module) -> str:
    """Why one module makes its model unsupported, or ""."""
    if isinstance(module, torch.jit.ScriptModule):
        # A scripted function without tensors, such as an activation, has nothing to cut. A frozen module has
        # no mode, and its tensors are constants.
        frozen = not hasattr(module, "training")
        holds = frozen or any(True for _ in (*module.parameters(), *module.buffers()))
        return _fixed(path, module, "TorchScript") if holds else ""
    if any(base.__module__.startswith("torch.export") for base in type(module).__mro__):
        return _fixed(path, module, "an exported graph")
    if type(module).__module__.startswith(QUANTIZED) and not isinstance(module, FloatFunctional):
        return (
            f"{_at(path, module)} is quantized: its packed weights can be neither cut nor saved by name."
            " Prune the model before it is quantized, then quantize the smaller one."
        )
    if any(f"{base.__module__}.{base.__qualname__}" in PARALLEL for base in type(module).__mro__):
        return (
            f"{_at(path, module)} divides its work among devices or processes. Give the model inside, its"
            " `.module` on one device, and wrap the smaller model."
        )
    if is_compiled_in_place(module):
        return (
            f"{_at(path, module)} is compiled, and every cut would be compiled anew. Prune the model before"
            " its compile() is called, then compile the smaller one."
        )
    if is_compiled(module):
        return (
            f"{_at(path, module)} is compiled, so its tensors have other names, and every cut would be"
            " compiled anew. Give the module it was made from, and compile the smaller model."
        )
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    divided = next((name for name, tensor in tensors if type(tensor.data).__name__ == "DTensor"), None)
    if divided is not None:
        return (
            f"{_at(path, module)} has a tensor {divided} that is divided among processes (DTensor). Prune the"
            " whole model before it is divided, then divide the smaller one."
        )
    sparse = next((name for name, tensor in tensors if tensor.layout is not torch.strided), None)
    if sparse is not None:
        return (
            f"{_at(path, module)} has a sparse tensor {sparse}, from which no unit can be removed. Make it"
            " dense with to_dense()."
        )
    lazy = next((name for name, tensor in tensors if is_lazy(tensor)), None)
    if lazy is not None:
        return (
            f"{_at(path, module)} is lazy: its {lazy} has no shape before the first call. Call the model once"
            " on an example, then try again."
        )
    return ""


def _fixed(path: str, module: Any, form: str) -> str:
    return (
        f"{_at(path, module)} is {form}, whose sizes are fixed: no unit can be removed from it. Give the"
        " Python module it was made from, and script or export the smaller model."
    )


def _at(path: str, module: Any) -> str:
    return (
        f"The model's {path!r} ({type(module).__name__})" if path else f"The model ({type(module).__name__})"
    )
