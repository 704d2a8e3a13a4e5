"""The arguments of every repair method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from fairpruner.core.plan import Plan
from fairpruner.inputs.batches import Batch, no_samples, read_batches
from fairpruner.models.devices import device_of_model
from fairpruner.repair.notes import Note

COMPARED = 200  # predictions on which the loss before and after a repair is compared


@dataclass(frozen=True, eq=False)
class Job:
    """A cut model, which a method changes in place, and all that it may read."""

    small: nn.Module
    model: nn.Module
    plan: Plan
    read: Callable[[], Iterator[Batch]]  # reads the data once more


def compared(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The first batches, until they hold COMPARED predictions: samples, or tokens of texts."""
    predictions = 0
    for batch in batches:
        yield batch
        predictions += max(batch.size, batch.predicted_tokens())
        if predictions >= COMPARED:
            return


def would_raise_loss(method: str, before: float, after: float) -> Note:
    """The note for a method whose result is dropped."""
    return Note(method, "kept", f"the loss on the data would rise from {before:.4g} to {after:.4g}")


def first_batch(data: Iterable[Any], model: nn.Module) -> Batch:
    """The first batch; data without any is refused."""
    first = next(read_batches(data, device_of_model(model), model), None)
    if first is None:
        raise no_samples()
    return first
