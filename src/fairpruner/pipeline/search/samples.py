"""Calibration data in two parts: samples that repairs use, and samples that judge the repaired models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fairpruner.inputs.batches import Batch, read_batches
from fairpruner.inputs.same_order import SameOrder
from fairpruner.models.devices import device_of_model

JUDGED = 5  # every fifth sample judges
SHARES = 8  # the other samples are divided into this many equal shares


@dataclass(frozen=True, eq=False)
class SampleSet:
    """Some samples of the data, the same ones in every pass."""

    data: SameOrder
    model: nn.Module  # its signature shows how many of a batch's tensors are inputs
    total: int  # the number of samples of the data
    judging: bool
    shares: int = SHARES  # how many shares of the samples that do not judge

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        before = 0
        for batch in _batches(self.data, self.model):
            numbers = torch.arange(before, before + batch.size)
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
        return int(self._holds(torch.arange(self.total)).sum())


def split(data: Iterable[Any], model: nn.Module) -> tuple[SampleSet, SampleSet]:
    """The samples that repairs use, and those that judge; with fewer than JUDGED samples, all are both."""
    ordered = SameOrder(data)
    total = sum(batch.size for batch in _batches(ordered, model))
    fitting, judging = (SampleSet(ordered, model, total, judging) for judging in (False, True))
    return (fitting, judging) if judging.samples else (fitting, fitting)


def _batches(data: Iterable[Any], model: nn.Module) -> Iterator[Batch]:
    return read_batches(data, device_of_model(model), model)
