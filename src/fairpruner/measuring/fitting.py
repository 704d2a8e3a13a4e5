"""Fitting the operations of a latency table to measured times.

The model of one operation is

    ms = fixed + (work + uneven · ragged) · share + sum over axes a of width[a] · length[a] / full[a]

`share` is the product of all lengths divided by that of the full lengths. `ragged` is 1 if some length is not
a multiple of `multiple`, and else 0. Lengths are rounded up to that multiple first, because hardware computes
in blocks. All coefficients are times, so none may be negative: the fit is a non-negative least squares.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fairpruner.core.arrays import Floats, Ints
from fairpruner.core.cost_model import Term
from fairpruner.core.latency import TimedOp, padded_to

MULTIPLES = (1, 8, 16, 32)  # candidates for `multiple`
# A multiple above 1 is chosen only if its error is below this share of the error without a multiple.
CLEARLY = 0.75


def fit_operations(
    terms: Sequence[Term], lengths: Ints, sizes: Ints, times: Floats
) -> tuple[tuple[TimedOp, ...], int]:
    """Fit O operations over T trials: axis lengths [F, T], full lengths [F], milliseconds [T, O].

    Returns the fitted operations and the multiple that explains the times best.
    """
    fits, errors = {}, {}
    for multiple in MULTIPLES:
        found = [
            fit_operation(term, lengths, sizes, multiple=multiple, times=times[:, o])
            for o, term in enumerate(terms)
        ]
        fits[multiple], errors[multiple] = tuple(op for op, _ in found), sum(error for _, error in found)
    best = min(MULTIPLES, key=lambda multiple: errors[multiple])
    multiple = best if errors[best] < CLEARLY * errors[1] else 1
    return fits[multiple], multiple


def fit_operation(
    term: Term, lengths: Ints, sizes: Ints, *, multiple: int, times: Floats
) -> tuple[TimedOp, float]:
    """Fit one operation to its milliseconds [T]; also returns the absolute error as a share of the time."""
    from scipy.optimize import nnls  # here, because importing scipy.optimize takes most of a second

    axes = list(term.factors)
    padded, full = (padded_to(multiple, values) for values in (lengths[axes], sizes[axes]))  # [A, T], [A]
    share = padded.prod(axis=0) / full.prod()  # [T]
    ragged = (lengths[axes] % multiple != 0).any(axis=0)  # [T]
    columns = np.stack([np.ones_like(share), share, share * ragged, *(padded / full[:, None])], axis=1)
    coefficients, _ = nnls(columns, times)  # [3 + A]
    fixed, work, uneven, *widths = coefficients.tolist()
    error = float(np.abs(columns @ coefficients - times).sum() / times.sum())
    return TimedOp(tuple(axes), fixed, work, uneven, tuple(widths)), error
