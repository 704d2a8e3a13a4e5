"""Several processes score together: each takes a share of the batches, and their sums are joined."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fairpruner.errors import FairprunerError

Item = TypeVar("Item")


@dataclass(frozen=True)
class Processes:
    """The processes of one job, as `torchrun` or `accelerate launch` starts them; by default only one."""

    rank: int = 0
    size: int = 1

    @staticmethod
    def current(device: torch.device) -> Processes:
        """The processes of the job that this process belongs to; its model takes inputs on `device`.

        If a launcher started the processes and nothing has connected them, they are connected now, and
        disconnected when the program ends.
        """
        if not dist.is_available():
            return Processes()
        launched = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "MASTER_ADDR" in os.environ
        if launched and not dist.is_initialized():
            if device.type == "cuda":
                torch.cuda.set_device(device)  # nccl sends objects by way of the current device
            dist.init_process_group(backend_of(device))
            atexit.register(_disconnect)
        return Processes(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Processes()

    def share(self, items: Iterable[Item]) -> Iterator[Item]:
        """This process's share of items that all processes iterate over: every size-th item."""
        return islice(items, self.rank, None, self.size)

    def gathered(self, value: Item) -> list[Item]:
        """The values of all processes, in the order of ranks; every process gets them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with _together():
            dist.all_gather_object(values, value)
        return values

    def gathered_tensors(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all processes, which have one shape, in the order of ranks."""
        if self.size == 1:
            return [tensor]
        sent = tensor.contiguous().to(_sending_device())
        tensors = [torch.empty_like(sent) for _ in range(self.size)]
        with _together():
            dist.all_gather(tensors, sent)
        return [received.to(tensor.device) for received in tensors]

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum of the tensors of all processes, the same on every process."""
        if self.size == 1:
            return tensor
        total = tensor.to(_sending_device(), copy=True)
        with _together():
            dist.all_reduce(total)
        return total.to(tensor.device)


def backend_of(device: torch.device) -> str:
    """The backend of torch.distributed for models on a device: nccl for CUDA, gloo for all others.

    >>> backend_of(torch.device("cuda:1")), backend_of(torch.device("cpu"))
    ('nccl', 'gloo')
    """
    return "nccl" if device.type == "cuda" else "gloo"


def _sending_device() -> torch.device:
    """The device that tensors are sent from: the CPU with gloo, the process's GPU with nccl."""
    nccl = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def _disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _together() -> Iterator[None]:
    """Report the failure of another process as such."""
    try:
        yield
    except RuntimeError as error:
        raise FairprunerError(
            "Another process of this job has died or left before the scores were joined, so there are none:"
            f" look at its output and start again. ({error})"
        ) from error
