"""The device of a model."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn


def device_of_model(model: nn.Module) -> torch.device:
    """Where the first parameter or buffer lies, to which inputs are moved; the CPU if there is none.

    >>> device_of_model(nn.ReLU())
    device(type='cpu')
    """
    return next(chain(model.parameters(), model.buffers()), torch.empty(0)).device
