"""Removal signals that need no classes: norms and distances of a unit's own weights, its activation, or chance."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import FairprunerError
from ..observing import positions_of
from ..types import Floats, UnitSpace
from .base import ActivationSignal, Meter, Reading, Signal, Task, WeightSignal


def written_weights(space: UnitSpace, model: nn.Module) -> Tensor:
    """All weights that compute each unit, one row to a unit, float64 [J, R]; short rows are filled with zeros."""
    tensors = {**dict(model.named_buffers(remove_duplicate=False)), **dict(model.named_parameters(remove_duplicate=False))}
    rows = []
    for part in space.slices_of("write"):
        weights = tensors[part.tensor].detach().movedim(part.dim, 0).flatten(1).double().cpu()  # [indices, r]
        table = torch.from_numpy(positions_of(part.owner, space.size))  # [J, most]
        rows.append((weights[table] * (table >= 0)[..., None]).flatten(1))
    if not rows:
        raise FairprunerError(f"Space {space.name!r} has no weights that write its units, so l1, l2 and fpgm cannot score it: choose another removal signal.")
    return torch.cat(rows, 1)


def l1(space: UnitSpace, model: nn.Module) -> Tensor:
    return written_weights(space, model).abs().sum(1)


def l2(space: UnitSpace, model: nn.Module) -> Tensor:
    return written_weights(space, model).square().sum(1).sqrt()


def fpgm(space: UnitSpace, model: nn.Module) -> Tensor:
    """The sum of distances to all other units of the space: small where a unit lies near their geometric median."""
    rows = written_weights(space, model)
    return torch.cdist(rows, rows).sum(1)


class MeanActivation:
    """The mean absolute value of what consumers read of a unit; even and odd samples make the halves."""

    def __init__(self, space: UnitSpace) -> None:
        self._sums = np.zeros((2, space.size))
        self._counts = np.zeros((2, 1))

    def update(self, activation: Tensor, labels: Tensor) -> None:
        means = activation.abs().mean(2, dtype=torch.float64 if activation.dtype == torch.float64 else torch.float32).double().cpu().numpy()  # [N, J]
        seen = int(self._counts.sum())
        for parity in (0, 1):
            own = means[(parity - seen) % 2 :: 2]
            self._sums[parity] += own.sum(0)
            self._counts[parity] += len(own)

    def compute(self) -> Floats:
        mean: Floats = self._sums.sum(0) / self._counts.sum()
        return mean

    def halves(self) -> Floats:
        return self._sums / np.maximum(self._counts, 1)


@dataclass(frozen=True)
class Random(Signal):
    """Uniform numbers, fixed by the seed, the role and the name of the space."""

    name: str = "random"

    def start(self, task: Task) -> Meter:
        return _RandomMeter(task)


class _RandomMeter(Meter):
    def __init__(self, task: Task) -> None:
        self._task = task

    def read(self) -> Reading:
        task = self._task
        return Reading({space.name: np.random.default_rng(_seed(task.seed, task.role, space.name)).random(space.size) for space in task.spaces})


def _seed(*parts: object) -> int:
    """A seed that is the same in every process, unlike `hash`."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


L1, L2, FPGM = WeightSignal("l1", l1), WeightSignal("l2", l2), WeightSignal("fpgm", fpgm)
ACTIVATION = ActivationSignal("activation", MeanActivation)
