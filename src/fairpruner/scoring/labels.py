"""The labels that signals see beside the activations of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fairpruner.errors import FairprunerError
from fairpruner.inputs.batches import Batch
from fairpruner.inputs.losses import logits_of, pixel_labels
from fairpruner.models.calling import describe
from fairpruner.scoring.objective import Objective
from fairpruner.scoring.signals.classes import ClassGroups

MOST_CLASSES = 10**6


class SignalLabels:
    """Class indices, groups of classes or maps of classes, if the signals `comparing` need them.

    Otherwise signals see the labels as the data has them.
    """

    def __init__(self, objective: Objective, grouping: ClassGroups | None, comparing: Sequence[str]) -> None:
        self._objective, self._grouping, self._comparing = objective, grouping, comparing

    def of(self, batch: Batch) -> Tensor | None:
        """The labels of a batch: [N], [N, H, W] for maps, or any tensor where no signal compares classes."""
        if self._grouping is not None:
            return self._grouping(batch.class_labels())
        if not self._comparing:
            return batch.labels if isinstance(batch.labels, Tensor) else None
        if self._objective.task == "segmentation":
            return pixel_labels(batch.labels)
        if not self._objective.has_classes:
            found = "none" if batch.labels is None else describe(batch.labels)
            raise FairprunerError(
                f"Signal {self._comparing[0]!r} compares classes, and batch {batch.position} has none: its"
                f" labels are {found}. Use a removal signal that needs no classes (activation,"
                " reconstruction, l2), for example removal='activation', or give a class for each sample."
            )
        return batch.class_labels()

    def classes(self, labels: Tensor | None, output: Any) -> int:
        """How many classes to expect, from the labels and the model's output on the first batch."""
        if not self._comparing:
            return 1
        seen = 1 if labels is None else int(labels.max()) + 1
        if labels is not None and seen > MOST_CLASSES:  # such labels are identities, which have gaps
            seen = labels.unique().numel()
        logits = logits_of(output)
        return max(seen, logits.shape[1]) if logits is not None and logits.ndim in (2, 4) else seen
