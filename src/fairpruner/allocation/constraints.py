"""Constraints of plans: the fewest units that a space keeps, and a divisor of the kept number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from fairpruner.core.arrays import Ints
from fairpruner.core.latency import LatencyTable
from fairpruner.core.units import KINDS, UnitSpace
from fairpruner.errors import FairprunerError, check_whole_number, is_whole_number, unknown

MinKeep = float | Mapping[str, float]  # a count or share for every space, or one for each kind
MultipleOf = int | Literal["auto"]


def candidates_of(space: UnitSpace, multiple_of: int, min_keep: MinKeep) -> Ints:
    """The depths of a space that meet all constraints, ascending, [C]; depth 0 is always one of them."""
    kept = np.arange(space.size, 0, -1)  # [J], at the depths 0..J - 1
    least = min_keep.get(space.kind, 1) if isinstance(min_keep, Mapping) else min_keep
    # kept / size is rounded like the share that the user wrote, so a share of 0.3 keeps exactly 3 of 10.
    enough = kept / space.size >= least if isinstance(least, float) else kept >= least
    # A head or an expert spans many channels, so any number of them gives a width that is a multiple.
    even = kept % multiple_of == 0 if space.kind in ("channel", "hidden", "stream") else True
    possible = (kept % space.groups == 0) & (kept % space.multiple == 0)
    return np.flatnonzero((enough & (kept >= space.min_keep) & even & possible) | (kept == space.size))


def multiple_from(multiple_of: MultipleOf, latency: LatencyTable | None) -> int:
    """`multiple_of` as a number; "auto" takes that of the latency table."""
    if not isinstance(multiple_of, str):
        return multiple_of
    if multiple_of != "auto":
        raise FairprunerError(f"multiple_of={multiple_of!r}, expected a whole number or 'auto'.")
    if latency is None:
        raise FairprunerError(
            "multiple_of='auto' takes the multiple from a latency table, and none was given: give latency=,"
            " or a whole number."
        )
    return latency.multiple


def check_constraints(multiple_of: int, min_keep: MinKeep) -> None:
    """Raise unless both constraints have values that a space can meet."""
    check_whole_number("multiple_of", multiple_of)
    for kind, least in min_keep.items() if isinstance(min_keep, Mapping) else [(None, min_keep)]:
        if kind is not None and kind not in KINDS:
            raise unknown("kind", kind, KINDS)
        if not is_whole_number(least, at_least=1) and not (isinstance(least, float) and 0 < least < 1):
            raise FairprunerError(
                f"min_keep is {least!r}, expected a count of at least 1 or a share in (0, 1) of every space."
            )
