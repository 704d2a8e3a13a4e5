"""Calibration data in two parts: samples that repairs use, and samples that judge the repaired models."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fairpruner.errors import FairprunerWarning
from fairpruner.inputs.batches import Batch, read_batches
from fairpruner.inputs.same_order import SameOrder
from fairpruner.models.calling import tensors_of

MOST_HELD = 2**30  # bytes of batches that are kept in memory, so that a search reads its data once
JUDGED = 5  # every fifth sample judges
SHARES = 8  # the other samples are divided into this many equal shares


@dataclass(frozen=True, eq=False)
class Batches:
    """The batches of the data, the same ones in every pass; from memory, if there is room for all."""

    data: SameOrder
    model: nn.Module  # its signature shows how many of a batch's tensors are inputs
    samples: int
    held: Sequence[Batch]  # all batches, or none

    @staticmethod
    def of(data: Iterable[Any], model: nn.Module) -> Batches:
        """Read the data once."""
        ordered, held, places = SameOrder(data), list[Batch](), set[int]()
        samples, room = 0, MOST_HELD
        for batch in read_batches(ordered, None, model):
            samples += batch.size
            tensors = list(tensors_of((batch.inputs, batch.labels)))
            own = {tensor.data_ptr() for tensor in tensors}
            # A loader that fills one tensor again and again is read again in every pass.
            room = -1 if places & own else room - sum(tensor.nbytes for tensor in tensors)
            places |= own
            held.append(batch)
            if room < 0:
                held.clear()
        return Batches(ordered, model, samples, held)

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.held or read_batches(self.data, None, self.model))


@dataclass(frozen=True, eq=False)
class SampleSet:
    """Some samples of the data, the same ones in every pass."""

    batches: Batches
    judging: bool
    shares: int = SHARES  # how many shares of the samples that do not judge

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        before = 0
        for batch in self.batches:
            numbers = torch.arange(before, before + batch.size, device="cpu")
            before += batch.size
            chosen = self._holds(numbers).nonzero().flatten()
            if len(chosen):
                part = batch.some(chosen)
                yield part.inputs, part.labels

    def _holds(self, numbers: Tensor) -> Tensor:
        """Whether the samples with these numbers, [n], belong to this set, bool [n]."""
        judging = numbers % JUDGED == JUDGED - 1
        return judging if self.judging else ~judging & (numbers // JUDGED % SHARES < self.shares)

    def share(self, shares: int) -> SampleSet:
        """The first `shares` shares of this set."""
        return replace(self, shares=shares)

    @property
    def samples(self) -> int:
        return int(self._holds(torch.arange(self.batches.samples, device="cpu")).sum())


def split(data: Iterable[Any], model: nn.Module) -> tuple[SampleSet, SampleSet]:
    """The samples that repairs use, and those that judge; with fewer than JUDGED samples, all are both."""
    batches = Batches.of(data, model)
    fitting, judging = (SampleSet(batches, judging) for judging in (False, True))
    if judging.samples:
        return fitting, judging
    warnings.warn(
        f"The data holds {batches.samples} sample{'s' if batches.samples > 1 else ''}, so repairs are judged"
        f" on the samples that they use: give at least {JUDGED}.",
        FairprunerWarning,
        stacklevel=2,
    )
    return fitting, fitting
