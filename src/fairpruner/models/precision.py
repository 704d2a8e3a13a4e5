"""Statistics of low-precision tensors are computed in float32, those of float64 tensors in float64.

The caller's autocast applies to models, not to statistics.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for a float64 tensor, float32 for any other."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def in_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32; a tensor in float32 or float64 stays as it is.

    >>> in_float32(torch.zeros(2, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return tensor.to(wide_dtype(tensor))


def without_autocast(device: torch.device) -> torch.autocast:
    """Inside, products on a device have the dtype of their operands, also if the caller uses autocast.

    >>> with torch.autocast("cpu", torch.bfloat16), without_autocast(torch.device("cpu")):
    ...     (torch.ones(1, 2) @ torch.ones(2, 1)).dtype
    torch.float32
    """
    return torch.autocast(device.type, enabled=False)


def forget_casts() -> None:
    """Let the caller's autocast cast weights again: it keeps copies, and the weights have changed."""
    torch.clear_autocast_cache()
