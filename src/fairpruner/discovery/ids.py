"""Ids for every index of every parameter dimension, and which of them must live or go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import torch

from fairpruner.core.arrays import Ints

NONE = 0  # the id of elements that belong to no unit


class Use(IntFlag):
    """What the forward pass did with an id."""

    WRITE = 1  # a weight produced it
    READ = 2  # a weight consumed it
    HEAD = 4  # two activations were multiplied and summed over it: an attention head
    TOUCHED = 8
    ROUTED = 16  # an expert, which its router chooses: not followed through the forward pass


@dataclass(frozen=True)
class Slot:
    """One dimension of one parameter or buffer: ids start, start + 1, …, start + size - 1."""

    tensor: str
    dim: int
    size: int
    start: int


class Ids:
    """A growing union-find over ids, with vectorised find and unite, and the reasons why some may not be
    removed.
    """

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.reasons: list[str] = [""]
        self._count = 1  # id 0 is NONE
        self._parent = np.zeros(1024, dtype=np.int64)
        self._use = np.zeros(1024, dtype=np.uint8)
        self._lock = np.zeros(1024, dtype=np.int64)  # position in reasons, 0 = free
        self._last = np.zeros(1024, dtype=np.int64)  # when the id was used last
        self._clock = 0

    def new_slot(self, tensor: str, dim: int, size: int) -> Slot:
        slot = Slot(tensor, dim, size, self._count)
        self.slots.append(slot)
        self._count += size
        if self._count > self._parent.size:
            more = max(self._parent.size, size)
            self._parent, self._lock, self._last = (
                np.concatenate([a, np.zeros(more, dtype=np.int64)])
                for a in (self._parent, self._lock, self._last)
            )
            self._use = np.concatenate([self._use, np.zeros(more, dtype=np.uint8)])
        self._parent[slot.start : self._count] = np.arange(slot.start, self._count)
        return slot

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
        """Put a[i] and b[i] into one class, for all i; pairs with NONE are passed over."""
        both = (a != NONE) & (b != NONE)
        a, b = a[both], b[both]
        while a.size:
            a, b = self.find(a), self.find(b)
            apart = a != b
            a, b = a[apart], b[apart]
            # Hooking the larger root below the smaller keeps the forest free of cycles, whatever the
            # order of
            # pairs.
            np.minimum.at(self._parent, np.maximum(a, b), np.minimum(a, b))

    def unite_all(self, ids: Ints) -> None:
        """Put every id of each row into one class, [rows, n]; NONE is passed over."""
        self.unite(np.broadcast_to(ids.max(axis=-1, keepdims=True), ids.shape).ravel(), ids.ravel())

    def lock(self, ids: Ints, reason: str) -> None:
        """These ids may not be removed; the first reason given stands."""
        ids = np.unique(ids)
        ids = ids[(ids != NONE)]
        free = ids[self._lock[ids] == 0]
        if free.size:
            if reason not in self.reasons:
                self.reasons.append(reason)
            self._lock[free] = self.reasons.index(reason)

    def mark(self, ids: Ints, use: Use) -> None:
        """Note what the forward pass just did with these ids."""
        ids = np.unique(ids)
        ids = ids[ids != NONE]
        self._clock += 1
        self._use[ids] |= int(use | Use.TOUCHED)
        self._last[ids] = self._clock

    def routed(self, ids: Ints) -> bool:
        """Whether some of these ids are experts."""
        return bool((self._use[ids] & Use.ROUTED).any())

    def share_use(self, slots: Sequence[Slot]) -> None:
        """What was done with an id of one slot counts for the ids at its place in all of them."""
        # [slots, size]
        spans = np.array([np.arange(slot.start, slot.start + slot.size) for slot in slots])
        self._use[spans] = np.bitwise_or.reduce(self._use[spans], axis=0)
        self._last[spans] = self._last[spans].max(axis=0)

    def classes(self) -> Classes:
        """The finished partition over all ids."""
        everything = np.arange(self._count)
        roots = self.find(everything)
        use = np.zeros(self._count, dtype=np.uint8)
        np.bitwise_or.at(use, roots, self._use[: self._count])
        lock = np.zeros(self._count, dtype=np.int64)
        np.maximum.at(lock, roots, self._lock[: self._count])
        return Classes(
            tuple(self.slots),
            roots,
            use,
            self._use[: self._count].copy(),
            lock,
            self._last[: self._count].copy(),
            tuple(self.reasons),
        )


@dataclass(frozen=True)
class Classes:
    """Every id's class (named by its representative), and what is known of each class."""

    slots: Sequence[Slot]
    roots: Ints  # [ids]
    use: np.ndarray  # [ids], or-ed over the class, valid at representatives
    own_use: np.ndarray  # [ids], of the id alone
    lock: Ints  # [ids], position in reasons, valid at representatives
    last: Ints  # [ids], when the id was used last
    reasons: Sequence[str]


def as_ids(layer: torch.Tensor) -> Ints:
    """A layer of ids as a flat array, repeated dimensions taken once."""
    return squash(layer).reshape(-1).numpy()


def squash(layer: torch.Tensor) -> torch.Tensor:
    """The layer with every expanded (stride 0) dimension cut to length 1: the same ids, far fewer
    elements.
    """
    for dim, stride in enumerate(layer.stride()):
        if stride == 0 and layer.shape[dim] > 1:
            layer = layer.narrow(dim, 0, 1)
    return layer
