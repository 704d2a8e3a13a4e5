"""Refit the weights of a cut model in the order they are called, against the original model run beside
it.

Both models run over each batch once. Where a weight is called in the cut model, what it reads there, with
all the drift that earlier weights left, is fitted to what the original gives at the same place; and where
the output runs into a sum, to the original's sum, so that the refit also makes up for the drift of the
other operand. The forward pass then goes on with the new weight. Sums over rows are kept from batch to
batch, so each batch makes all fits better. Sums that would not fit into memory together are taken one
stretch of weights after the other, in a sweep over the data each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fairpruner.core.arrays import Ints
from fairpruner.core.plan import Plan
from fairpruner.inputs.batches import Batch, forward
from fairpruner.models.experts import expert_lists
from fairpruner.repair.notes import ROUTED, UNSEEN, USED_ELSEWHERE, Note
from fairpruner.repair.products import Product, Walk
from fairpruner.repair.regression import Choice, Fit, Sums, choose, first_half, float64, wide
from fairpruner.repair.wiring import Offset, Sum, Wire, kept_by_place, straight_line, tensors_by_name

POSITIONS = 32  # rows taken of each sample: neighbours tell little more
MOST_SUMS = 2**26  # numbers kept at once
TOO_MANY_SUMS = f"its sums hold more than {MOST_SUMS} numbers"

Kept = Mapping[tuple[str, int], Ints]


def refit(
    small: nn.Module,
    model: nn.Module,
    plan: Plan,
    sweep: Callable[[], Iterable[Batch]],
    wires: Mapping[str, Wire],
) -> list[Note]:
    """Refit every weight of `small` from the first that lost units onwards."""
    if lists := expert_lists(
        model
    ):  # which of them work, and so what is added up where, is another matter in each model
        return [Note(path, "skipped", ROUTED) for path in lists]
    lost = {
        part.tensor for space in plan.spaces if plan.removed[space.name] for part in space.slices_of("read")
    }
    notes = [Note(name, "skipped", UNSEEN) for name in sorted(lost - set(wires))]
    order = list(wires)
    start = min((order.index(name) for name in lost & set(wires)), default=len(order))
    obstacles = {name: _obstacle(wires[name]) for name in order[start:]}
    notes += [Note(name, "skipped", reason) for name, reason in obstacles.items() if reason]
    waiting = {name: wires[name] for name, reason in obstacles.items() if not reason}
    while waiting:
        stretch = _refit_stretch(small, model, waiting, kept_by_place(plan), sweep())
        if not stretch:  # the data takes another way through the model than its first samples
            return notes + [Note(name, "skipped", UNSEEN) for name in waiting]
        notes += [
            Note.of(name, refit.choice) if refit.choice else Note(name, "skipped", TOO_MANY_SUMS)
            for name, refit in stretch.items()
        ]
        waiting = {name: wire for name, wire in waiting.items() if name not in stretch}
    return notes


def _refit_stretch(
    small: nn.Module, model: nn.Module, wires: Mapping[str, Wire], kept: Kept, batches: Iterable[Batch]
) -> dict[str, _Refit]:
    """Refit the first of these weights, as many as have room for their sums."""
    stretch = _Stretch()
    for count, (batch, last) in enumerate(_with_last(batches), start=1):
        original = _Original(model, wires, kept, batch)
        with original:
            forward(model, batch)
        # Solving after 1, 2, 4, … batches is often enough: from one batch to the next a fit changes
        # little.
        with _Follow(small, wires, original.places, stretch, solve=last or count & (count - 1) == 0):
            forward(small, batch)
        stretch.full = True
    return stretch.refits


def _obstacle(wire: Wire) -> str:
    """Why a weight is not refitted, or nothing."""
    if not wire.only_multiplies:
        return USED_ELSEWHERE
    return f"it is called {wire.calls} times, and a refit fits one place" if wire.calls > 1 else ""


def _with_last(batches: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Batches, and whether each is the last."""
    iterator = iter(batches)
    held = next(iterator, None)
    while held is not None:
        following = next(iterator, None)
        yield held, following is None
        held = following


@dataclass(frozen=True, eq=False)
class _Place:
    """What the original gives at the chosen rows of one weight's output, or of the sum it runs into."""

    rows: Tensor  # [rows]
    first_half: Tensor  # [rows], bool: the samples that fit; the others prove
    values: Tensor  # [rows, kept outputs]


class _Original(Walk):
    """Takes rows of the original's outputs and sums."""

    def __init__(self, model: nn.Module, wires: Mapping[str, Wire], kept: Kept, batch: Batch) -> None:
        super().__init__(model)
        self._wires, self._kept, self._batch = wires, kept, batch
        self._generator = torch.Generator().manual_seed(batch.position)
        self._waiting: dict[int, tuple[Product, Tensor]] = {}  # sum -> who runs into it, and its rows
        self.places: dict[str, _Place] = {}

    def product(self, product: Product) -> Tensor:
        out = product.run()
        if product.name in self._wires:
            total = out.numel() // out.shape[product.axis]
            rows = product.rows(out, self._batch.inputs)
            chosen = (
                torch.randperm(len(rows), generator=self._generator)[: self._batch.size * POSITIONS]
                .sort()
                .values
            )
            rows = rows[chosen.to(rows.device)]
            into = self._wires[product.name].sum
            if into is None:
                self._put(product, rows, product.outputs(out, rows), total)
            else:
                self._waiting[into.position] = (product, rows)
        return out

    def sum(self, position: int, operands: list[Tensor], in_place: bool) -> None:
        if position in self._waiting:
            product, rows = self._waiting.pop(position)
            first, second = (wide(product.outputs(operand, rows)) for operand in operands)
            self._put(product, rows, first + second, operands[0].numel() // operands[0].shape[product.axis])

    def _put(self, product: Product, rows: Tensor, values: Tensor, total: int) -> None:
        keep = product.kept_outputs(self._kept).to(values.device)
        self.places[product.name] = _Place(
            rows, first_half(rows, total, self._batch.size, self._batch.position), wide(values[:, keep])
        )


class _Refit:
    """One weight of the cut model: as it was, the sums so far, and the fit in use."""

    def __init__(self, tensors: Mapping[str, Tensor], product: Product, offset: Offset | None) -> None:
        self._weight, self._stored, self._offset = (
            product.weight,
            partial(product.without_input().stored, like=product.weight),
            offset,
        )
        self._constant = None if offset is None else tensors[offset.tensor]
        self._weight_before = product.matrix(float64(product.weight.detach()))  # [G, c, taps, q]
        self._constant_before = None if self._constant is None else float64(self._constant.detach())
        groups, channels, taps, outputs = self._weight_before.shape
        self._fit = Fit(
            torch.zeros(groups, channels * taps, outputs).to(self._weight_before),
            torch.zeros(groups, outputs).to(self._weight_before),
        )
        self._halves: tuple[Sums, Sums] | None = None
        self.choice: Choice | None = None
        self.size = channels * taps * max(channels * taps, outputs) * groups  # numbers in its sums

    @property
    def unseen_offset(self) -> Tensor:
        """What a running mean behind the output adds to it by now, [outputs]; a bias is in the output
        itself.
        """
        hidden = self._offset is not None and self._offset.sign < 0
        return self._fit.offset.flatten() if hidden else torch.zeros_like(self._fit.offset).flatten()

    def see(self, product: Product, place: _Place, error: Tensor) -> None:
        """Add rows: what the weight reads, and by how much its output, as it is now, misses, [rows,
        outputs].
        """
        features = wide(product.features(place.rows).flatten(2))  # [G, rows, p]
        groups = features.shape[0]
        now = features @ self._fit.slope.to(features) + self._fit.offset[:, None].to(features)
        missing = (
            error.unflatten(1, (groups, -1)).transpose(0, 1) + now
        )  # by the weight as it was: [G, rows, q]
        new = tuple(
            Sums.of(features[:, half], missing[:, half]) for half in (place.first_half, ~place.first_half)
        )
        self._halves = (
            (new[0], new[1]) if self._halves is None else (self._halves[0] + new[0], self._halves[1] + new[1])
        )

    def solve(self) -> None:
        """Put the best weight so far into the model."""
        assert self._halves is not None
        self.choice = choose(self._halves, self._offset is not None)
        self._fit = self.choice.fit or Fit(
            torch.zeros_like(self._fit.slope), torch.zeros_like(self._fit.offset)
        )
        with torch.no_grad():
            self._weight.copy_(
                self._stored(
                    self._weight_before + self._fit.slope.unflatten(1, self._weight_before.shape[1:3])
                )
            )
            if self._offset is not None and self._constant is not None and self._constant_before is not None:
                self._constant.copy_(self._constant_before + self._offset.sign * self._fit.offset.flatten())


class _Stretch:
    """The refits that are under way; a first batch adds to them until there is no room for another."""

    def __init__(self) -> None:
        self.refits: dict[str, _Refit] = {}
        self.full = False
        self._room = MOST_SUMS

    def at(self, name: str, make: Callable[[], _Refit]) -> _Refit | None:
        """The refit of the weight that is called now; None if it has no part in this stretch."""
        if not self.full and name not in self.refits:
            new = make()
            alone = new.size > MOST_SUMS  # no stretch has room for it: it is only named
            self.full = not alone and new.size > self._room
            if not self.full:
                self.refits[name] = new
                self._room -= 0 if alone else new.size
        found = self.refits.get(name)
        return found if found is not None and found.size <= MOST_SUMS else None


class _Follow(Walk):
    """Runs the cut model, refitting each weight as it is reached."""

    def __init__(
        self,
        small: nn.Module,
        wires: Mapping[str, Wire],
        places: Mapping[str, _Place],
        stretch: _Stretch,
        *,
        solve: bool,
    ) -> None:
        super().__init__(small)
        self._tensors, self._wires, self._places, self._stretch, self._solve = (
            tensors_by_name(small),
            wires,
            places,
            stretch,
            solve,
        )
        self._waiting: dict[int, tuple[Product, Tensor, Sum]] = {}

    def product(self, product: Product) -> Tensor:
        out = product.run()
        if product.name not in self._wires:
            return out
        wire = self._wires[product.name]
        one, place = (
            self._stretch.at(product.name, lambda: _Refit(self._tensors, product, wire.offset)),
            self._places[product.name],
        )
        if one is None:
            return out
        if wire.sum is not None:
            self._waiting[wire.sum.position] = (product, out, wire.sum)
            return out
        given = wide(product.outputs(out, place.rows))
        one.see(product, place, place.values - given - one.unseen_offset.to(given))
        if not self._solve:
            return out
        one.solve()
        return product.run()

    def sum(self, position: int, operands: list[Tensor], in_place: bool) -> None:
        if position not in self._waiting:
            return
        product, out, (_, side) = self._waiting.pop(position)
        one, place = self._stretch.refits[product.name], self._places[product.name]
        own, other = (wide(product.outputs(operands[s], place.rows)) for s in (side, 1 - side))
        slope, _ = straight_line(wide(product.outputs(out, place.rows)), own)  # [outputs]
        drift = place.values - own - other
        one.see(product, place, torch.where(slope != 0, drift / slope, 0.0))
        if not self._solve:
            return
        before = one.unseen_offset
        one.solve()
        shape = [-1 if axis == product.axis % out.ndim else 1 for axis in range(out.ndim)]
        change = product.run() - out + (one.unseen_offset - before).to(out).view(shape)
        change = change * slope.to(out).view(shape)
        operands[side] = operands[side].add_(change) if in_place and side == 0 else operands[side] + change
