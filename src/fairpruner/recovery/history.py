"""The numbers of a training run: sums during an epoch, and the result of each epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fairpruner.inputs.batches import Batch
from fairpruner.inputs.losses import logits_of


@dataclass(frozen=True)
class Epoch:
    """The numbers of one epoch.

    Accuracies are None if the outputs are not class logits; validation numbers are None without validation.
    """

    number: int  # from 1
    learning_rate: float  # of its last step
    loss: float  # mean over the epoch, while the weights changed
    accuracy: float | None
    validation_loss: float | None
    validation_accuracy: float | None
    seconds: float

    def better_than(self, other: Epoch | None) -> bool:
        """Compare by validation accuracy, then by validation loss; without validation, later is better."""
        if other is None or self.validation_loss is None or other.validation_loss is None:
            return True
        mine = (self.validation_accuracy or 0.0, -self.validation_loss)
        return mine > (other.validation_accuracy or 0.0, -other.validation_loss)


@dataclass
class Tally:
    """Sums over the samples of an epoch so far."""

    samples: float = 0
    loss: float = 0
    classified: float = 0  # samples with one class, of which `correct` were predicted right
    correct: float = 0
    seconds: float = 0

    def add(self, loss: float, output: Any, batch: Batch) -> None:
        """Add a batch with the mean loss `loss`."""
        self.samples += batch.size
        self.loss += loss * batch.size
        logits, labels = logits_of(output), batch.labels
        if (
            logits is not None
            and labels is not None
            and logits.ndim == 2
            and labels.shape == logits.shape[:1]
            and not labels.is_floating_point()
        ):
            self.classified += batch.size
            self.correct += int((logits.argmax(1) == labels.to(logits.device)).sum())

    @property
    def mean_loss(self) -> float:
        return self.loss / self.samples

    @property
    def accuracy(self) -> float | None:
        return self.correct / self.classified if self.classified else None

    def __str__(self) -> str:
        accuracy = "" if self.accuracy is None else f", accuracy {self.accuracy:.1%}"
        return f"loss {self.mean_loss:.4f}{accuracy}" if self.samples else "loss –"
