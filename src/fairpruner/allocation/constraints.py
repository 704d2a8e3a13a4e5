"""What limits every plan: how few units a space may keep, and multiples of what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from fairpruner.core.arrays import Ints
from fairpruner.core.latency import LatencyTable
from fairpruner.core.spaces import KINDS, UnitSpace
from fairpruner.errors import FairprunerError, unknown

MinKeep = float | Mapping[str, float]  # a count or share of every space, or one for each kind
MultipleOf = int | Literal["auto"]


def candidates_of(space: UnitSpace, multiple_of: int, min_keep: MinKeep) -> Ints:
    """The depths that leave enough units in a space, ascending; 0 always, [C]."""
    kept = np.arange(space.size, 0, -1)  # [J], at the depths 0..J - 1
    least = min_keep.get(space.kind, 1) if isinstance(min_keep, Mapping) else min_keep
    # Quotients compare like the fractions they round, so a share of 0.3 keeps 3 of 10.
    enough = kept / space.size >= least if isinstance(least, float) else kept >= least
    even = (
        kept % multiple_of == 0 if space.kind in ("channel", "hidden") else True
    )  # heads and experts are wide enough already
    possible = (kept % space.groups == 0) & (kept % space.multiple == 0)
    return np.flatnonzero((enough & (kept >= space.min_keep) & even & possible) | (kept == space.size))


def multiple_from(multiple_of: MultipleOf, latency: LatencyTable | None) -> int:
    if multiple_of != "auto":
        return multiple_of
    if latency is None:
        raise FairprunerError(
            "multiple_of='auto' takes the multiple from a latency table: give latency=, or a whole number."
        )
    return latency.multiple


def check_constraints(multiple_of: int, min_keep: MinKeep) -> None:
    if isinstance(multiple_of, bool) or not isinstance(multiple_of, (int, np.integer)) or multiple_of < 1:
        raise FairprunerError(f"multiple_of is {multiple_of!r}, expected a whole number of at least 1.")
    for kind, least in min_keep.items() if isinstance(min_keep, Mapping) else [(None, min_keep)]:
        if kind is not None and kind not in KINDS:
            raise unknown("kind", kind, KINDS)
        count = isinstance(least, (int, np.integer)) and not isinstance(least, bool) and least >= 1
        if not count and not (isinstance(least, float) and 0 < least < 1):
            raise FairprunerError(
                f"min_keep is {least!r}, expected a count of at least 1 or a share in (0, 1) of every space."
            )
