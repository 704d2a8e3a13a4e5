"""Refit what the kept experts of a block, and a shared one, add to its output, so that the block gives
what the original gave.

A block's output is linear in the last matrices of its experts: what they read, times the router's weight,
are the features. Blocks are refitted one after the other in the order of the forward pass, in a sweep
over the data each. Where a block's output is added to a residual stream, the original's sum is the
target: the refit then also undoes the drift of the blocks before. The matrices of a block are solved for
together if they fit, else part by part, each fitted to what those before it left over, so that memory
holds the sums of one part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import dropwhile
from typing import Any

import torch
from torch import Tensor, nn

from fairpruner.core.plan import Plan
from fairpruner.models.calling import tensors_of
from fairpruner.models.experts import ExpertBlock, expert_blocks
from fairpruner.models.routing import RouterOutput, watching_experts
from fairpruner.repair.arrivals import Arrival, Arrivals, Sweep, caller_of
from fairpruner.repair.notes import NO_EXPERTS, Note
from fairpruner.repair.regression import Sums, choose, float64, wide
from fairpruner.repair.wiring import Wire

MOST_FEATURES = 4096  # that are solved for together: the products of all their pairs are held
ROWS = 8192  # tokens whose features are held at once


def refit_experts(
    small: nn.Module, model: nn.Module, plan: Plan, sweep: Sweep, wires: Mapping[str, Wire]
) -> list[Note]:
    """Refit every block of experts in `small` from the first that lost some onwards."""
    lost = {space.name for space in plan.spaces if space.kind == "expert" and plan.removed[space.name]}
    blocks = dropwhile(lambda block: block.name not in lost, expert_blocks(small))
    return [_refit(small, model, block, sweep) for block in blocks] or [
        Note("experts", "skipped", NO_EXPERTS)
    ]


def _refit(small: nn.Module, model: nn.Module, block: ExpertBlock, sweep: Sweep) -> Note:
    arrivals = Arrivals(small, model, block, sweep)
    features = _Features(small, block, next(iter(arrivals)))
    if not features.sizes:
        return Note(
            block.name, "skipped", "what its experts read is not seen, and no shared expert can take over"
        )
    notes = [_fit(block.name, features, part, arrivals) for part in parts(features.sizes)]
    left = [note.error for note in notes if note.error is not None]
    return replace(
        next((note for note in notes if note.error is not None), notes[0]),
        error=math.prod(left) if left else None,
    )


def parts(sizes: Sequence[int]) -> list[range]:
    """Matrices with so many features each, in stretches of at most MOST_FEATURES together, or of a single
    one.

    >>> parts([1500, 1500, 1500, 5000, 4000])
    [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]
    """
    found, start = [], 0
    for stop in range(1, len(sizes) + 1):
        if stop == len(sizes) or sum(sizes[start : stop + 1]) > MOST_FEATURES:
            found.append(range(start, stop))
            start = stop
    return found


def _fit(block: str, features: _Features, part: range, arrivals: Arrivals) -> Note:
    """Fit one part of a block's matrices to what the block misses by now."""
    halves: tuple[Sums, Sums] | None = None
    for arrival in arrivals:
        seen, error = features.of(arrival, part)
        new = tuple(seen.sums(rows, error) for rows in arrival.halves)
        halves = (new[0], new[1]) if halves is None else (halves[0] + new[0], halves[1] + new[1])
    assert halves is not None  # the data was seen to hold samples
    choice = choose(halves, with_offset=False)
    if choice.fit is not None:
        features.add(part, choice.fit.slope[0])
    return Note.of(block, choice)


@dataclass(frozen=True, eq=False)
class _Seen:
    """The features of a part of a block: those of its experts, sparse, and those of its tails."""

    pairs: tuple[Tensor, Tensor, Tensor]  # token [P], expert [P], features [P, I] of the pairs, or empty
    experts: int
    tails: Tensor  # [T, S]

    def sums(self, rows: Tensor, error: Tensor) -> Sums:
        """Products of all pairs of features, and with the error [T, H], over the chosen tokens."""
        parts = [self._sums(some, error[some]) for some in rows.split(ROWS)] or [
            self._sums(rows, error[rows])
        ]
        return sum(parts[1:], parts[0])

    def _sums(self, rows: Tensor, error: Tensor) -> Sums:
        token, expert, values = self.pairs
        place = torch.full((len(self.tails),), -1, device=rows.device).index_copy(
            0, rows, torch.arange(len(rows), device=rows.device)
        )
        chosen = place[token] >= 0
        token, expert, values = place[token[chosen]], expert[chosen], wide(values[chosen])
        error, width = wide(error), values.shape[1]
        dense = error.new_zeros(len(rows), self.experts, width)
        dense[token, expert] = values
        whole = torch.cat([dense.flatten(1), wide(self.tails[rows])], 1)  # [rows, p]
        gram = whole.new_zeros(whole.shape[1], whole.shape[1])
        inside = self.experts * width
        for number in range(self.experts):  # each only with the tokens that it serves: a few of all
            own = expert == number
            gram[number * width : (number + 1) * width] = values[own].T @ whole[token[own]]
        gram[inside:] = whole[:, inside:].T @ whole
        cross = whole.T @ error
        return Sums(
            len(rows),
            *map(
                float64,
                (gram[None], cross[None], error.square().sum()[None], whole.sum(0)[None], error.sum(0)[None]),
            ),
        )


class _Features:
    """What the last matrices of a block's experts and of its tails read, weighted as it reaches the
    block's output.

    A tail is a linear map beside the experts, as that of a shared expert, whose output is added to the
    block's, scaled token by token.
    """

    def __init__(self, model: nn.Module, block: ExpertBlock, first: Arrival) -> None:
        self._model, self._block, self._module = model, block, model.get_submodule(caller_of(block))
        self._watched = (
            [] if isinstance(model.get_submodule(block.experts), nn.ModuleList) else [block]
        )  # whose experts show what their last matrices read
        inside = (f"{block.experts}.", f"{block.router}.")
        below = self._module.named_modules(prefix=caller_of(block))
        self._tails = [
            module
            for path, module in below
            if isinstance(module, nn.Linear) and not f"{path}.".startswith(inside)
        ]
        out, passed, call = self._run(first)
        self._tails = [linear for linear, (_, output) in passed.items() if _is_tail(out, output)]
        inner = None if call is None else call.inner
        self._experts = 0 if inner is None else block.size
        self.sizes = [0 if inner is None else inner.shape[1]] * self._experts + [
            tail.in_features for tail in self._tails
        ]  # of every matrix

    def _run(
        self, arrival: Arrival
    ) -> tuple[Tensor, dict[nn.Linear, tuple[Tensor, Tensor]], RouterOutput | None]:
        """Run the block once more by itself: its output [T, H], what goes into and comes out of the
        tails, and what the experts did.
        """
        calls: list[RouterOutput] = []
        passed: dict[nn.Linear, tuple[Tensor, Tensor]] = {}

        def note(linear: nn.Linear, args: tuple[Any, ...], output: Tensor) -> None:
            passed[linear] = args[0].detach().flatten(0, -2), output

        hooks = [linear.register_forward_hook(note) for linear in self._tails]
        try:
            with torch.enable_grad(), watching_experts(self._model, self._watched, calls.append):
                out = next(tensors_of(self._module(*arrival.args, **arrival.kwargs))).flatten(0, -2)
        finally:
            for hook in hooks:
                hook.remove()
        return out, passed, next(iter(calls), None)

    def of(self, arrival: Arrival, part: range) -> tuple[_Seen, Tensor]:
        """The features of some of the matrices, and by how much the block's output misses, [T, H];
        gradients tell how much of each tail arrives there.
        """
        out, passed, call = self._run(arrival)
        some = [
            passed[tail]
            for tail in self._tails[max(part.start - self._experts, 0) : max(part.stop - self._experts, 0)]
        ]
        scales = [
            torch.autograd.grad(out, output, torch.ones_like(out), retain_graph=True)[0].flatten(0, -2)[:, :1]
            for _, output in some
        ]  # [T, 1] each
        error = arrival.wanted - wide(out.detach())
        tails = torch.cat(
            [error[:, :0], *(read * scale for (read, _), scale in zip(some, scales, strict=True))], 1
        )  # [T, S]
        stop = min(part.stop, self._experts)
        if call is None or call.inner is None or part.start >= stop:
            nothing = torch.zeros(0, dtype=torch.int64, device=error.device)
            return _Seen((nothing, nothing, error.new_zeros(0, 0)), 0, tails), error
        ours = (call.expert >= part.start) & (call.expert < stop)
        pairs = call.token[ours], call.expert[ours] - part.start, call.inner[ours] * call.weight[ours, None]
        return _Seen(pairs, stop - part.start, tails), error

    def add(self, part: range, slope: Tensor) -> None:
        """Add a fit [p, H] to the part's matrices."""
        experts: Any = self._model.get_submodule(self._block.experts)
        for number, step in zip(
            part, slope.split([self.sizes[number] for number in part]), strict=True
        ):  # [I, H]
            if number >= self._experts:
                weight = self._tails[number - self._experts].weight.mT
            else:
                weight = experts.down_proj[number] if experts.is_transposed else experts.down_proj[number].mT
            weight += step.to(weight)


def _is_tail(out: Tensor, passed: Tensor) -> bool:
    """Whether all that happens to a linear map's output on its way into the block's [T, H] is a scale for
    each token.
    """
    if passed.shape[-1] != out.shape[-1] or passed.numel() != out.numel() or not passed.requires_grad:
        return False
    probe = torch.linspace(1, 2, out.shape[1], dtype=out.dtype, device=out.device)
    slopes = partial(torch.autograd.grad, out, passed, retain_graph=True, allow_unused=True)
    (ones,), (ramp,) = slopes(torch.ones_like(out)), slopes(probe.expand_as(out).contiguous())
    if ones is None or ramp is None:
        return False
    ones, ramp = ones.flatten(0, -2), ramp.flatten(0, -2)  # [T, H]
    scale = ones[:, :1]
    return torch.allclose(ones, scale.expand_as(ones)) and torch.allclose(ramp, scale * probe)
