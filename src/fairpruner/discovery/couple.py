"""Spaces that fail alone because code splits a tensor into equal parts, coupled part by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fairpruner.core.units import Count, Slice, UnitSpace


def couple(spaces: Sequence[UnitSpace]) -> list[tuple[UnitSpace, list[str]]]:
    """(coupled space, names of its parts) for each set of spaces that own equal parts of one producer.

    A block that splits its input into halves works as long as both halves lose the same number of units. So
    unit j of the coupled space consists of the j-th unit of every part. A part with more units, such as one
    without the grouped convolution of the others, gives several neighbouring units to each.
    """
    found: list[_Parts] = []
    for space in spaces:
        written = {(part.tensor, part.dim) for part in space.slices_of("write")}
        fitting = [one for one in found if one.written & written and _fit(one.spaces[0], space)]
        found = [one for one in found if one not in fitting]
        earlier = [part for one in fitting for part in one.spaces]
        found.append(_Parts(written.union(*(one.written for one in fitting)), [*earlier, space]))
    coupled = [one.spaces for one in found if len(one.spaces) > 1]
    return [(_joined(parts), [part.name for part in parts]) for parts in coupled]


@dataclass(frozen=True, eq=False)
class _Parts:
    """Spaces that own parts of one producer, and the dimensions of tensors that they write."""

    written: set[tuple[str, int]]
    spaces: list[UnitSpace]


def _fit(a: UnitSpace, b: UnitSpace) -> bool:
    """Whether spaces have the same number of units, or parts of the same width whose units can be dealt out
    evenly.
    """
    widths = {np.count_nonzero((s.slices_of("write") or s.slices)[0].owner >= 0) for s in (a, b)}
    return a.size == b.size or (len(widths) == 1 and max(a.size, b.size) % min(a.size, b.size) == 0)


def _dealt_out(space: UnitSpace, size: int) -> UnitSpace:
    """The space with neighbouring units joined, so that it has just `size` of them."""
    share = space.size // size
    if share == 1:
        return space
    return replace(
        space,
        size=size,
        slices=tuple(replace(s, owner=np.where(s.owner < 0, -1, s.owner // share)) for s in space.slices),
        counts=tuple(replace(c, owner=np.where(c.owner < 0, -1, c.owner // share)) for c in space.counts),
    )


def _joined(parts: Sequence[UnitSpace]) -> UnitSpace:
    first = min(parts, key=lambda space: space.size)
    parts = [_dealt_out(space, first.size) for space in parts]
    slices: dict[tuple[str, int], Slice] = {}
    for part in (s for space in parts for s in space.slices):
        known = slices.get((part.tensor, part.dim))
        # Parts own different indices; elsewhere they have -1.
        owner = part.owner if known is None else np.maximum(known.owner, part.owner)
        slices[part.tensor, part.dim] = Slice(part.tensor, part.dim, owner, part.role)
    counts: dict[tuple[str, str], Count] = {}
    for count in (c for space in parts for c in space.counts):
        place = (count.module, count.attribute)
        counts[place] = replace(count, owner=np.maximum(counts.get(place, count).owner, count.owner))
    return UnitSpace(
        first.name,
        first.kind,
        first.size,
        tuple(slices.values()),
        tuple(counts.values()),
        first.min_keep,
        first.groups,
        first.multiple,
    )
