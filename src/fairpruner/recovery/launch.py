"""How this process was launched: its accelerator, devices, precision, and sums over all processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from fairpruner.errors import FairprunerError, import_extra
from fairpruner.models.devices import devices_of_model
from fairpruner.models.torch_private import multiplies_bfloat16
from fairpruner.recovery.recipe import PRECISIONS

if TYPE_CHECKING:
    from accelerate import Accelerator

SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")  # ways to launch in which no process holds the whole model


@contextmanager
def accelerator_of_launch() -> Iterator[Accelerator]:
    """The accelerator of this launch; afterwards, the state that all accelerators share is as before.

    Otherwise accelerate would refuse an accelerator with other settings in the same process.
    """
    import_extra("accelerate", "train", "Recovery")
    from accelerate.state import AcceleratorState, GradientState, PartialState

    shared = [state._shared_state for state in (AcceleratorState, GradientState, PartialState)]
    before = [dict(values) for values in shared]
    try:
        yield _joined_accelerator()
    finally:
        for values, old in zip(shared, before, strict=True):
            values.clear()
            values.update(old)


def _joined_accelerator() -> Accelerator:
    """A new accelerator.

    Raises unless accelerate joined all launched processes; otherwise each would train alone.
    """
    launched = (
        dist.get_world_size()
        if dist.is_available() and dist.is_initialized()
        else int(os.environ.get("WORLD_SIZE", "1"))
    )
    from accelerate import Accelerator

    on_cpu = launched > 1 and not torch.accelerator.is_available()
    accelerator = Accelerator(cpu=on_cpu)
    if accelerator.num_processes != launched:
        raise FairprunerError(
            f"{launched} processes were launched, but accelerate joined {accelerator.num_processes}: set"
            " ACCELERATE_USE_CPU=true to train on the CPU, and create no Accelerator before recover."
        )
    if accelerator.distributed_type.value in SHARDED:
        raise FairprunerError(
            f"recover was launched with {accelerator.distributed_type.value}, expected one process or"
            " data-parallel processes: launch it with torchrun or accelerate without sharding."
        )
    return accelerator


def is_spread(model: nn.Module) -> bool:
    """Whether the model lies on several devices."""
    return len(devices_of_model(model)) > 1


def placed(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """The model moved to the device of this process; a model on several devices is not moved."""
    if not is_spread(model):
        return model.to(accelerator.device)
    if accelerator.num_processes > 1:
        raise FairprunerError(
            f"{type(model).__name__} is spread over {len(devices_of_model(model))} devices, and"
            f" {accelerator.num_processes} processes were launched: recover it in one process."
        )
    return model


def summed(accelerator: Accelerator, *numbers: float) -> list[float]:
    """Each number summed over all processes."""
    if accelerator.num_processes == 1:
        return list(numbers)
    mine = torch.tensor(numbers, dtype=torch.float64, device=accelerator.device)
    total: list[float] = accelerator.reduce(mine, "sum").tolist()
    return total


def of_first_process(accelerator: Accelerator, value: str | None) -> str | None:
    """The value that the first process has."""
    if accelerator.num_processes == 1:
        return value
    from accelerate.utils import broadcast_object_list

    found: list[str | None] = broadcast_object_list([value])
    return found[0]


def precision_of(wanted: str, accelerator: Accelerator, net: nn.Module) -> str:
    """The precision of products, by accelerate's name: "no" for that of the weights, "bf16" or "fp16".

    A launch with `--mixed_precision` decides. Otherwise "auto" is bfloat16 if the weights are float32 and the
    device is faster with it.
    """
    if accelerator.mixed_precision != "no":
        return str(accelerator.mixed_precision)
    if wanted != "auto":
        return PRECISIONS[wanted]
    wide = all(p.dtype == torch.float32 for p in net.parameters() if p.is_floating_point())
    faster = all(multiplies_bfloat16(device) for device in devices_of_model(net))
    return PRECISIONS["bfloat16" if wide and faster else "float32"]


def autocast(
    precision: str, accelerator: Accelerator, device: torch.device
) -> AbstractContextManager[object]:
    """Inside, products are computed in this precision."""
    if precision == accelerator.mixed_precision:
        launched: AbstractContextManager[object] = accelerator.autocast()
        return launched
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
