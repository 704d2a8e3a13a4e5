"""Coupling spaces that fail alone because code splits a tensor into equal parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fairpruner.core.units import Count, Slice, UnitSpace


def couple(spaces: Sequence[UnitSpace]) -> list[tuple[UnitSpace, list[str]]]:
    """(coupled space, names of its parts) for each set of equally large spaces with the same producer.

    A block that splits its input into halves works as long as both halves lose the same number of units. So
    unit j of the coupled space consists of the j-th unit of every part.
    """
    families: list[tuple[set[tuple[str, int]], list[UnitSpace]]] = []  # what each writes, and its spaces
    for space in spaces:
        written = {(part.tensor, part.dim) for part in space.slices_of("write")}
        mine = [f for f in families if f[0] & written and f[1][0].size == space.size]
        families = [f for f in families if not any(f is other for other in mine)]
        families.append((written.union(*(f[0] for f in mine)), [*(s for f in mine for s in f[1]), space]))
    return [(_joined(parts), [p.name for p in parts]) for _, parts in families if len(parts) > 1]


def _joined(parts: Sequence[UnitSpace]) -> UnitSpace:
    slices: dict[tuple[str, int], Slice] = {}
    for part in (s for space in parts for s in space.slices):
        known = slices.get((part.tensor, part.dim))
        # Parts own different indices; all other entries are -1.
        owner = part.owner if known is None else np.maximum(known.owner, part.owner)
        slices[part.tensor, part.dim] = Slice(part.tensor, part.dim, owner, part.role)
    counts: dict[tuple[str, str], Count] = {}
    for count in (c for space in parts for c in space.counts):
        counts.setdefault((count.module, count.attribute), count)
    first = parts[0]
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
