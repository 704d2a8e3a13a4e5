"""Rank correlation: how well two score vectors agree on the order of units."""

from __future__ import annotations

from fairpruner.core.arrays import Floats


def spearman(a: Floats, b: Floats) -> float | None:
    """Spearman's rank correlation of two score vectors, [J] each; None if one of them is constant.

    >>> import numpy as np
    >>> spearman(np.array([1.0, 2.0, 3.0]), np.array([1.0, 4.0, 9.0]))
    1.0
    """
    from scipy.stats import spearmanr  # here, because importing scipy.stats takes a second

    if (a == a[0]).all() or (b == b[0]).all():
        return None
    return float(spearmanr(a, b).statistic)
