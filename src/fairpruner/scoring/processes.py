"""Several processes scoring together: each takes its share of the batches, and what they summed up is
joined.
"""

from __future__ import annotations

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
    """The processes of one job, as `torchrun` or `accelerate launch` starts them; alone, one of one."""

    rank: int = 0
    size: int = 1

    @staticmethod
    def current() -> Processes:
        """The job this process belongs to; one that a launcher has started but not yet connected is
        connected now.
        """
        if not dist.is_available():
            return Processes()
        if (
            not dist.is_initialized()
            and int(os.environ.get("WORLD_SIZE", "1")) > 1
            and "MASTER_ADDR" in os.environ
        ):
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        return Processes(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Processes()

    def share(self, items: Iterable[Item]) -> Iterator[Item]:
        """This process's part of what all of them iterate over alike: every size-th item."""
        return islice(items, self.rank, None, self.size)

    def gathered(self, value: Item) -> list[Item]:
        """Everybody's value, in the order of ranks, on every process."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with _together():
            dist.all_gather_object(values, value)
        return values

    def gathered_tensors(self, tensor: Tensor) -> list[Tensor]:
        """Everybody's tensor, all of one shape, in the order of ranks."""
        if self.size == 1:
            return [tensor]
        tensors = [torch.empty_like(tensor) for _ in range(self.size)]
        with _together():
            dist.all_gather(tensors, tensor.contiguous())
        return tensors

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum of everybody's tensor, the same on every process."""
        if self.size == 1:
            return tensor
        total = tensor.clone()
        with _together():
            dist.all_reduce(total)
        return total


@contextmanager
def _together() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise FairprunerError(
            "Another process of this job has died or left before the scores were joined, so there are none:"
            f" look at its output and start again. ({error})"
        ) from error
