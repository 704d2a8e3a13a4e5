"""The arguments of every repair method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from fairpruner.core.plan import Plan
from fairpruner.inputs.batches import Batch, no_samples, read_batches
from fairpruner.models.devices import device_of_model


@dataclass(frozen=True, eq=False)
class Job:
    """A cut model, which a method changes in place, and all that it may read."""

    small: nn.Module
    model: nn.Module
    plan: Plan
    read: Callable[[], Iterator[Batch]]  # reads the data once more


def first_batch(data: Iterable[Any], model: nn.Module) -> Batch:
    """The first batch; data without any is refused."""
    first = next(read_batches(data, device_of_model(model), model), None)
    if first is None:
        raise no_samples()
    return first
