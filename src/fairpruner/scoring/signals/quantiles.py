"""A bounded summary of many samples of one class: their quantile functions, column by column.

**The summary.** Samples are collected until there are M; the even and the odd ones then make two blocks of
M/2 values, sorted, at level 0. Two blocks of one level are merged into one block of the next level: their
values are sorted together, and each pair of neighbours is replaced by its mean. A value at level l stands
for 2^l samples. So a class of n samples keeps M values for each of at most log2(n / M) levels.

**The error.** A merge moves each value by half the distance to its neighbour. The distances within one block
add up to at most the range of the values, so each level moves the distribution by at most range / M in
Wasserstein-1 distance, for any order of the samples. `python -m benchmarks determinism` measures it. Means
are exact, and so are distances between classes that differ by a shift alone.

Example, M = 4, even samples only: 1, 9 and 2, 4 are blocks of level 0. Sorted together they are 1, 2, 4, 9;
their merge is 1.5, 6.5, with two samples behind each value.

Blocks that reach level LEVELS are averaged, value by value, so that memory is bounded for any number of
samples. Only there, beyond M * 2^LEVELS samples of a class, may the order of the samples change more.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairpruner.core.arrays import Floats, Ints
from fairpruner.scoring.processes import Processes

LEVELS = 12  # 65,536 samples of a class with M = 16
WORTH_A_THREAD = 2**15  # values to sort
MOST_REPEATS = 5  # of each value on average; with more, sorting the repeated values takes longer
PLACES = 2**29 - 1  # the bits of a float64 that a float32 leaves at zero
_threads = ThreadPoolExecutor(thread_name_prefix="fairpruner-sort")  # started when first used


class Steps(NamedTuple):
    """Quantiles as step functions with cells of equal width, each [C, cells]."""

    whole: Tensor  # of all samples
    even: Tensor  # of samples 0, 2, 4, …
    odd: Tensor


class ClassQuantiles:
    """The quantile functions of C columns over the samples of one class."""

    def __init__(self, columns: int, capacity: int, like: Tensor) -> None:
        self._half = capacity // 2
        self._filled = 0
        self._recent = like.new_empty(2, self._half, columns)  # even and odd samples since the last block
        self._blocks: list[Tensor | None] = []  # by level: [C, 2, M/2], sorted values of even and odd samples
        self._top = like.new_empty(0)  # the sum of all blocks that reached the last level
        self._top_count = 0

    @property
    def columns(self) -> int:
        return self._recent.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self._recent.dtype

    def extend(self, rows: Tensor, index: Tensor) -> None:
        """Take the rows of a matrix [N, C] that `index` [n] names, in that order."""
        while len(index):
            if self._filled == 2 * self._half:
                self._insert(sort_(_columns(self._recent.flatten(0, 1)).view(-1, 2, self._half)), 0)
                self._filled = 0
            taken = min(2 * self._half - self._filled, len(index))
            for parity in (0, 1):
                own = index[(parity - self._filled) % 2 : taken : 2]
                start = (self._filled + 1 - parity) // 2
                torch.index_select(rows, 0, own, out=self._recent[parity, start : start + len(own)])
            self._filled += taken
            index = index[taken:]

    def _insert(self, block: Tensor, level: int) -> None:
        """Add a block of a level, merging blocks as a binary counter carries its ones."""
        while level < min(len(self._blocks), LEVELS) and (other := self._blocks[level]) is not None:
            both = sort_(torch.cat([other, block], -1))
            block = (both[..., ::2] + both[..., 1::2]) * 0.5  # eight times as fast as `mean`
            self._blocks[level] = None
            level += 1
        if level == LEVELS:
            self._top = self._top + block if self._top_count else block
            self._top_count += 1
            return
        self._blocks += [None] * (level + 1 - len(self._blocks))
        self._blocks[level] = block

    def join(self, processes: Processes) -> None:
        """Take in the other processes' samples of this class, one process after the other."""
        tops = processes.gathered(self._top_count)
        empty = self._recent.new_zeros(self.columns, 2, self._half)
        if any(tops):
            self._top = processes.summed(self._top if self._top_count else empty)
        self._top_count = sum(tops)
        levels = max(processes.gathered(len(self._blocks)))
        own = [*self._blocks, *[None] * (levels - len(self._blocks))]
        self._blocks = []
        for level, block in enumerate(own):
            present = processes.gathered(block is not None)
            if any(present):
                blocks = processes.gathered_tensors(empty if block is None else block)
                for there, other in zip(present, blocks, strict=True):
                    if there:
                        self._insert(other, level)
        filled, recent = processes.gathered(self._filled), processes.gathered_tensors(self._recent)
        self._filled = 0
        for count, samples in zip(filled, recent, strict=True):
            in_order = samples.transpose(0, 1).flatten(0, 1)  # even and odd samples took turns
            self.extend(in_order, torch.arange(count, device=samples.device))

    @property
    def cells(self) -> tuple[int, int, int]:
        """The number of cells of each of the `steps`: one for each sample while all samples are kept."""
        even, odd = self._counts
        return (2 * self._half, self._half, self._half) if self._merged else (even + odd, even, odd)

    @property
    def _merged(self) -> bool:
        return self._top_count > 0 or any(block is not None for block in self._blocks)

    @property
    def _counts(self) -> tuple[int, int]:
        return (self._filled + 1) // 2, self._filled // 2

    def steps(self, columns: slice) -> Steps:
        """The quantiles of some columns: exact while all samples are kept."""
        # [c, n] each, even and odd samples
        recent = [
            _columns(self._recent[parity, :count, columns]) for parity, count in enumerate(self._counts)
        ]
        if not self._merged:
            return Steps(sort_(torch.cat(recent, 1)), sort_(recent[0]), sort_(recent[1]))
        blocks = [
            (block[columns], 2.0**level) for level, block in enumerate(self._blocks) if block is not None
        ]
        if self._top_count:
            blocks.append((self._top[columns] / self._top_count, self._top_count * 2.0**LEVELS))
        values = [
            torch.cat([recent[parity], *(block[:, parity] for block, _ in blocks)], 1) for parity in (0, 1)
        ]
        # [n] each: how many samples a value stands for
        weights = [
            np.repeat([1.0, *(weight for _, weight in blocks)], [count, *[self._half] * len(blocks)])
            for count in self._counts
        ]
        whole = quantile_cells(torch.cat(values, 1), np.concatenate(weights), 2 * self._half)
        even, odd = (quantile_cells(v, w, self._half) for v, w in zip(values, weights, strict=True))
        return Steps(whole, even, odd)


def quantile_cells(values: Tensor, weights: Floats, cells: int) -> Tensor:
    """The quantile function of weighted values, [C, n] and [n], averaged over equal cells, [C, cells].

    The integral of a quantile function up to a share of the weight is piecewise linear. Its differences at
    the edges of the cells are the averages.

    >>> quantile_cells(torch.tensor([[3.0, 1.0]]), np.array([3.0, 1.0]), 2)
    tensor([[2., 3.]])
    """
    centre = values.mean(1, keepdim=True)  # subtracted, because a large mean would cost digits below
    repeats = weights / weights.min()
    if repeats.sum() <= MOST_REPEATS * len(repeats) and np.array_equal(repeats, np.floor(repeats)):
        return _cells_of_repeated(values - centre, repeats.astype(np.int64), cells) + centre
    ordered, order = sorted_with_places(values - centre)
    weight = torch.from_numpy(weights).to(values)[order]  # [C, n]
    shares = weight.cumsum(1)
    integral = torch.nn.functional.pad((weight * ordered).cumsum(1), (1, 0))  # [C, n + 1], before each value
    edges = shares[:, -1:] * torch.arange(1, cells, device=values.device).to(values) / cells  # [C, cells - 1]
    place = torch.searchsorted(shares, edges).clamp(max=values.shape[1] - 1)
    passed = shares.gather(1, place) - weight.gather(1, place)
    inner = integral.gather(1, place) + (edges - passed) * ordered.gather(1, place)
    at_edges = torch.cat([integral[:, :1], inner, integral[:, -1:]], 1)
    return at_edges.diff(dim=1) * cells / shares[:, -1:] + centre


def _cells_of_repeated(values: Tensor, repeats: Ints, cells: int) -> Tensor:
    """The same by repeating each value, several times as fast: sorted, every row has the same cells."""
    if repeats.max() > 1:
        values = values.repeat_interleave(torch.from_numpy(repeats).to(values.device), 1)
    count = values.shape[1]
    starts, firsts = np.arange(count)[:, None] / count, np.arange(cells) / cells
    ends, lasts = starts + 1 / count, firsts + 1 / cells
    shared = (np.minimum(ends, lasts) - np.maximum(starts, firsts)).clip(0) * cells  # [n, cells]
    averages: Tensor = sort_(values) @ torch.from_numpy(shared).to(values)
    return averages


def _columns(rows: Tensor) -> Tensor:
    """Each column as a contiguous row of a copy, [n, C] -> [C, n]."""
    return rows.t().clone(memory_format=torch.contiguous_format)


def sort_(rows: Tensor) -> Tensor:
    """Sort the last dimension, on the CPU in place.

    On the CPU numpy's vectorised sort is many times faster than torch's, and we choose its threads.
    """
    if rows.device.type != "cpu":
        return rows.sort(-1).values
    threads = torch.get_num_threads() if rows.numel() > WORTH_A_THREAD else 1
    pieces = np.array_split(rows.numpy(), threads)
    for _ in (_threads.map if threads > 1 else map)(lambda piece: piece.sort(axis=-1), pieces):
        pass
    return rows


def sorted_with_places(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The sorted rows of a matrix [C, n], and the place of each value before, [C, n].

    On the CPU each value is made a float64 whose last bits are its place, so that one sort by numpy orders
    both.

    >>> sorted_with_places(torch.tensor([[0.5, -1.0, 0.0]]))
    (tensor([[-1.0000,  0.0000,  0.5000]]), tensor([[1, 2, 0]]))
    """
    if rows.device.type != "cpu" or rows.dtype != torch.float32:
        ordered, places = rows.sort(1)
        return ordered, places
    marked = rows.double().view(torch.int64) | torch.arange(rows.shape[1], device="cpu")
    bits = sort_(marked.view(torch.float64)).view(torch.int64)
    places = bits & PLACES
    return (bits ^ places).view(torch.float64).float(), places
