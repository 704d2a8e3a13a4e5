"""The devices of models, of examples and of this process."""

from __future__ import annotations

import os
from itertools import chain
from typing import Any

import torch
from torch import nn

from fairpruner.models.calling import tensors_of


def device_of_model(model: nn.Module) -> torch.device:
    """The device of the first parameter or buffer, to which inputs are moved; the CPU if there is none.

    >>> device_of_model(nn.ReLU())
    device(type='cpu')
    """
    return next(chain(model.parameters(), model.buffers()), torch.empty(0, device="cpu")).device


def devices_of_model(model: nn.Module) -> tuple[torch.device, ...]:
    """All devices that a model is spread over, that of its inputs first.

    >>> devices_of_model(nn.Linear(3, 2))
    (device(type='cpu'),)
    """
    return tuple(dict.fromkeys(tensor.device for tensor in chain(model.parameters(), model.buffers())))


def device_of_example(example: Any) -> torch.device:
    """The device of the first tensor of an example or of an output; the CPU if there is none."""
    return next((tensor.device for tensor in tensors_of(example)), torch.device("cpu"))


def device_of_process(device: str) -> torch.device:
    """The device that this process of a job uses: "cuda" is the GPU with the number LOCAL_RANK.

    `torchrun` and `accelerate launch` set LOCAL_RANK. A device with a number, and the CPU, stay as they are.

    >>> device_of_process("cpu")
    device(type='cpu')
    """
    asked = torch.device(device)
    rank = os.environ.get("LOCAL_RANK", "")
    if asked.type in ("cpu", "mps", "meta") or asked.index is not None or not rank.isdecimal():
        return asked
    return torch.device(asked.type, int(rank))


def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64; MPS does not.

    >>> has_float64(torch.device("cpu"))
    True
    """
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def in_float64(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float64; in float32 if its device has no float64.

    >>> in_float64(torch.ones(1)).dtype
    torch.float64
    """
    return tensor.double() if has_float64(tensor.device) else tensor.float()


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device, in float32 if that has no float64."""
    narrow = tensor.dtype == torch.float64 and not has_float64(device)
    return (tensor.float() if narrow else tensor).to(device)


def wait_for_model(model: nn.Module) -> None:
    """Wait until the model's devices have finished; calls on a GPU return before it has computed."""
    for device in devices_of_model(model):
        if device.type == "mps":
            torch.mps.synchronize()  # takes no device, because there is only one
        elif device.type not in ("cpu", "meta"):
            torch.get_device_module(device).synchronize(device)
