"""Tolerance of Difference: two rankings of the same units in, their conflict curve out (numpy only)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fairpruner.core.arrays import Floats, Ints
from fairpruner.errors import FairprunerError


@dataclass(frozen=True, eq=False)
class ConflictCurve:
    """Overlap of the m first units to remove with the m first to protect, for m = 0..J (the paper's ToD
    times m).
    """

    overlaps: Ints  # [J + 1]

    def __post_init__(self) -> None:
        o, size = self.overlaps, self.overlaps.size - 1
        m = np.arange(size + 1)
        steps = np.diff(o)
        if (
            size < 1
            or o[0] != 0
            or o[-1] != size
            or steps.min() < 0
            or steps.max() > 2
            or (o > m).any()
            or (o < 2 * m - size).any()
        ):
            raise FairprunerError(
                "A conflict curve starts at 0, ends at J, rises by 0, 1 or 2 and lies between max(0, 2m - J)"
                " and m."
            )

    @property
    def tod(self) -> Floats:
        """ToD(m) = overlap / max(m, 1), [J + 1]; distinct fractions stay distinct in float64 up to J =
        2**26.
        """
        return self.overlaps / np.maximum(np.arange(self.overlaps.size), 1)

    def depth(self, alpha: float) -> int:
        """The largest m with ToD(m) <= alpha (the paper's m-hat)."""
        return int(np.flatnonzero(self.tod <= check_alpha(alpha))[-1])


def check_alpha(alpha: float) -> float:
    """Alpha as a float in [0, 1)."""
    if isinstance(alpha, (bool, str)) or not hasattr(alpha, "__float__"):
        raise FairprunerError(f"Alpha must be a number in [0, 1), found {alpha!r}.")
    value = float(alpha)
    if not 0 <= value < 1:
        raise FairprunerError(
            f"Alpha is {value:g}, expected a tolerance in [0, 1): 0 allows no conflict, 0.1 one unit in ten."
        )
    return value


def conflict_curve(removal: ArrayLike, protection: ArrayLike, groups: int = 1) -> ConflictCurve:
    """How many of the m first units to remove, [J], are among the m first to protect, [J], for every m:
    the paper's ToD.

    Units go by turns from `groups` blocks of equal length, as `removal_order` has them.

    >>> curve = conflict_curve([1, 2, 3, 4], [10, 20, 30, 40])
    >>> curve.overlaps.tolist(), curve.depth(0.0)
    ([0, 0, 0, 2, 4], 2)
    """
    u, r = _vector(removal, "Removal"), _vector(protection, "Protection")
    if u.size != r.size:
        raise FairprunerError(
            f"Removal scores {u.size} units and protection {r.size}: give both for the same units of one"
            " space."
        )
    # A unit lies in both sets of size m from the moment that the later of its two ranks is reached.
    later = np.maximum(_ranks(removal_order(u, groups)), _ranks(_ascending(-r)))  # [J], 1..J
    return ConflictCurve(np.cumsum(np.bincount(later, minlength=u.size + 1)))


def removal_order(removal: ArrayLike, groups: int = 1) -> Ints:
    """The units in the order in which they go, [J]: by (U, j), so ties go from the lowest index on.

    With groups, consecutive and equally long, by the rank within the group before that: the first of
    every group, then the second.

    >>> removal_order([0.5, 0.1, 0.5]).tolist(), removal_order([1, 2, 4, 3], groups=2).tolist()
    ([1, 0, 2], [0, 3, 1, 2])
    """
    order = _ascending(_vector(removal, "Removal"))
    if groups == 1:
        return order
    group = order * groups // order.size  # of each unit along the order
    by_group = np.argsort(group, kind="stable")
    turn = np.empty_like(order)
    turn[by_group] = np.tile(np.arange(order.size // groups), groups)
    return order[np.argsort(turn, kind="stable")]


def _ascending(values: Floats) -> Ints:
    return np.argsort(values, kind="stable").astype(np.int64, copy=False)


def _ranks(order: Ints) -> Ints:
    """Rank 1..J of each unit in an order of units."""
    ranks = np.empty_like(order)
    ranks[order] = np.arange(1, order.size + 1)
    return ranks


def _vector(values: ArrayLike, what: str) -> Floats:
    try:
        vector = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FairprunerError(f"{what} scores must be numbers, one per unit: {error}") from error
    if vector.ndim != 1 or vector.size == 0:
        raise FairprunerError(
            f"{what} scores have the shape {list(vector.shape)}, expected one number per unit and at least"
            " one unit."
        )
    bad = int((~np.isfinite(vector)).sum())
    if bad:
        raise FairprunerError(
            f"{what} scores hold {bad} of {vector.size} values that are NaN or infinite: score again without"
            " them."
        )
    return vector


def spearman(a: Floats, b: Floats) -> float | None:
    """Spearman's rank correlation of two score vectors, [J], ties at their average rank; None where one
    is constant.

    >>> spearman(np.array([1.0, 2.0, 3.0]), np.array([1.0, 4.0, 9.0]))
    1.0
    """
    x, y = (ranks - ranks.mean() for ranks in (_average_ranks(a), _average_ranks(b)))
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale else None


def _average_ranks(values: Floats) -> Floats:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last: Floats = np.cumsum(counts).astype(np.float64)  # rank of the last of each group of equals
    return (last - (counts - 1) / 2)[group]
