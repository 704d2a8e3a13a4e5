"""Shadows: for every tensor, the units that its elements belong to, and how shadows combine.

A shadow is a list of *id maps*: integer tensors of the same shape as the real tensor, which hold the id of
every element. An activation usually has one map. A weight has one map for each dimension, because its rows
and its columns belong to different units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fairpruner.core.arrays import Ints
from fairpruner.discovery.ids import NONE, Ids, Usage, as_ids, squash

IdMap = torch.Tensor


@dataclass(frozen=True)
class Shadow:
    """The id maps of one tensor.

    `weight` is true if the tensor was computed from parameters and constants alone, `buffer` if from buffers
    and constants alone. Most rules treat buffers as constants. Movements and elementwise operations do not,
    because there the statistics of a frozen norm or a table of positions meet the units they belong to.
    """

    maps: tuple[IdMap, ...]
    weight: bool = False
    buffer: bool = False


EMPTY = Shadow(())


def extent(idmap: IdMap) -> tuple[bool, ...]:
    """The dimensions along which the ids of a map change, even if all of them are in one class."""
    return _changes(squash(idmap).numpy())


def _changes(ids: Ints) -> tuple[bool, ...]:
    return tuple(n > 1 and bool((ids != ids.take([0], axis=d)).any()) for d, n in enumerate(ids.shape))


class Algebra:
    """How the shadows of operands combine in an operation: side by side, united, or reduced."""

    def __init__(self, ids: Ids) -> None:
        self.ids = ids
        # Maps of weights that stand beside maps of activations, because no dimension was common to both.
        self._apart: list[tuple[list[IdMap], IdMap, str]] = []

    def roots(self, idmap: IdMap) -> Ints:
        """Representatives of a map, in its squashed shape; NONE stays NONE."""
        small = squash(idmap)
        return self.ids.find(small.reshape(-1).numpy()).reshape(small.shape)

    def varying(self, idmap: IdMap) -> tuple[bool, ...]:
        """The dimensions along which the class of an element changes."""
        return _changes(self.roots(idmap))

    def combine(self, a: Shadow, b: Shadow, shape: Sequence[int]) -> tuple[IdMap, ...]:
        """Maps of an elementwise result: maps along a common dimension are united, others are not."""
        mixed = a.weight != b.weight  # a weight meets an activation
        merged = [idmap.expand(shape) for idmap in a.maps]
        for other in b.maps:
            other = other.expand(shape)
            related = [idmap for idmap in merged if self._related(idmap, other, mixed)]
            merged = [idmap for idmap in merged if not any(idmap is r for r in related)]
            for idmap in related:
                other = self._unite(idmap, other)
            merged.append(other)
        return tuple(merged)

    def combine_all(self, operands: Sequence[Shadow], shape: Sequence[int]) -> tuple[IdMap, ...]:
        """Maps of many operands, combined in this order: activations, weights, buffers.

        So a weight is combined with an activation rather than with another weight.
        """
        total = Shadow((), weight=True)
        for operand in sorted((o for o in operands if o.maps), key=lambda o: (o.weight, o.buffer)):
            first = not total.maps
            total = Shadow(
                self.combine(Shadow((), operand.weight) if first else total, operand, shape),
                operand.weight and total.weight,
            )
        return total.maps

    def _related(self, a: IdMap, b: IdMap, mixed: bool) -> bool:
        """Whether two maps change along a common dimension; not if all units share the same weight."""
        extent_a, extent_b = extent(a), extent(b)
        if not any(extent_a) and not any(extent_b):
            return True
        together = any(x and y for x, y in zip(extent_a, extent_b, strict=True))
        return together and not (mixed and (self._repeats(a, extent_b) or self._repeats(b, extent_a)))

    def _repeats(self, idmap: IdMap, other: Sequence[bool]) -> bool:
        """Whether the other map is constant along a dimension where the class of this map changes."""
        return any(varies and not lies for varies, lies in zip(self.varying(idmap), other, strict=True))

    def _unite(self, a: IdMap, b: IdMap) -> IdMap:
        if squash(a).numel() < squash(b).numel():
            a, b = b, a
        if self.ids.all_of_buffers(as_ids(a)):
            a, b = b, a
        small_a, small_b = torch.broadcast_tensors(squash(a), squash(b))
        self.ids.unite(small_a.reshape(-1).numpy(), small_b.reshape(-1).numpy())
        return torch.where(small_a != NONE, small_a, small_b).expand(a.shape)

    def reduce(self, idmap: IdMap, dims: Sequence[int]) -> IdMap:
        """The map with `dims` reduced to length 1; ids that meet there become one class."""
        small = squash(idmap)
        rest = [d for d in range(small.ndim) if d not in dims]
        length = [small.shape[d] for d in dims]
        if any(n > 1 for n in length):
            rows = small.permute(*rest, *dims).reshape(-1, int(np.prod(length))).numpy()
            self.ids.unite_all(rows)
            small = small.amax(dim=tuple(dims), keepdim=True)
        return small.expand([1 if d in dims else n for d, n in enumerate(idmap.shape)])

    def reduce_all(self, maps: Sequence[IdMap], dims: Sequence[int]) -> tuple[IdMap, ...]:
        return tuple(self.reduce(idmap, dims) for idmap in maps)

    def single(self, maps: Sequence[IdMap], dim: int, size: int) -> Ints:
        """One id for each index of `dim`, [size], from the map that lies along it; NONE without one."""
        for idmap in maps:
            if extent(idmap)[dim]:
                return (
                    self.reduce(idmap, [d for d in range(idmap.ndim) if d != dim]).reshape(-1).numpy().copy()
                )
        return np.full(size, NONE, dtype=np.int64)

    def settle(self, maps: Sequence[IdMap], operands: Sequence[Shadow], what: str) -> Shadow:
        """The shadow of an elementwise result.

        Of maps side by side, it keeps those of activations, and drops those of a weight that all units share,
        such as the weight of a norm inside every head.
        """
        if all(s.weight or not s.maps for s in operands):
            return Shadow(tuple(maps), weight=True, buffer=all(s.buffer for s in operands if s.maps))
        if len(maps) > 1:
            active = np.concatenate(
                [self.roots(idmap).ravel() for s in operands if not s.weight for idmap in s.maps]
            )
            own = [idmap for idmap in maps if np.isin(self.roots(idmap), active[active != NONE]).any()]
            self._apart += [(own, idmap, what) for idmap in maps if not any(idmap is kept for kept in own)]
            maps = [idmap for idmap in own if any(extent(idmap))] or own
        return Shadow(tuple(maps))

    def settle_rest(self) -> None:
        """Unite weights with activations whose units became larger after both had met, such as heads.

        The remaining weights belong to no unit.
        """
        apart = self._apart
        while joined := [(own, b) for own, b, _ in apart if any(self._related(a, b, True) for a in own)]:
            for own, idmap in joined:
                for related in (a for a in own if self._related(a, idmap, True)):
                    self._unite(related, idmap)
            apart = [entry for entry in apart if not any(entry[1] is idmap for _, idmap in joined)]
        for _, idmap, what in apart:
            if not self.ids.all_of_buffers(as_ids(idmap)):
                self.ids.lock(as_ids(idmap), f"shared by all units that it meets in {what}")

    def lock(self, shadow: Shadow, reason: str) -> None:
        for idmap in shadow.maps:
            self.ids.lock(as_ids(idmap), reason)

    def lock_as_number(self, shadow: Shadow) -> None:
        """Forbid the removal of what Python code reads as numbers, and may use anywhere. It reads them by
        their place, so all units beside them stay too.
        """
        for idmap in shadow.maps:
            self.ids.lock_axes(as_ids(idmap), "is read as a number by Python code")

    def mark(self, idmap: IdMap, use: Usage) -> None:
        self.ids.mark(as_ids(idmap), use)
