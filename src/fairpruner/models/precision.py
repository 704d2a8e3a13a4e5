"""Statistics of low-precision tensors are computed in float32, those of float64 tensors in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for a float64 tensor, float32 for any other."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def widened(tensor: Tensor) -> Tensor:
    """The tensor in its `wide_dtype`; the tensor itself if it has that dtype.

    >>> widened(torch.zeros(2, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return tensor.to(wide_dtype(tensor))
