"""A bounded summary of many samples of one class: their quantile functions, column by column.

Up to M samples are kept as they are. When one more comes, the M are folded away: the even and the odd
ones are sorted apart, M/2 values each, and added to running sums of sorted chunks. The mean of sorted
chunks is the vector of mean order statistics, which is the Wasserstein barycentre of the chunks. Folding
happens after M samples of a class, wherever the borders of the batches lie.

Means and pure shifts stay exact. What chunks blur is differences of spread and shape: W1 distances of
3,000 samples come out within 1 % with M = 256, 7 % with M = 32 and 25 % with M = 8.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairpruner.scoring.processes import Processes

WORTH_A_THREAD = 2**15  # values to sort
_threads = ThreadPoolExecutor(thread_name_prefix="fairpruner-sort")  # started when first used


class Steps(NamedTuple):
    """Step functions with cells of equal width: quantiles of all samples, of the even and of the odd
    ones, each [C, cells].
    """

    whole: Tensor
    even: Tensor
    odd: Tensor


class ClassQuantiles:
    """The quantile functions of C columns over the samples of one class, from at most M samples at a
    time.
    """

    def __init__(self, columns: int, capacity: int, like: Tensor) -> None:
        self._cells = capacity // 2
        self._filled = 0
        # even and odd samples since the last folding
        self._recent = like.new_empty(2, self._cells, columns)
        self._folded = 0  # how many chunks of M samples
        self._sums = like.new_empty(0)  # [C, 2, M/2] once something was folded

    @property
    def columns(self) -> int:
        return self._recent.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self._recent.dtype

    def extend(self, rows: Tensor, index: Tensor) -> None:
        """Take the rows of a matrix [N, C] that `index` [n] names, in that order."""
        while len(index):
            if self._filled == 2 * self._cells:
                self._fold()
            taken = min(2 * self._cells - self._filled, len(index))
            for parity in (0, 1):
                own = index[(parity - self._filled) % 2 : taken : 2]
                start = (self._filled + 1 - parity) // 2
                torch.index_select(rows, 0, own, out=self._recent[parity, start : start + len(own)])
            self._filled += taken
            index = index[taken:]

    def join(self, processes: Processes) -> None:
        """Take in the other processes' samples of this class: sums of sorted chunks add up, recent
        samples come one process after the other.
        """
        folded = processes.gathered(self._folded)
        if any(folded):
            zeros = self._recent.new_zeros(self.columns, 2, self._cells)
            self._sums = processes.summed(self._sums if self._folded else zeros)
        filled, recent = processes.gathered(self._filled), processes.gathered_tensors(self._recent)
        self._folded, self._filled = sum(folded), 0
        for count, samples in zip(filled, recent, strict=True):
            self.extend(
                samples.transpose(0, 1).flatten(0, 1), torch.arange(count, device=samples.device)
            )  # even and odd ones took turns

    def _fold(self) -> None:
        chunk = _columns(self._recent.flatten(0, 1)).view(-1, 2, self._cells)  # [C, 2, M/2]
        if self._folded:
            self._sums += sort_(chunk)
        else:
            self._sums = sort_(chunk)
        self._folded += 1
        self._filled = 0

    @property
    def cells(self) -> tuple[int, int, int]:
        """The number of cells of each of the `steps`: one for each sample until something was folded,
        then M/2.
        """
        even, odd = self._counts
        return (self._cells,) * 3 if self._folded else (even + odd, even, odd)

    @property
    def _counts(self) -> tuple[int, int]:
        return (self._filled + 1) // 2, self._filled // 2

    def steps(self, columns: slice) -> Steps:
        """The quantiles of some columns: exact until something was folded."""
        counts = self._counts
        recent = [
            _columns(self._recent[parity, :count, columns]) for parity, count in enumerate(counts)
        ]  # [c, n] each
        if not self._folded:
            return Steps(sort_(torch.cat(recent, 1)), sort_(recent[0]), sort_(recent[1]))
        totals = [self._folded * self._cells + count for count in counts]
        even, odd = (
            self._sums[columns, parity] * (self._cells / totals[parity]) for parity in (0, 1)
        )  # [c, M/2] each
        for half, left, count, total in zip((even, odd), recent, counts, totals, strict=True):
            if count:  # samples since the last folding join with their share
                half.addmm_(sort_(left), cell_averages(count, self._cells).to(left), alpha=count / total)
        return Steps(torch.lerp(even, odd, totals[1] / sum(totals)), even, odd)


def _columns(rows: Tensor) -> Tensor:
    """Each column as a contiguous row of a copy, [n, C] -> [C, n]."""
    return rows.t().clone(memory_format=torch.contiguous_format)


def sort_(rows: Tensor) -> Tensor:
    """Sort the last dimension in place; on the CPU numpy's vectorised sort is many times faster than
    torch's, and leaves the threading to us.
    """
    if rows.device.type != "cpu":
        return rows.sort(-1).values
    threads = torch.get_num_threads() if rows.numel() > WORTH_A_THREAD else 1
    pieces = np.array_split(rows.numpy(), threads)
    for _ in (_threads.map if threads > 1 else map)(lambda piece: piece.sort(axis=-1), pieces):
        pass
    return rows


@cache
def cell_averages(cells: int, onto: int) -> Tensor:
    """The matrix [cells, onto] that turns a step function of equal cells into its exact averages over
    other equal cells.
    """
    old, new = (torch.arange(n + 1, dtype=torch.float64) / n for n in (cells, onto))
    overlap = torch.minimum(old[1:, None], new[None, 1:]) - torch.maximum(old[:-1, None], new[None, :-1])
    return overlap.clamp_(min=0) * onto
