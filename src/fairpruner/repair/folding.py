"""Predict what was removed from what was kept, and let the consumers' weights take it over: statistics of
the original model only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from fairpruner.core.arrays import Ints
from fairpruner.core.plan import Plan
from fairpruner.core.spaces import Slice, UnitSpace
from fairpruner.inputs.batches import Batch, forward
from fairpruner.models.experts import expert_lists
from fairpruner.models.observing import positions_of
from fairpruner.repair.notes import ROUTED, UNSEEN, USED_ELSEWHERE, Note
from fairpruner.repair.products import Product, Walk
from fairpruner.repair.regression import Choice, Sums, first_half, float64, wide
from fairpruner.repair.wiring import Wire, kept_by_place, tensors_by_name

MOST_CHANNELS = 8192  # that one weight reads: more would make the products of all pairs too large

Chooser = Callable[[tuple[Sums, Sums], bool], Choice]


@dataclass(frozen=True, eq=False)
class Consumer:
    """One weight that lost inputs: who owns them, and which of them a cut leaves."""

    name: str
    parts: tuple[tuple[UnitSpace, Slice], ...]
    is_matrix: bool

    @cached_property
    def table(self) -> Tensor | None:
        """Where a channel was flattened into several columns: the columns of each unit, [J, F]; a map for
        channels then serves all F.

        The columns of a head are features of its own, each predicted by itself.
        """
        space, part = self.parts[0]
        table = positions_of(part.owner, space.size)
        shared = (
            self.is_matrix
            and len(self.parts) == 1
            and space.kind != "head"
            and table.shape[1] > 1
            and table.min() >= 0
            and table.size == part.owner.size
        )
        return torch.from_numpy(table) if shared else None

    def gathered(self, matrix: Tensor) -> Tensor:
        """A weight's matrix [1, C, 1, q] with the columns of a unit as its taps, [1, J, F, q]; any other
        stays.
        """
        return matrix if self.table is None else matrix[0, self.table, 0][None]

    def scattered(self, matrix: Tensor) -> Tensor:
        """The inverse of `gathered`."""
        if self.table is None:
            return matrix
        whole = matrix.new_zeros(1, self.table.numel(), 1, matrix.shape[3])
        whole[0, self.table, 0] = matrix[0]
        return whole


def consumers(plan: Plan, weights: Mapping[str, Tensor]) -> list[Consumer]:
    """All weights that read a unit the plan removes."""
    found: dict[str, list[tuple[UnitSpace, Slice]]] = {}
    for space in plan.spaces:
        for part in space.slices_of("read") if plan.removed[space.name] else ():
            found.setdefault(part.tensor, []).append((space, part))
    return [Consumer(name, tuple(parts), weights[name].ndim == 2) for name, parts in found.items()]


class _Moments:
    """Products of all pairs of channels that one weight reads, summed over the samples of each half of
    the data.
    """

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.call: Product  # the last one, without its input
        self._halves: list[tuple[int, Tensor, Tensor]] = []  # rows, [G, c, c], [G, c]

    def update(self, product: Product, batch: Batch, seen: int) -> None:
        """See one batch's input; `seen` samples came before."""
        self.call = product.without_input()
        values = wide(product.source.movedim(product.axis, -1).flatten(0, -2))  # [rows, C]
        rows = product.rows(product.source, batch.inputs)
        first = first_half(rows, len(values), batch.size, seen)
        new = [self._of(values[rows[half]]) for half in (first, ~first)]
        self._halves = (
            [(r + s, g + h, t + u) for (r, g, t), (s, h, u) in zip(self._halves, new, strict=True)]
            if self._halves
            else new
        )

    def _of(self, rows: Tensor) -> tuple[int, Tensor, Tensor]:
        if self.consumer.table is not None:
            table = self.consumer.table.to(rows.device)
            channels = rows[:, table].transpose(1, 2).flatten(0, 1)[None]  # [1, rows F, J]
        else:
            channels = rows.unflatten(1, (self.call.groups, -1)).transpose(0, 1)  # [G, rows, c]
        return channels.shape[1], float64(channels.mT @ channels), float64(channels.sum(1))

    def sums(self, matrix: Tensor, keep: Tensor) -> tuple[Sums, Sums]:
        """For both halves: the kept channels as features, and as targets what the lost ones gave through
        the weights [G, c, taps, q].
        """
        gone = torch.ones(matrix.shape[1], dtype=torch.bool)
        gone[keep] = False
        lost = matrix[:, gone].flatten(2)  # [G, r, taps q]

        def of(rows: int, gram: Tensor, total: Tensor) -> Sums:
            left, across, right = (
                gram[:, keep][:, :, keep],
                gram[:, keep][:, :, gone],
                gram[:, gone][:, :, gone],
            )
            return Sums(
                rows,
                left,
                across @ lost,
                (lost * (right @ lost)).sum((1, 2)),
                total[:, keep],
                (total[:, None, gone] @ lost)[:, 0],
            )

        first, second = (of(*half) for half in self._halves)
        return first, second


class _Collect(Walk):
    """Gathers the moments of all consumers in one pass."""

    def __init__(self, model: nn.Module, found: Iterable[Consumer]) -> None:
        super().__init__(model)
        self.moments = {consumer.name: _Moments(consumer) for consumer in found}
        self.batch: Batch
        self.seen = 0

    def product(self, product: Product) -> Tensor:
        if product.name in self.moments:
            self.moments[product.name].update(product, self.batch, self.seen)
        return product.run()

    def run(self, model: nn.Module, batch: Batch) -> None:
        self.batch = batch
        with self:
            forward(model, batch)
        self.seen += batch.size


def fold(
    small: nn.Module,
    model: nn.Module,
    plan: Plan,
    sweep: Callable[[], Iterable[Batch]],
    wires: Mapping[str, Wire],
    choose: Chooser,
) -> list[Note]:
    """Add to every consumer in `small` what the removed units gave it, as far as the kept ones tell."""
    kept, weights, tensors = (
        kept_by_place(plan),
        dict(model.named_parameters(remove_duplicate=False)),
        tensors_by_name(small),
    )
    inside = tuple(f"{path}." for path in expert_lists(model))
    obstacles = {
        consumer: ROUTED if consumer.name.startswith(inside) else _obstacle(consumer, wires)
        for consumer in consumers(plan, weights)
    }
    notes = [Note(consumer.name, "skipped", reason) for consumer, reason in obstacles.items() if reason]
    collect = _Collect(model, [consumer for consumer, reason in obstacles.items() if not reason])
    for batch in sweep():
        collect.run(model, batch)
    for name, moments in collect.moments.items():
        offset, call = wires[name].offset, moments.call
        keep = _kept_in_group(moments.consumer, kept[name, call.read_dim], call)
        if keep is None:
            notes.append(Note(name, "skipped", "its groups lose different channels"))
            continue
        # [G, c, taps, q]
        matrix = moments.consumer.gathered(call.matrix(float64(weights[name].detach())))
        choice = choose(moments.sums(matrix, keep), offset is not None)
        notes.append(Note.of(name, choice))
        if choice.fit is None:
            continue
        change = torch.zeros_like(matrix)
        change[:, keep] = choice.fit.slope.unflatten(2, matrix.shape[2:])
        delta = call.stored(moments.consumer.scattered(change), weights[name])
        for dim in (call.read_dim, call.write_dim):
            if (name, dim) in kept:
                delta = delta.index_select(dim, torch.from_numpy(kept[name, dim]).to(delta.device))
        with torch.no_grad():
            tensors[name].add_(delta)
            if offset is not None:
                constant = (
                    choice.fit.offset.unflatten(1, matrix.shape[2:]).sum(1).flatten()
                )  # every tap meets it: [outputs]
                tensors[offset.tensor].add_(
                    offset.sign * constant[call.kept_outputs(kept)].to(tensors[offset.tensor])
                )
    return notes


def _obstacle(consumer: Consumer, wires: Mapping[str, Wire]) -> str:
    """Why a consumer cannot be repaired, or nothing."""
    if consumer.name not in wires:
        return UNSEEN
    if not wires[consumer.name].only_multiplies:
        return USED_ELSEWHERE
    columns = consumer.parts[0][1].owner.size
    if columns > MOST_CHANNELS and consumer.table is None:
        return f"it reads {columns} columns, more than {MOST_CHANNELS}"
    return ""


def _kept_in_group(consumer: Consumer, kept: Ints, call: Product) -> Tensor | None:
    """The channels of every group, or the units of a table, that a cut leaves; None if groups differ in
    this.
    """
    if consumer.table is not None:
        return torch.from_numpy(np.flatnonzero(np.isin(consumer.table[:, 0].numpy(), kept)))
    if not call.transposed:
        return torch.from_numpy(kept)  # the weight tells the channels of one group, which all share
    channels = call.weight.shape[0] // call.groups
    first = kept[kept < channels]
    same = np.array_equal(kept, (np.arange(call.groups)[:, None] * channels + first).reshape(-1))
    return torch.from_numpy(first) if same else None
