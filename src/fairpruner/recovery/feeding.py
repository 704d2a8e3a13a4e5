"""The batches of an epoch: dealt to the processes, and the same whenever that epoch is read."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from fairpruner.errors import FairprunerError
from fairpruner.inputs.batches import Batch, read_batches

# What a loader is besides its dataset and its order.
CARRIED = (
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
READING, COMPUTING = 0, 1  # streams of random numbers; the processes compute with COMPUTING + rank


def reseed(device: torch.device, *numbers: int) -> None:
    """Start the random numbers of torch, numpy and Python at a place of their own, so that no state of
    theirs has to be saved.
    """
    seed = _mixed(*numbers)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (the state that a dataset may use)
    # torch.manual_seed also tells every kind of device, which takes a millisecond and is for nothing on
    # the
    # CPU.
    (torch.default_generator.manual_seed if device.type == "cpu" else torch.manual_seed)(seed)


def _mixed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


@contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """Random states of torch, numpy and Python are afterwards what they were."""
    python, array = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)  # noqa: NPY002


def deal(data: Iterable[Any], rank: int, processes: int, *, even: bool) -> Iterable[Any]:
    """Every `processes`-th batch of the data; `even` gives all processes equally many, as training needs
    it.
    """
    if processes == 1:
        return data
    if (
        isinstance(data, DataLoader)
        and not isinstance(data.dataset, IterableDataset)
        and hasattr(data.batch_sampler, "batch_size")
    ):
        if isinstance(data.sampler, DistributedSampler):
            return data
        from accelerate.data_loader import BatchSamplerShard

        # Dealt before it is read: no process loads what another will use.
        sampler = BatchSamplerShard(data.batch_sampler, processes, rank, even_batches=even)
        return DataLoader(
            data.dataset, batch_sampler=sampler, **{name: getattr(data, name) for name in CARRIED}
        )
    return _Dealt(data, rank, processes, even)


class _Dealt:
    """Any other iterable: read whole by all, used in turn."""

    def __init__(self, data: Iterable[Any], rank: int, processes: int, even: bool) -> None:
        self._data, self._rank, self._processes, self._needed = (
            data,
            rank,
            processes,
            processes if even else rank + 1,
        )

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._data)
        while len(turn := list(itertools.islice(batches, self._processes))) >= self._needed:
            yield turn[self._rank]

    def __len__(self) -> int:
        return (len(self._data) + self._processes - self._needed) // self._processes  # type: ignore[arg-type]


def steps_of(data: Iterable[Any]) -> int | None:
    """The number of batches, where the data can tell."""
    try:
        return len(data) if isinstance(data, Sized) else None
    except TypeError:  # a loader of an iterable dataset
        return None


def epoch_batches(
    data: Iterable[Any], device: torch.device, seed: int, epoch: int, start: int
) -> Iterator[Batch]:
    """The batches of an epoch from position `start` on.

    The earlier ones are read too: the order, and augmentation in worker processes, then come out as they
    would have.
    """
    for source in _sources(data):
        generator = getattr(source, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(_mixed(seed, epoch))
        if hasattr(source, "set_epoch"):
            source.set_epoch(epoch)
    batches = read_batches(data, device)
    for position in itertools.count():
        reseed(device, seed, epoch, position, READING)
        batch = next(batches, None)
        if batch is None:
            if position < start:
                raise FairprunerError(
                    f"The training data ended after {position} batches, and the checkpoint was made after"
                    f" {start}: give the data of that run."
                )
            return
        if position >= start:
            yield batch


def _sources(data: Any) -> Iterator[Any]:
    """The data and whatever inside a loader may shuffle it."""
    yield data
    for name in ("dataset", "sampler", "batch_sampler"):
        inner = getattr(data, name, None)
        if inner is not None:
            yield from _sources(inner)
