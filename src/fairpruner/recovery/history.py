"""What a training run counts on its way, and what each epoch came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fairpruner.inputs.batches import Batch, logits_of


@dataclass(frozen=True)
class Epoch:
    """One epoch's numbers; an accuracy is None where the outputs are no class logits, a validation number
    where nothing was validated.
    """

    number: int  # from 1
    learning_rate: float  # of its last step
    loss: float  # as it was on the way
    accuracy: float | None
    validation_loss: float | None
    validation_accuracy: float | None
    seconds: float

    def better_than(self, other: Epoch | None) -> bool:
        """By validation accuracy, then by validation loss; without validation the later epoch is the
        better one.
        """
        if other is None or self.validation_loss is None or other.validation_loss is None:
            return True
        return (self.validation_accuracy or 0.0, -self.validation_loss) > (
            other.validation_accuracy or 0.0,
            -other.validation_loss,
        )


@dataclass
class Tally:
    """Sums over the samples seen so far."""

    samples: float = 0
    loss: float = 0
    classified: float = 0
    correct: float = 0
    seconds: float = 0

    def add(self, loss: float, output: Any, batch: Batch) -> None:
        """Count a batch whose mean loss is `loss`."""
        self.samples += batch.size
        self.loss += loss * batch.size
        logits, labels = logits_of(output), batch.labels
        if (
            logits is not None
            and logits.ndim == 2
            and labels.shape == logits.shape[:1]
            and not labels.is_floating_point()
        ):
            self.classified += batch.size
            self.correct += int((logits.argmax(1) == labels).sum())

    @property
    def mean_loss(self) -> float:
        return self.loss / self.samples

    @property
    def accuracy(self) -> float | None:
        return self.correct / self.classified if self.classified else None

    def __str__(self) -> str:
        accuracy = "" if self.accuracy is None else f", accuracy {self.accuracy:.1%}"
        return f"loss {self.mean_loss:.4f}{accuracy}" if self.samples else "loss –"
