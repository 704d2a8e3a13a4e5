"""Random weights with which activations do not vanish, so that a wrong cut changes the output."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import nn

from fairpruner.models.narrowing import Change, copy_with
from fairpruner.models.torch_private import AnyConvolution

# The distance between the starts of two windows, in numbers. It is a multiple of 16, because some kernels
# need aligned matrices, and of a prime, so that a row of one matrix rarely equals a row of another.
APART = 16 * 61


def lively_weights(
    model: nn.Module, dtype: torch.dtype | None, *, draw: int = 0, own_buffers: bool = False
) -> Change:
    """Random tensors for a whole model; each draw gives others. If asked for, buffers stay near their values.

    Matrices of the same fan-in are windows into one pool, so together they take the memory of the largest.
    The matrices of a stack of experts are windows of their own, which overlap.
    """
    stacks = frozenset(_stacks(model))
    # An embedding with max_norm writes into its weight, so this weight must not be a part of the pool.
    written = {
        f"{path}.weight" for path, module in model.named_modules() if getattr(module, "max_norm", None)
    }
    matrices = {
        name: p
        for name, p in model.named_parameters()
        if p.ndim > 1 and p.numel() and p.is_floating_point() and name not in written
    }
    kinds = {
        name: (max(p.shape[1:]) if name in stacks else p[0].numel(), p.dtype, p.device)
        for name, p in matrices.items()
    }
    buffers = {name for name, _ in model.named_buffers()}
    starts = {name: APART * number for number, name in enumerate(matrices)}
    lengths: dict[tuple[int, torch.dtype, torch.device], int] = {}
    for name, kind in kinds.items():
        lengths[kind] = max(lengths.get(kind, 0), starts[name] + _span(matrices[name], name in stacks))
    pools = {
        kind: (
            lively(
                f"{kind} {draw}" if draw else str(kind),
                torch.empty(1, dtype=kind[1], device=_home(kind[2])).expand(-(-length // kind[0]), kind[0]),
                dtype,
            ).flatten()
        )
        for kind, length in lengths.items()
    }

    def weights(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if own_buffers and name in buffers and tensor.is_floating_point() and not tensor.is_meta:
            near = 0.75 + lively(name, tensor, dtype).abs().clamp_max(1) / 2
            return tensor.to(near.dtype) * near
        if name not in matrices:
            return lively(f"{name} {draw}" if draw else name, tensor, dtype)
        pool = pools[kinds[name]].narrow(0, starts[name], _span(tensor, name in stacks))
        if name in stacks:
            return pool.as_strided(tensor.shape, (APART, tensor.shape[2], 1))
        return pool.view(tensor.shape)

    return weights


def with_pools(model: nn.Module) -> nn.Module:
    """A copy with random weights, which are windows into pools as large as the largest tensors."""
    return copy_with(model, lively_weights(model, torch.float32))


def _span(matrix: torch.Tensor, stack: bool) -> int:
    """How many numbers of a pool the windows of a parameter cover."""
    return matrix[0].numel() + APART * (len(matrix) - 1) if stack else matrix.numel()


def _stacks(model: nn.Module) -> Iterator[str]:
    """The names of parameters that hold one matrix for each of several experts."""
    for path, module in model.named_modules():
        if not isinstance(module, AnyConvolution):
            yield from (f"{path}.{name}" for name, p in module.named_parameters(recurse=False) if p.ndim == 3)


def lively(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Random numbers in a tensor's shape: scales and variances near one, matrices of variance 2 / fan-in.

    Integers are copied. A tensor on the device "meta" has no numbers: integers become 0, and masks True.
    """
    if not tensor.is_floating_point():
        unknown = torch.ones if tensor.dtype is torch.bool else torch.zeros
        return unknown(tensor.shape, dtype=tensor.dtype, device="cpu") if tensor.is_meta else tensor
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=_home(tensor.device))
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(name.encode()))
    noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float32, device="cpu")
    fresh = noise.add_(0.5) if tensor.ndim < 2 else noise.sub_(0.5).mul_((24 / tensor[0].numel()) ** 0.5)
    return fresh.to(device=_home(tensor.device), dtype=dtype or tensor.dtype)


def _home(device: torch.device) -> torch.device:
    """The device of a tensor's numbers; the CPU for a tensor on the device "meta"."""
    return torch.device("cpu") if device.type == "meta" else device
