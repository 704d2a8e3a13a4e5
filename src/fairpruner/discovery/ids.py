"""Ids of the indices of every tensor dimension, and which ids can only be removed together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import torch

from fairpruner.core.arrays import Ints

NONE = 0  # the id of elements that belong to no unit
LARGE = 4096  # maps with more stored ids than this are made smaller where that is possible


class Usage(IntFlag):
    """What the forward pass did with an id."""

    WRITE = 1  # a weight produced it
    READ = 2  # a weight consumed it
    HEAD = 4  # two activations were multiplied and summed over it: an attention head
    TOUCHED = 8
    BUFFER = 32  # it lies on a buffer, which takes part only where it meets units elementwise
    ROUTED = 16  # an expert, which a router chooses; experts are not followed through the forward pass


@dataclass(frozen=True)
class Axis:
    """One dimension of one parameter or buffer; its indices have the ids start, …, start + size - 1."""

    tensor: str
    dim: int
    size: int
    start: int

    @property
    def ids(self) -> Ints:
        return np.arange(self.start, self.start + self.size)


class Ids:
    """A growing union-find over ids, with vectorised find and unite, and why some cannot be removed."""

    def __init__(self) -> None:
        self.axes: list[Axis] = []
        self.reasons: list[str] = [""]
        self._count = 1  # id 0 is NONE
        self._parent = np.zeros(1024, dtype=np.int64)
        self._usage = np.zeros(1024, dtype=np.uint8)
        self._lock = np.zeros(1024, dtype=np.int64)  # position in reasons, 0 = free
        self._last = np.zeros(1024, dtype=np.int64)  # when the id was used last
        self._clock = 0

    def new_axis(self, tensor: str, dim: int, size: int) -> Axis:
        axis = Axis(tensor, dim, size, self._count)
        self.axes.append(axis)
        self._count += size
        if self._count > self._parent.size:
            more = max(self._parent.size, size)
            self._parent, self._lock, self._last = (
                np.concatenate([a, np.zeros(more, dtype=np.int64)])
                for a in (self._parent, self._lock, self._last)
            )
            self._usage = np.concatenate([self._usage, np.zeros(more, dtype=np.uint8)])
        self._parent[axis.start : self._count] = axis.ids
        return axis

    def find(self, ids: Ints) -> Ints:
        """The representative of each id."""
        roots = self._parent[ids]
        while True:
            above = self._parent[roots]
            if np.array_equal(above, roots):
                self._parent[ids] = roots
                return roots
            roots = above

    def unite(self, a: Ints, b: Ints) -> None:
        """Put a[i] and b[i] into one class, for all i; pairs with NONE are skipped."""
        both = (a != NONE) & (b != NONE)
        a, b = a[both], b[both]
        while a.size:
            a, b = self.find(a), self.find(b)
            apart = a != b
            a, b = a[apart], b[apart]
            # The larger root always hangs below the smaller one, so no order of pairs can make a cycle.
            np.minimum.at(self._parent, np.maximum(a, b), np.minimum(a, b))

    def unite_all(self, ids: Ints) -> None:
        """Put every id of each row into one class, [rows, n]; NONE is skipped."""
        self.unite(np.broadcast_to(ids.max(axis=-1, keepdims=True), ids.shape).ravel(), ids.ravel())

    def lock(self, ids: Ints, reason: str) -> None:
        """Forbid the removal of these ids; the first reason given stands."""
        free = ids[(ids != NONE) & (self._lock[ids] == 0)]
        if free.size:
            if reason not in self.reasons:
                self.reasons.append(reason)
            self._lock[free] = self.reasons.index(reason)

    def lock_axes(self, ids: Ints, reason: str) -> None:
        """Forbid the removal of these ids and of all others on their axes."""
        ends = np.array([axis.start + axis.size for axis in self.axes])
        for place in np.unique(np.searchsorted(ends, ids[ids != NONE], side="right")):
            self.lock(self.axes[place].ids, reason)

    def mark(self, ids: Ints, usage: Usage) -> None:
        """Note what the forward pass just did with these ids."""
        ids = ids[ids != NONE]
        self._clock += 1
        self._usage[ids] |= int(usage | Usage.TOUCHED)
        self._last[ids] = self._clock

    def routed(self, ids: Ints) -> bool:
        """Whether some of these ids are experts."""
        return bool((self._usage[ids] & Usage.ROUTED).any())

    def all_of_buffers(self, ids: Ints) -> bool:
        """Whether all these ids lie on buffers."""
        return bool((self._usage[ids[ids != NONE]] & Usage.BUFFER).all())

    def axis_sizes(self, ids: Ints) -> Ints:
        """The length of the axis that each id lies on."""
        starts = np.array([axis.start for axis in self.axes])
        sizes = np.array([axis.size for axis in self.axes])
        return np.asarray(sizes[np.searchsorted(starts, ids, side="right") - 1])

    def share_usage(self, axes: Sequence[Axis]) -> None:
        """Give the ids at the same index of several equally long axes the usage of all of them."""
        ids = np.array([axis.ids for axis in axes])  # [axes, size]
        self._usage[ids] = np.bitwise_or.reduce(self._usage[ids], axis=0)
        self._last[ids] = self._last[ids].max(axis=0)

    def partition(self) -> Partition:
        """The finished classes over all ids."""
        roots = self.find(np.arange(self._count))
        usage = np.zeros(self._count, dtype=np.uint8)
        np.bitwise_or.at(usage, roots, self._usage[: self._count])
        lock = np.zeros(self._count, dtype=np.int64)
        np.maximum.at(lock, roots, self._lock[: self._count])
        return Partition(
            tuple(self.axes),
            roots,
            usage[roots],
            self._usage[: self._count].copy(),
            lock[roots],
            self._last[: self._count].copy(),
            tuple(self.reasons),
        )


@dataclass(frozen=True, eq=False)
class Partition:
    """The class of every id, named by its representative, and what is known of the class; all [ids]."""

    axes: tuple[Axis, ...]
    roots: Ints
    usage: np.ndarray  # of the whole class
    own_usage: np.ndarray  # of the id alone
    lock: Ints  # of the whole class: position in reasons
    last: Ints  # when the id was used last
    reasons: tuple[str, ...]


def as_ids(idmap: torch.Tensor) -> Ints:
    """The ids of a map as a flat array; repeated dimensions count once."""
    return squash(idmap).reshape(-1).numpy()


def squash(idmap: torch.Tensor) -> torch.Tensor:
    """The map with every expanded (stride 0) dimension cut to length 1: same ids, far fewer elements."""
    for dim, stride in enumerate(idmap.stride()):
        if stride == 0 and idmap.shape[dim] > 1:
            idmap = idmap.narrow(dim, 0, 1)
    return idmap


def compact(idmap: torch.Tensor) -> torch.Tensor:
    """The same map, with every dimension along which its ids do not change stored once."""
    shape, idmap = idmap.shape, squash(idmap)
    if idmap.numel() > LARGE:
        for dim, size in enumerate(idmap.shape):
            first = idmap.narrow(dim, 0, 1)
            if size > 1 and bool((idmap == first).all()):
                idmap = first
    return idmap.expand(shape)
