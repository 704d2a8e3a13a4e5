"""Array types, and a compact form of integer vectors for files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def encode_runs(values: Ints) -> list[list[int]]:
    """A vector as a list of runs [first, count, each].

    A run encodes `count` consecutive integers from `first` on, each repeated `each` times.

    >>> encode_runs(np.array([-1, -1, 4, 5, 6, 0, 0, 0, 1, 1, 1]))
    [[-1, 1, 2], [4, 3, 1], [0, 2, 3]]
    """
    starts = np.flatnonzero(np.diff(values, prepend=values[0] - 1))  # [B] first index of each equal block
    value, each = values[starts], np.diff(starts, append=values.size)  # [B]
    joined = (np.diff(value) == 1) & (np.diff(each) == 0)  # [B - 1] whether the next block continues the run
    first = np.flatnonzero(np.concatenate([[True], ~joined]))  # [R] first block of each run
    count = np.diff(first, append=starts.size)
    return np.stack([value[first], count, each[first]], axis=1).tolist()  # type: ignore[no-any-return]


def runs_length(runs: Sequence[Sequence[int]]) -> int:
    """The length of the vector that runs encode; a few bytes may encode more than memory can hold.

    >>> runs_length([[-1, 1, 2], [0, 1, 10**12]])
    1000000000002
    """
    for run in runs:
        if not isinstance(run, list) or len(run) != 3 or not all(type(number) is int for number in run):
            raise ValueError(f"expected runs [first, count, each] of whole numbers, found {str(run)[:80]}")
    return sum(max(count, 0) * max(each, 0) for _, count, each in runs)


def decode_runs(runs: Sequence[Sequence[int]]) -> Ints:
    """The vector that `encode_runs` was given.

    >>> decode_runs([[-1, 1, 2], [4, 3, 1]])
    array([-1, -1,  4,  5,  6])
    """
    table = np.array(runs)  # [R, 3]
    if table.dtype.kind != "i" or table.ndim != 2 or table.shape[1] != 3 or table[:, 1:].min() < 1:
        raise ValueError(f"expected runs [first, count, each] of whole numbers, found {str(runs)[:80]}")
    first, count, each = table.T
    # The position of each block inside its run.
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return np.repeat(np.repeat(first, count) + within, np.repeat(each, count)).astype(np.int64)
