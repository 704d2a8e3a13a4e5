"""The allocation rules: each maps one shared threshold to a depth for every space.

A rule returns one table per space: ascending thresholds, and the depth that the space reaches at each of
them. At threshold t, a space has the depth of its largest threshold <= t. Raising t therefore removes more
units from every space at once. To add a rule, add an entry to RULES.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fairpruner.core.arrays import Floats, Ints


@dataclass(frozen=True, eq=False)
class RankedSpace:
    """What a rule knows about one space."""

    removal: Floats  # [J] removal scores, in removal order
    tod: Floats  # [J + 1] Tolerance of Difference at depths 0..J
    candidates: Ints  # [C] depths that the constraints allow, ascending from 0


# Ascending thresholds [T] and the depth reached at each [T]. The first row has depth 0.
DepthTable = tuple[Floats, Ints]


def _tod(spaces: Sequence[RankedSpace]) -> list[DepthTable]:
    """Thresholds are tolerances: the depth at t is the largest candidate with ToD <= t."""
    return [_tod_table(space) for space in spaces]


def _tod_table(space: RankedSpace) -> DepthTable:
    depths, values = space.candidates, space.tod[space.candidates]
    # A depth is the largest feasible one for some tolerance only if its ToD is below that of every deeper
    # candidate, and below 1, because tolerances are.
    least_deeper = np.append(np.minimum.accumulate(values[::-1])[-2::-1], 1.0)
    reachable = values < least_deeper
    free, deeper, tolerances = depths[reachable][0], depths[reachable][1:], values[reachable][1:]
    # Tolerance 0 already allows the depth `free`, which may be large. Overlaps never fall with depth, so
    # every shallower depth has ToD 0 too. These depths get evenly spaced thresholds in [-1, 0], so that a
    # budget that removes little can be met as well.
    without_conflict = depths[depths <= free]
    thresholds = np.concatenate([without_conflict / max(free, 1) - 1, tolerances])
    return thresholds, np.concatenate([without_conflict, deeper])


def _uniform(spaces: Sequence[RankedSpace]) -> list[DepthTable]:
    """Thresholds are removed shares, the same in every space."""
    return [(space.candidates / space.removal.size, space.candidates) for space in spaces]


def _global(spaces: Sequence[RankedSpace]) -> list[DepthTable]:
    """Thresholds are positions in one ranking of all units by (removal score, space, removal order)."""
    values = np.concatenate([space.removal for space in spaces])  # sorted by space and removal order already
    positions = np.empty(values.size)
    positions[np.argsort(values, kind="stable")] = np.arange(1, values.size + 1)
    by_space = np.split(positions, np.cumsum([space.removal.size for space in spaces])[:-1])
    return [
        (np.append(0, ranks)[space.candidates], space.candidates)
        for space, ranks in zip(spaces, by_space, strict=True)
    ]


RULES: dict[str, Callable[[Sequence[RankedSpace]], list[DepthTable]]] = {
    "tod": _tod,
    "uniform": _uniform,
    "global": _global,
}
