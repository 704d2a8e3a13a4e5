"""Recurrent modules, run without their fused kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def plain_recurrence(model: nn.Module) -> Iterator[None]:
    """Inside, recurrent modules run as products and sums, which tracing and counting can see."""
    if not any(isinstance(module, nn.RNNBase) for module in model.modules()):
        yield
        return
    fused: tuple[Any, ...] = (torch.backends.mkldnn, torch.backends.cudnn)
    enabled = [backend.enabled for backend in fused]
    try:
        for backend in fused:
            backend.enabled = False
        yield
    finally:
        for backend, before in zip(fused, enabled, strict=True):
            backend.enabled = before
