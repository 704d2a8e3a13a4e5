"""The rules: how deep each space goes at every threshold of one dial that all of them share.

Every rule is a table per space: ascending thresholds and the depth reached at each. A space goes to the
depth of its largest threshold that the dial has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fairpruner.core.arrays import Floats, Ints


@dataclass(frozen=True, eq=False)
class Ranked:
    """One space as the rules see it."""

    removal: Floats  # [J] scores along the removal order
    tod: Floats  # [J + 1]
    candidates: Ints  # [C] depths that the constraints allow, ascending from 0


# ascending thresholds [T] and the depth reached at each [T]; the first is depth 0 at the rule's lowest
# threshold
Table = tuple[Floats, Ints]


def _tod(spaces: Sequence[Ranked]) -> list[Table]:
    """Thresholds are tolerances: the depth at t is the largest candidate with ToD <= t."""
    return [_frontier(space) for space in spaces]


def _frontier(space: Ranked) -> Table:
    depths, values = space.candidates, space.tod[space.candidates]
    # Only a depth with less conflict than every deeper one is ever the largest feasible; tolerances stay
    # below 1.
    best = values < np.append(np.minimum.accumulate(values[::-1])[-2::-1], 1.0)
    free, reached, tolerances = depths[best][0], depths[best][1:], values[best][1:]
    # Tolerance 0 may already remove much. Overlaps never fall, so all depths up to that one are as free
    # of
    # conflict: thresholds in [-1, 0] lead there evenly, and gentle budgets stay within reach.
    gentle = depths[depths <= free]
    return np.concatenate([gentle / max(free, 1) - 1, tolerances]), np.concatenate([gentle, reached])


def _uniform(spaces: Sequence[Ranked]) -> list[Table]:
    """Thresholds are shares removed, the same in every space."""
    return [(space.candidates / space.removal.size, space.candidates) for space in spaces]


def _global(spaces: Sequence[Ranked]) -> list[Table]:
    """Thresholds are positions in one ranking of all units, merged by (removal score, space, removal
    order).
    """
    values = np.concatenate([space.removal for space in spaces])
    positions = np.empty(values.size)
    positions[np.argsort(values, kind="stable")] = np.arange(
        1, values.size + 1
    )  # units stand by space and removal order already
    by_space = np.split(positions, np.cumsum([space.removal.size for space in spaces])[:-1])
    return [
        (np.append(0, ranks)[space.candidates], space.candidates)
        for space, ranks in zip(spaces, by_space, strict=True)
    ]


RULES: dict[str, Callable[[Sequence[Ranked]], list[Table]]] = {
    "tod": _tod,
    "uniform": _uniform,
    "global": _global,
}
