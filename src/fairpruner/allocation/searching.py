"""Which of several profiles, ordered from shallow to deep, keeps an amount nearest to the budget."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence


class BisectionSearch:
    """Search over amounts that never rise from position 0 to `last`, as params and FLOPs do."""

    def __init__(self, kept: Callable[[int], float], last: int) -> None:
        self.kept, self.last = kept, last

    @property
    def least(self) -> float:
        """The smallest amount of all positions."""
        return self.kept(self.last)

    def first_within(self, amount: float) -> int:
        """The first position that keeps at most `amount`; last + 1 if none does."""
        return bisect_left(range(self.last + 1), True, key=lambda position: self.kept(position) <= amount)

    def nearest(self, target: float) -> int:
        """The position whose amount is nearest to a target that some position is within.

        It is the first position within the target or the one before it. If both are equally near, or if
        several positions keep the same amount, the one that removes least is taken.
        """
        below = self.first_within(target)
        if below == 0 or self.kept(below - 1) - target > target - self.kept(below):
            return below
        return self.first_within(self.kept(below - 1))


class LinearSearch(BisectionSearch):
    """Search over amounts that may also rise, as latency does where widths become uneven."""

    def __init__(self, amounts: Sequence[float]) -> None:
        super().__init__(amounts.__getitem__, len(amounts) - 1)
        self._amounts = amounts

    @property
    def least(self) -> float:
        return min(self._amounts)

    def first_within(self, amount: float) -> int:
        return next((i for i, kept in enumerate(self._amounts) if kept <= amount), self.last + 1)
