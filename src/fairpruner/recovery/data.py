"""The batches of an epoch: divided between processes, and the same each time that this epoch is read."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from fairpruner.core.sealed import digest
from fairpruner.errors import FairprunerError
from fairpruner.inputs.batches import Batch, read_batches
from fairpruner.inputs.same_order import generators_kept, parts_that_shuffle
from fairpruner.models.calling import tensors_of
from fairpruner.models.randomness import random_state_kept
from fairpruner.models.torch_private import with_new_workers

# The settings of a loader that do not depend on the order of its batches.
LOADER_SETTINGS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)
READING, COMPUTING = 0, 1  # streams of random numbers; a process computes with the stream COMPUTING + rank


def reseed(device: torch.device, *numbers: int) -> None:
    """Seed torch, numpy and Python from some numbers, so that no random state has to be saved."""
    seed = _mixed(*numbers)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (a dataset may use this state)
    # torch.manual_seed also seeds every other device, which takes a millisecond and is useless on the CPU.
    (torch.default_generator.manual_seed if device.type == "cpu" else torch.manual_seed)(seed)


def _mixed(*numbers: int) -> int:
    """One seed from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def shard(data: Iterable[Any], rank: int, processes: int, *, even: bool) -> Iterable[Any]:
    """The batches of one process: every `processes`-th batch, from number `rank` on.

    With `even`, all processes get equally many batches, which training needs.
    """
    if processes == 1:
        return data
    if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset):
        return _Shard(data, rank, processes, even)
    if not hasattr(data.batch_sampler, "batch_size"):
        return _Shard(data, rank, processes, even)
    if isinstance(data.sampler, DistributedSampler):
        return data
    from accelerate.data_loader import BatchSamplerShard

    # The indices are divided, so no process loads the samples of another.
    sampler = BatchSamplerShard(data.batch_sampler, processes, rank, even_batches=even)
    settings = {name: getattr(data, name) for name in LOADER_SETTINGS}
    return DataLoader(data.dataset, batch_sampler=sampler, **settings)


class _Shard:
    """The batches of one process from any iterable: every process reads all batches and uses its share."""

    def __init__(self, data: Iterable[Any], rank: int, processes: int, even: bool) -> None:
        self._data, self._rank, self._processes = data, rank, processes
        # In each round the processes read one batch each. A round with fewer batches than this is dropped.
        self._needed = processes if even else rank + 1

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._data)
        while len(round_ := list(itertools.islice(batches, self._processes))) >= self._needed:
            yield round_[self._rank]

    def __len__(self) -> int:
        return (len(self._data) + self._processes - self._needed) // self._processes  # type: ignore[arg-type]


def steps_of(data: Iterable[Any]) -> int | None:
    """The number of batches, or None if the data has no length."""
    try:
        return len(data) if isinstance(data, Sized) else None
    except TypeError:  # a loader of an iterable dataset
        return None


def epoch_batches(
    data: Iterable[Any], device: torch.device, model: nn.Module, *, seed: int, epoch: int, start: int = 0
) -> Iterator[Batch]:
    """The batches of an epoch for a model, from position `start` on.

    The earlier batches are read too and dropped, because the order and the augmentation of the later ones
    depend on them.
    """
    for generator in _generators(data):
        generator.manual_seed(_mixed(seed, epoch))
    for source in parts_that_shuffle(data):
        if hasattr(source, "set_epoch"):
            source.set_epoch(epoch)
    batches = read_batches(data, device, model)
    for position in itertools.count():
        reseed(device, seed, epoch, position, READING)
        batch = next(batches, None)
        if batch is None:
            if position < start:
                raise FairprunerError(
                    f"The training data ended after {position} batches, but the checkpoint was made after"
                    f" {start}: give the data of that run."
                )
            return
        if position >= start:
            yield batch


def first_batch(data: Iterable[Any], device: torch.device, model: nn.Module, *, seed: int) -> str | None:
    """A hash of the first batch of the first epoch, by which a run recognises its data; None without a batch.

    The batch is read twice, because a hash cannot recognise data that is never the same again: data with its
    own random generators, for example. The training that follows is not changed.
    """

    def read() -> str | None:
        batch = next(epoch_batches(with_new_workers(data), device, model, seed=seed, epoch=0), None)
        if batch is None:
            return None
        tensors = (tensor.detach().cpu().contiguous() for tensor in tensors_of([batch.inputs, batch.labels]))
        return digest({}, {str(position): tensor for position, tensor in enumerate(tensors)})[:16]

    with random_state_kept([device]), generators_kept(data):
        first, again = read(), read()
    return first if first == again else "different each time it is read"


def _generators(data: Any) -> Iterator[torch.Generator]:
    for source in parts_that_shuffle(data):
        generator = getattr(source, "generator", None)
        if isinstance(generator, torch.Generator):
            yield generator
