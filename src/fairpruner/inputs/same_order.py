"""Data that yields the same batches in every pass, although it shuffles or augments at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
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
        self._data = data
        self._to_start = _restoring(data)

    def __len__(self) -> int:
        return len(self._data)  # type: ignore[arg-type]  # a loader of unknown length raises, as len does

    def __iter__(self) -> Iterator[Any]:
        to_present = _restoring(self._data)
        for restore in self._to_start:
            restore()
        try:
            batches: Iterator[Any] | None = None
            for position in count():
                with random_state_kept():
                    _seed(position)
                    batches = iter(self._data) if batches is None else batches
                    batch = next(batches, _END)
                if batch is _END:
                    return
                yield batch
        finally:
            for restore in to_present:
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
    values = [value for part in parts_that_shuffle(data) for value in getattr(part, "__dict__", {}).values()]
    return [restore for value in values if (restore := restore_generator(value)) is not None]


def _seed(number: int) -> None:
    """Seed Python, numpy and torch on the CPU; `torch.manual_seed` would seed other devices too."""
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 (datasets use it)
    torch.default_generator.manual_seed(number)
