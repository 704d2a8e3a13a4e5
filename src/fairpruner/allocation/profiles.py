"""Lists of profiles, from shallow to deep; a profile is one depth for every space."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fairpruner.allocation.rules import DepthTable, RankedSpace
from fairpruner.core.arrays import Ints


class RuleProfiles:
    """All profiles of one rule: one step for each distinct threshold of its tables."""

    def __init__(self, tables: Sequence[DepthTable]) -> None:
        self.thresholds, rank = np.unique(
            np.concatenate([thresholds for thresholds, _ in tables]), return_inverse=True
        )
        lengths = [thresholds.size for thresholds, _ in tables]
        # Each space gets its own range of integer keys, starts[s] + rank of the threshold. The keys of all
        # spaces are then sorted, so one search finds the rows of all spaces, with no float comparison.
        self._starts = np.arange(len(tables)) * self.thresholds.size
        self._keys = np.repeat(self._starts, lengths) + rank
        self._depths = np.concatenate([depths for _, depths in tables])

    @property
    def last(self) -> int:
        """The deepest step; the first step is 0."""
        return self.thresholds.size - 1

    def depths(self, step: int) -> Ints:
        """The profile at a step, [S]."""
        return self.many(np.array([step]))[:, 0]

    def many(self, steps: Ints) -> Ints:
        """The profiles at several steps, [n] -> [S, n]."""
        keys = self._starts[:, None] + steps
        return self._depths[np.searchsorted(self._keys, keys, side="right") - 1]

    def step_at(self, threshold: float) -> int:
        """The last step whose threshold is not above the given one."""
        return int(np.searchsorted(self.thresholds, threshold, side="right")) - 1


class ProfilesBetween:
    """The profiles from `start` to `end`, [S] each: every move takes one space to its next candidate depth.

    The space with the lowest ToD at its next candidate moves first.
    """

    def __init__(self, spaces: Sequence[RankedSpace], start: Ints, end: Ints) -> None:
        self._start = start
        movers: list[int] = np.flatnonzero(end > start).tolist()
        moves = []  # of each mover, the candidate depths after `start`, up to `end`
        for s in movers:
            candidates = spaces[s].candidates
            moves.append(candidates[(candidates > start[s]) & (candidates <= end[s])])
        # The greedy choice of the lowest next ToD gives the same order as sorting all moves by the highest
        # ToD up to and including each.
        conflict = np.concatenate(
            [np.maximum.accumulate(spaces[s].tod[m]) for s, m in zip(movers, moves, strict=True)]
        )
        space = np.repeat(movers, [m.size for m in moves])
        order = np.lexsort((space, conflict))
        self._space, self._depth = space[order], np.concatenate(moves)[order]

    @property
    def last(self) -> int:
        """The number of moves to `end`."""
        return self._space.size

    def depths(self, moves: int) -> Ints:
        """The profile after this many moves, [S]."""
        depths = self._start.copy()
        np.maximum.at(depths, self._space[:moves], self._depth[:moves])
        return depths

    def many(self, moves: Ints) -> Ints:
        """The profiles after several numbers of moves, [n] -> [S, n]."""
        return np.stack([self.depths(count) for count in moves.tolist()], axis=1)
