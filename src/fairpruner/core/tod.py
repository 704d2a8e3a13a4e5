"""Tolerance of Difference (ToD): the conflict curve of two rankings of the same units."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fairpruner.core.arrays import Floats, Ints
from fairpruner.errors import FairprunerError, is_whole_number


@dataclass(frozen=True, eq=False)
class ConflictCurve:
    """For m = 0..J: how many of the first m units to remove are among the first m units to protect.

    This overlap is the paper's ToD(m) times m.
    """

    overlaps: Ints  # [J + 1]

    def __post_init__(self) -> None:
        o, size = self.overlaps, self.overlaps.size - 1
        m = np.arange(size + 1)
        valid = size >= 1 and o[0] == 0 and o[-1] == size
        valid = valid and np.isin(np.diff(o), (0, 1, 2)).all()
        valid = valid and (o <= m).all() and (o >= 2 * m - size).all()
        if not valid:
            raise FairprunerError(
                "A conflict curve starts at 0, ends at J, rises by 0, 1 or 2 and lies between max(0, 2m - J)"
                " and m."
            )

    @property
    def tod(self) -> Floats:
        """ToD(m) = overlap / max(m, 1), [J + 1]; distinct fractions stay distinct up to J = 2**26."""
        return self.overlaps / np.maximum(np.arange(self.overlaps.size), 1)

    def depth(self, alpha: float) -> int:
        """The largest m with ToD(m) <= alpha (the paper's m-hat)."""
        return int(np.flatnonzero(self.tod <= check_alpha(alpha))[-1])


def check_alpha(alpha: float) -> float:
    """Alpha as a float in [0, 1)."""
    if isinstance(alpha, (bool, str)) or not hasattr(alpha, "__float__"):
        raise FairprunerError(f"Alpha must be a number in [0, 1), found {alpha!r}.")
    try:
        value = float(alpha)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise FairprunerError(f"Alpha must be a number in [0, 1), found {alpha!r}: {error}.") from error
    if not 0 <= value < 1:
        raise FairprunerError(
            f"Alpha is {value:g}, expected a tolerance in [0, 1): 0 allows no conflict, 0.1 allows one in"
            " ten units."
        )
    return value


def conflict_curve(removal: ArrayLike, protection: ArrayLike, groups: int = 1) -> ConflictCurve:
    """The conflict curve of removal scores [J] and protection scores [J] of the same units: the paper's ToD.

    With `groups`, units are removed in the order that `removal_order` gives for groups.

    >>> curve = conflict_curve([1, 2, 3, 4], [10, 20, 30, 40])
    >>> curve.overlaps.tolist(), curve.depth(0.0)
    ([0, 0, 0, 2, 4], 2)
    """
    u, r = _vector(removal, "Removal"), _vector(protection, "Protection")
    if u.size != r.size:
        raise FairprunerError(
            f"There are {u.size} removal scores and {r.size} protection scores: give both for the same units."
        )
    # A unit is in both sets of size m as soon as m reaches the larger of its two ranks.
    later = np.maximum(_ranks(removal_order(u, groups)), _ranks(_ascending(-r)))  # [J], 1..J
    return ConflictCurve(np.cumsum(np.bincount(later, minlength=u.size + 1)))


def removal_order(removal: ArrayLike, groups: int = 1) -> Ints:
    """The units in the order in which they are removed, [J]: by score, and by index where scores are equal.

    With `groups`, the units form so many consecutive blocks of equal length. The first unit of every block
    is removed, then the second of every block, and so on.

    >>> removal_order([0.5, 0.1, 0.5]).tolist(), removal_order([1, 2, 4, 3], groups=2).tolist()
    ([1, 0, 2], [0, 3, 1, 2])
    """
    order = _ascending(_vector(removal, "Removal"))
    if not is_whole_number(groups, at_least=1) or order.size % groups:
        raise FairprunerError(f"groups={groups!r}, expected a divisor of the {order.size} units.")
    if groups == 1:
        return order
    group = order * groups // order.size  # [J] the group of each unit in the order
    by_group = np.argsort(group, kind="stable")
    turn = np.empty_like(order)
    turn[by_group] = np.tile(np.arange(order.size // groups), groups)
    return order[np.argsort(turn, kind="stable")]


def _ascending(values: Floats) -> Ints:
    """The indices of the values in ascending order, equal values by index."""
    return np.argsort(values, kind="stable").astype(np.int64, copy=False)


def _ranks(order: Ints) -> Ints:
    """The rank 1..J of each unit, from an order of the units."""
    ranks = np.empty_like(order)
    ranks[order] = np.arange(1, order.size + 1)
    return ranks


def _vector(values: ArrayLike, what: str) -> Floats:
    """Scores as float64 [J], refused unless they are finite numbers."""
    try:
        vector = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise FairprunerError(f"{what} scores must be numbers, one per unit: {error}") from error
    if vector.ndim != 1 or vector.size == 0:
        raise FairprunerError(
            f"{what} scores have the shape {list(vector.shape)}, expected one number per unit and at least"
            " one unit."
        )
    bad = int((~np.isfinite(vector)).sum())
    if bad:
        raise FairprunerError(
            f"{what} scores have {bad} NaN or infinite values among {vector.size}: look for them in"
            " the model's outputs and gradients, and score again."
        )
    return vector
