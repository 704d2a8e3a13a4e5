"""Reads: the weight dimensions through which a model reads the units of a space."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairpruner.core.arrays import Ints
from fairpruner.core.units import Slice, UnitSpace
from fairpruner.errors import FairprunerError


class NotObservable(FairprunerError):
    """The activations of a space, or the routing of a block of experts, cannot be observed."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name  # of the space or block


@dataclass(frozen=True, eq=False)
class Read:
    """One weight dimension that reads the units of one space."""

    space: UnitSpace
    part: Slice
    weight: nn.Parameter
    # The path of a list of experts and the number of the expert that holds the weight; None for a space
    # that does not lie inside all experts of a list.
    expert: tuple[str, int] | None = None
    # Cache: number of input channels -> `_channel_positions`.
    _positions: dict[int, Tensor | None] = field(default_factory=dict)

    def fits(self, channels: int) -> bool:
        """Whether an input with so many channels can be what the weight reads."""
        return channels % self.part.owner.size == 0

    def owner(self, channels: int) -> Ints:
        """The unit of each channel of the input; in a grouped convolution the weight's owners repeat."""
        return np.tile(self.part.owner, channels // self.part.owner.size)

    def by_unit(self, source: Tensor, axis: int, samples: int) -> Tensor:
        """The input as [N, J, F], F features of each unit; a view if the units lie in order."""
        if source.ndim < (self.weight.ndim if axis == 1 else 2):  # called without a batch dimension
            source = source.unsqueeze(0)
        if source.shape[0] % samples:
            raise NotObservable(
                self.space.name,
                f"Space {self.space.name!r} cannot be observed: {self.part.tensor} reads"
                f" {list(source.shape)}, whose dim 0 is not a multiple of the {samples} samples of the batch."
                f" Leave it out with skip={self.space.name!r} in discover.",
            )
        channels = source.shape[axis]
        # A model may fold windows or tokens into dim 0: they are features of the sample they came from.
        folded = source.view(samples, -1, *source.shape[1:])
        flat = folded.movedim(axis if axis < 0 else axis + 1, 1).flatten(2)  # [N, C, positions]
        if channels not in self._positions:
            self._positions[channels] = _channel_positions(self.owner(channels), self.space.size)
        positions = self._positions[channels]
        if positions is not None:
            if int(positions.max()) == channels:  # padding is read from an added channel of zeros
                flat = F.pad(flat, (0, 0, 0, 1))
            flat = flat.index_select(1, positions.to(flat.device))
        return flat.reshape(samples, self.space.size, -1)


def _channel_positions(owner: Ints, size: int) -> Tensor | None:
    """The channels of unit 0, then of unit 1, …, padded with C to one length; None if already in order."""
    positions = positions_of(owner, size).reshape(-1)
    if np.array_equal(positions, np.arange(owner.size)):
        return None
    return torch.from_numpy(np.where(positions < 0, owner.size, positions))


def positions_of(owner: Ints, size: int) -> Ints:
    """The indices that each unit owns, [J, most], in order and padded with -1.

    >>> positions_of(np.array([1, 0, 1]), 2).tolist()
    [[1, -1], [0, 2]]
    """
    owned = np.flatnonzero(owner >= 0)
    order = owned[np.argsort(owner[owned], kind="stable")]
    counts = np.bincount(owner[owned], minlength=size)
    table = np.full((size, counts.max()), -1, dtype=np.int64)
    table[np.arange(counts.max()) < counts[:, None]] = order
    return table


def reads_of(
    model: nn.Module, spaces: Iterable[UnitSpace], *, observed_only: bool, lists: Collection[str] = ()
) -> tuple[Read, ...]:
    """The reads of each space: all of them, or only those that activation signals observe.

    `lists` holds the paths of the model's lists of experts.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = []
    for space in spaces:
        experts = _experts(space, lists)
        parts = observed_parts(space, lists) if observed_only else space.slices_of("read")
        found += [Read(space, part, parameters[part.tensor], experts.get(part)) for part in parts]
    return tuple(found)


def observed_parts(space: UnitSpace, lists: Collection[str] = ()) -> tuple[Slice, ...]:
    """What activation signals observe: the last slice that reads all units.

    If the space lies inside a list of experts, it is the last such slice of each expert.
    """
    complete = {
        expert: part
        for part, expert in _experts(space, lists).items()
        if np.unique(part.owner[part.owner >= 0]).size == space.size
    }
    return tuple(complete.values()) or (space.observed,)


def _experts(space: UnitSpace, lists: Collection[str]) -> dict[Slice, tuple[str, int]]:
    """Slice -> (list of experts, number of the expert), if all slices lie inside experts of a list.

    Empty for any other space.
    """
    parts = space.slices_of("read")
    found = {
        part: (path, int(part.tensor.removeprefix(f"{path}.").partition(".")[0]))
        for part in parts
        for path in lists
        if part.tensor.startswith(f"{path}.")
    }
    return found if len(found) == len(parts) and len(set(found.values())) > 1 else {}
