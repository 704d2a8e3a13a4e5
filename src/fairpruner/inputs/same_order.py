"""Data that yields the same batches in every pass, although it shuffles or augments at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import torch

from fairpruner.models.randomness import random_state_kept, restore_generator

_END = object()


class SameOrder:
    """The batches of `data`, in every pass as in the first one; the caller's random states are not changed.

    Each batch is read with the random states of its position. Generators that the data, its dataset or its
    samplers hold as attributes start every pass from the state that they had first. Augmentation in worker
    processes is the same too, because their seeds are drawn here.

    >>> from torch.utils.data import DataLoader
    >>> data = SameOrder(DataLoader(list(range(8)), batch_size=4, shuffle=True))
    >>> [batch.tolist() for batch in data] == [batch.tolist() for batch in data]
    True
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self.original = data
        self._data = [data] if isinstance(data, (torch.Tensor, np.ndarray)) else data  # one batch
        self._to_start = _restoring(data)

    def __len__(self) -> int:
        return len(self._data)  # type: ignore[arg-type]  # a loader of unknown length raises, as len does

    def __iter__(self) -> Iterator[Any]:
        with generators_kept(self._data):
            for restore in self._to_start:
                restore()
            batches: Iterator[Any] | None = None
            for position in count():
                with random_state_kept():
                    _seed(position)
                    batches = iter(self._data) if batches is None else batches
                    batch = next(batches, _END)
                if batch is _END:
                    return
                yield batch


@contextmanager
def generators_kept(*data: Any) -> Iterator[None]:
    """Restores the states of all random generators that the data, its dataset and its samplers hold."""
    undo = [restore for item in data for restore in _restoring(item)]
    try:
        yield
    finally:
        for restore in undo:
            restore()


def parts_that_shuffle(data: Any) -> Iterator[Any]:
    """The data, and every object inside a loader that may shuffle or augment it."""
    yield data
    for name in ("dataset", "sampler", "batch_sampler"):
        inner = getattr(data, name, None)
        if inner is not None:
            yield from parts_that_shuffle(inner)


def _restoring(data: Any) -> list[Callable[[], object]]:
    """Functions that reset the generators inside the data to their present states."""
    held = [value for part in parts_that_shuffle(data) for value in _attributes(part)]
    return [restore for value in held if (restore := restore_generator(value)) is not None]


def _attributes(part: Any) -> Iterator[Any]:
    yield getattr(part, "generator", None)  # a property or a slot too
    yield from getattr(part, "__dict__", {}).values()


def _seed(number: int) -> None:
    """Seed Python, numpy and torch on the CPU; `torch.manual_seed` would seed other devices too."""
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 (datasets use it)
    torch.default_generator.manual_seed(number)
