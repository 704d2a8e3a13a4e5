"""Refit the weights of a cut model in the order they are called, against the original model run beside it.

Both models run over each batch once. A weight of the cut model reads X, its input there, with all the error
that earlier weights left. It is refitted so that X gives what the original gives in the same place. The
forward pass continues with the new weight. Sums over rows are kept from batch to batch, so each batch
improves all fits. If the sums of all weights do not fit into memory, one group of weights is refitted after
the other, in one sweep over the data each.

**Outputs that arrive at an addition.** Let the output y = X W of a weight be scaled and shifted channel by
channel (as by a batch norm) and added to a residual stream: z = s ∘ y + t + r. The original has z* there. A
refit towards the original's y* would leave the error of r. A refit towards z* undoes it: it asks for a
change d of y with

    s ∘ (y + d) + t + r = z*,     so     d = (z* - (s ∘ y + t) - r) / s.

Both operands of the addition are seen, (s ∘ y + t) and r. The scale s is the slope of the one over y. A
channel with s = 0 cannot change z and asks for nothing. Example: y = 2, s = 3, t = 1 and r = 4 give z = 11.
If the original has z* = 14, then d = (14 - 7 - 4) / 3 = 1, and indeed 3 · (2 + 1) + 1 + 4 = 14.

**Removed blocks.** The weight that adds to a stream before a removed residual block is fitted to the
original's stream behind that block: it takes over what the block added, as far as its features show.

**Texts.** The first token of a text is often a hundred times as large in the stream as all others (an
attention sink), so its squared error would be all that counts. The norm that reads the stream divides by this
size. So the error of each row of a stream is divided by the size of the original's row, |z*|.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import dropwhile

import torch
from torch import Tensor, nn

from fairpruner.core.plan import Plan
from fairpruner.inputs.batches import Batch, forward
from fairpruner.inputs.tokens import real_tokens
from fairpruner.models.experts import expert_lists
from fairpruner.models.precision import in_float32
from fairpruner.repair.interceptor import Interceptor
from fairpruner.repair.job import Job
from fairpruner.repair.notes import ROUTED, UNSEEN, USED_ELSEWHERE, Note
from fairpruner.repair.products import Product, Rows
from fairpruner.repair.refits import Refit, RefitGroup, RefitTarget
from fairpruner.repair.tensors import KeptByDim, kept_by_dim, tensors_by_name
from fairpruner.repair.weight_uses import WeightUse, channel_scale, find_weight_uses

POSITIONS = 32  # rows taken of each sample: neighbouring positions add little
TOKENS = 512  # the same for texts, whose neighbouring tokens differ


def refit(job: Job) -> list[Note]:
    """Refit every weight of the cut model from the first that lost units onwards."""
    # The two models may call different experts of a list, so their additions cannot be matched.
    if lists := expert_lists(job.model):
        return [Note(path, "skipped", ROUTED) for path in lists]
    batch = next(job.read())
    uses = find_weight_uses(job.model, batch)
    gone = _in_removed_blocks(job.plan) & set(uses)
    # Without a removed block, later additions of the cut model have other numbers.
    places = _Places.of(uses, find_weight_uses(job.small, batch) if gone else uses, gone)
    lost = _that_lost_inputs(job.plan) & set(tensors_by_name(job.small))
    notes = [Note(name, "skipped", UNSEEN) for name in sorted(lost - set(uses))]
    touched = lost | gone | places.moved
    from_first = dropwhile(lambda name: name not in touched, uses)
    obstacles = {name: _obstacle(uses[name]) for name in from_first if name in places.cut}
    notes += [Note(name, "skipped", reason) for name, reason in obstacles.items() if reason]
    return notes + _refit_in_groups(job, places, [name for name, reason in obstacles.items() if not reason])


def _in_removed_blocks(plan: Plan) -> set[str]:
    """The tensors of removed residual blocks."""
    return {
        part.tensor
        for space in plan.spaces
        for part in (space.slices if space.kind == "block" else ())
        if part.owner[0] in plan.removed[space.name]
    }


def _that_lost_inputs(plan: Plan) -> set[str]:
    """The tensors that read removed units."""
    return {part.tensor for s in plan.spaces if plan.removed[s.name] for part in s.slices_of("read")}


def _refit_in_groups(job: Job, places: _Places, names: Sequence[str]) -> list[Note]:
    """Refit these weights, as many in each sweep over the data as there is room for."""
    notes: list[Note] = []
    waiting = list(names)
    while waiting:
        group = _refit_group(job, places.only(set(waiting)))
        if not group:  # later samples take other branches of the model than the first ones
            return notes + [Note(name, "skipped", UNSEEN) for name in waiting]
        notes += [
            Note(name, "skipped", one.obstacle) if one.found is None else Note.of(name, one.found)
            for name, one in group.items()
        ]
        waiting = [name for name in waiting if name not in group]
    return notes


@dataclass(frozen=True, eq=False)
class _Places:
    """Where the outputs of the weights that are left arrive, in the original and in the cut model."""

    original: Mapping[str, WeightUse]
    cut: Mapping[str, WeightUse]
    moved: frozenset[str]  # those that take over what removed blocks added

    @staticmethod
    def of(original: Mapping[str, WeightUse], cut: Mapping[str, WeightUse], gone: set[str]) -> _Places:
        """From the uses in both models; `gone` are the weights of removed blocks."""
        behind = {
            use.addition.follows: use.addition
            for name, use in original.items()
            if name in gone and use.addition is not None
        }  # number of an addition -> that of the removed block behind it
        wanted, found, moved = {}, {}, set()
        for name in original.keys() & cut.keys():
            theirs, ours = original[name].addition, cut[name].addition
            if theirs is None or ours is None:
                theirs = ours = None
            while theirs is not None and theirs.number in behind:
                theirs = behind[theirs.number]
                moved.add(name)
            wanted[name] = replace(original[name], addition=theirs)
            found[name] = replace(cut[name], addition=ours)
        return _Places(wanted, found, frozenset(moved))

    def only(self, names: set[str]) -> _Places:
        """Those of some weights."""
        original, cut = (
            {name: use for name, use in uses.items() if name in names} for uses in (self.original, self.cut)
        )
        return _Places(original, cut, self.moved & names)


def _obstacle(use: WeightUse) -> str:
    """Why a weight is not refitted; "" if it is."""
    if not use.only_multiplies:
        return USED_ELSEWHERE
    return f"it is called {use.calls} times, and a refit fits one place" if use.calls > 1 else ""


def _refit_group(job: Job, places: _Places) -> dict[str, Refit]:
    """Refit the first of these weights in one sweep, as many as there is room for."""
    group, kept = RefitGroup(), kept_by_dim(job.plan)
    for count, (batch, last) in enumerate(_with_last(job.read()), start=1):
        original = _OriginalPass(job.model, places.original, kept, batch)
        with original:
            forward(job.model, batch)
        # Solving after 1, 2, 4, … batches is often enough: from one batch to the next a fit changes little.
        solve = _Solve.LAST if last else _Solve.NOW if count & (count - 1) == 0 else _Solve.LATER
        with _CutPass(job.small, places.cut, original.targets, group, solve):
            forward(job.small, batch)
        group.complete = True
    return group.refits


def _with_last(batches: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Batches, and whether each is the last."""
    iterator = iter(batches)
    held = next(iterator, None)
    while held is not None:
        following = next(iterator, None)
        yield held, following is None
        held = following


class _OriginalPass(Interceptor):
    """Takes the targets of all weights from the original model."""

    def __init__(
        self, model: nn.Module, uses: Mapping[str, WeightUse], kept: KeptByDim, batch: Batch
    ) -> None:
        super().__init__(model)
        self._uses, self._kept, self._batch = uses, kept, batch
        self._texts = real_tokens(batch.inputs) is not None
        self._generator = torch.Generator("cpu").manual_seed(batch.position)
        self._rows: dict[tuple[int, torch.device], tuple[Tensor, Rows]] = {}  # by the number of all rows
        self._arriving: dict[int, tuple[Product, Rows]] = {}  # by the number of the addition
        self.targets: dict[str, RefitTarget] = {}

    def product(self, product: Product) -> Tensor:
        out = product.run()
        if product.name in self._uses:
            rows = self._rows_of(product, out)
            addition = self._uses[product.name].addition
            if addition is None:
                self._take(product, rows, in_float32(product.outputs(out, rows)))
            else:
                self._arriving[addition.number] = product, rows
        return out

    def addition(self, number: int, operands: list[Tensor], in_place: bool) -> None:
        if number in self._arriving:
            product, rows = self._arriving.pop(number)
            one, other = (in_float32(product.outputs(operand, rows)) for operand in operands)
            self._take(product, rows, one + other, in_stream=True)

    def _rows_of(self, product: Product, out: Tensor) -> Rows:
        """The rows of an output to fit; they are the same for all outputs of one size, and computed once."""
        counted, size = product.counted(out, self._batch), out.numel() // out.shape[product.axis]
        known, rows = self._rows.get((size, out.device), (None, None))
        if known is None or rows is None or not torch.equal(known, counted):
            rows = product.split(out, self._chosen(counted), self._batch)
            self._rows[size, out.device] = counted, rows
        return rows

    def _chosen(self, rows: Tensor) -> Tensor:
        """About POSITIONS rows of an image, or TOKENS of a text: one is drawn from each of equal parts."""
        each = TOKENS if self._texts else POSITIONS
        wanted = min(len(rows), self._batch.size * each)
        random = torch.rand(wanted, generator=self._generator, dtype=torch.float64, device="cpu")
        places = (torch.arange(wanted, device="cpu") + random) * (len(rows) / max(wanted, 1))
        return rows[places.long().clamp_max(len(rows) - 1)]

    def _take(self, product: Product, rows: Rows, values: Tensor, *, in_stream: bool = False) -> None:
        keep = product.kept_outputs(self._kept).to(values.device)
        weights = None
        if in_stream and self._texts:
            square = values.square().mean(1)  # [rows]
            weights = 1 / square.clamp_min(torch.finfo(square.dtype).eps)
        self.targets[product.name] = RefitTarget(rows, values[:, keep], product.places, weights)


@dataclass(frozen=True, eq=False)
class _Arriving:
    """A weight whose output is on its way to an addition."""

    product: Product
    refit: Refit
    out: Tensor
    features: Tensor  # [G, rows, p], taken before anything can change the input in place
    outputs: Tensor  # [rows, outputs], the same for the output
    side: int


class _Solve(Enum):
    """Whether the weights are solved for in a batch."""

    LATER = 0
    NOW = 1
    LAST = 2


class _CutPass(Interceptor):
    """Runs the cut model, and refits each weight when it is called."""

    def __init__(
        self,
        small: nn.Module,
        uses: Mapping[str, WeightUse],
        targets: Mapping[str, RefitTarget],
        group: RefitGroup,
        solve: _Solve,
    ) -> None:
        super().__init__(small)
        self._tensors, self._uses, self._targets = tensors_by_name(small), uses, targets
        self._group, self._solve = group, solve
        self._arriving: dict[int, _Arriving] = {}  # by the number of the addition

    def product(self, product: Product) -> Tensor:
        use, target = self._uses.get(product.name), self._targets.get(product.name)
        if use is None or target is None:
            return product.run()
        refit = self._group.refit_of(product, self._tensors, use, target)
        if refit is None:
            return product.run()
        features = in_float32(product.features(target.rows).flatten(2))  # [G, rows, p]
        if use.addition is None:
            refit.add(features, target.values - refit.before(features), target)
            if self._solve is not _Solve.LATER:
                refit.solve(last=self._solve is _Solve.LAST)
            return product.run()
        out = product.run()
        outputs = in_float32(product.outputs(out, target.rows))
        arriving = _Arriving(product, refit, out, features, outputs, use.addition.side)
        self._arriving[use.addition.number] = arriving
        return out

    def addition(self, number: int, operands: list[Tensor], in_place: bool) -> None:
        arriving = self._arriving.pop(number, None)
        if arriving is None:
            return
        product, refit, side = arriving.product, arriving.refit, arriving.side
        target = self._targets[product.name]
        own, other = (in_float32(product.outputs(operands[s], target.rows)) for s in (side, 1 - side))
        scale = channel_scale(arriving.outputs, own)  # [outputs]
        missing = torch.where(scale != 0, (target.values - own - other) / scale, 0.0)
        missing += refit.change(arriving.features)  # the error of the unchanged weight
        refit.add(arriving.features, missing, target)
        if self._solve is _Solve.LATER:
            return
        hidden_before = refit.hidden_offset
        refit.solve(last=self._solve is _Solve.LAST)
        by_channel = [1] * arriving.out.ndim
        by_channel[product.axis] = -1
        change = product.run() - arriving.out
        change += (refit.hidden_offset - hidden_before).to(change).view(by_channel)
        change *= scale.to(change).view(by_channel)
        # An addition in place writes into its first operand, so this tensor itself must have the new value.
        operands[side] = operands[side].add_(change) if in_place and side == 0 else operands[side] + change
