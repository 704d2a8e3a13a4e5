"""Plans in a row, and finding one among them: the steps of a rule, the way between two steps, what each
keeps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from fairpruner.allocation.rules import Ranked, Table
from fairpruner.core.arrays import Ints


class Dial:
    """All spaces' tables on one scale: the distinct thresholds, one step each."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.levels, rank = np.unique(
            np.concatenate([thresholds for thresholds, _ in tables]), return_inverse=True
        )
        lengths = [thresholds.size for thresholds, _ in tables]
        # Integer ranks instead of values: every space gets its own stretch of keys, and one search serves
        # all, exactly.
        self._starts = np.arange(len(tables)) * self.levels.size
        self._keys = np.repeat(self._starts, lengths) + rank
        self._depths = np.concatenate([depths for _, depths in tables])

    @property
    def last(self) -> int:
        return self.levels.size - 1

    def depths(self, step: int) -> Ints:
        """The depth of every space at a step, [S]."""
        return self._depths[np.searchsorted(self._keys, self._starts + step, side="right") - 1]

    def step_at(self, threshold: float) -> int:
        return int(np.searchsorted(self.levels, threshold, side="right")) - 1


class Way:
    """The way from one step of the dial to the next: one space at a time to its next candidate, the least
    conflict first.
    """

    def __init__(self, spaces: Sequence[Ranked], start: Ints, end: Ints) -> None:
        self._start = start
        movers: list[int] = np.flatnonzero(end > start).tolist()
        moves = [c[(c > start[s]) & (c <= end[s])] for s, c in ((s, spaces[s].candidates) for s in movers)]
        # Always taking the space whose next depth has the lowest ToD is sorting by the highest ToD met on
        # the
        # way.
        conflict = np.concatenate(
            [np.maximum.accumulate(spaces[s].tod[m]) for s, m in zip(movers, moves, strict=True)]
        )
        space = np.repeat(movers, [m.size for m in moves])
        order = np.lexsort((space, conflict))
        self._space, self._depth = space[order], np.concatenate(moves)[order]

    @property
    def last(self) -> int:
        return self._space.size

    def depths(self, moves: int) -> Ints:
        """The depth of every space after so many moves, [S]."""
        depths = self._start.copy()
        np.maximum.at(depths, self._space[:moves], self._depth[:moves])
        return depths


class Falling:
    """Amounts kept at the positions 0..last, that never rise: found by bisection."""

    def __init__(self, kept: Callable[[int], float], last: int) -> None:
        self.kept, self.last = kept, last

    @property
    def least(self) -> float:
        return self.kept(self.last)

    def first_within(self, amount: float) -> int:
        """The first position that keeps at most an amount; last + 1 if none does."""
        return bisect_left(range(self.last + 1), True, key=lambda position: self.kept(position) <= amount)

    def nearest(self, target: float) -> int:
        """The position that keeps nearest to a target within reach: the first within it or the one
        before; of equals, the one that removes least.
        """
        below = self.first_within(target)
        if below == 0 or self.kept(below - 1) - target > target - self.kept(below):
            return below
        return self.first_within(self.kept(below - 1))


class Listed(Falling):
    """Amounts that may rise and fall: looked at one after the other."""

    def __init__(self, amounts: Sequence[float]) -> None:
        super().__init__(amounts.__getitem__, len(amounts) - 1)
        self._amounts = amounts

    @property
    def least(self) -> float:
        return min(self._amounts)

    def first_within(self, amount: float) -> int:
        return next(
            (position for position, kept in enumerate(self._amounts) if kept <= amount), self.last + 1
        )
