"""The paper's bounds on what a plan can remove at a tolerance."""

from __future__ import annotations

import numpy as np

from fairpruner.core.arrays import Floats
from fairpruner.core.tod import ConflictCurve


def depth_limit(size: int, alpha: float) -> int:
    """The largest depth that any two rankings of J = `size` units allow: floor(J / (2 - alpha)).

    This is the paper's feasibility lemma.

    >>> depth_limit(17, 0.3)
    10
    """
    # Opposite rankings have the smallest overlap possible at every depth. Comparing their ToD with alpha is
    # exact; dividing by the float 2 - alpha is not.
    least = ConflictCurve(np.maximum(0, 2 * np.arange(size + 1) - size))
    return int(np.flatnonzero(least.tod <= alpha)[-1])


def mass_bound(protection: Floats, depth: int, alpha: float) -> float:
    """The largest sum of protection scores that `depth` units can have at a tolerance.

    `protection` holds the scores of all units, [J]. This is the paper's sharp bound A(m, alpha).

    >>> mass_bound(np.array([1.0, 2.0, 3.0, 4.0]), depth=2, alpha=0.5)
    6.0
    """
    if depth == 0:
        return 0.0
    # floor(alpha * m), computed by comparing fractions, because the product of floats is not exact.
    allowed = int(np.searchsorted(np.arange(depth + 1) / depth, alpha, side="right")) - 1
    descending = np.sort(protection)[::-1]
    return float(descending[:allowed].sum() + descending[depth : 2 * depth - allowed].sum())
