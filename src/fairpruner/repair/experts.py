"""Refit what the kept experts of a block, and a shared one, add to its output.

A block's output is linear in the last matrices of its experts. Expert e reads h_e(x), its inner features of
a token x, and the router weighs it by w_e(x). The block returns the sum of w_e(x) · h_e(x) · D_e over the
chosen experts, so w_e(x) · h_e(x) are the features of D_e, and 0 for tokens that expert e does not serve. A
shared expert is one more matrix of this kind.

Blocks are refitted one after the other in the order of the forward pass, in one sweep over the data each.
The target is what the block should return so that the model continues as the original (see `block_calls`).

The matrices of a block are numbered, experts first. They are solved for together if they have at most
MOST_FEATURES features, else part by part, each fitted to what the parts before left over. Example: three
experts of 1,500 features and a shared one of 5,000 are the matrices 0, 1, 2 and 3. With at most 4,096
features the parts are the experts 0 and 1, the expert 2, and the shared one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import dropwhile
from typing import Any

import torch
from torch import Tensor, nn

from fairpruner.models.calling import tensors_of
from fairpruner.models.experts import ExpertBlock, expert_blocks
from fairpruner.models.precision import forget_casts, in_float32, without_autocast
from fairpruner.models.routing import RouterOutput, watching_experts
from fairpruner.models.torch_private import multiplied
from fairpruner.repair.block_calls import BlockCall, BlockCalls, caller_of
from fairpruner.repair.job import Job
from fairpruner.repair.notes import NO_EXPERTS, Note
from fairpruner.repair.regression import Halves, NormalEquations, float64, judged_fit

MOST_FEATURES = 4096  # that are solved for together: the products of all their pairs are held
TOKENS = 8192  # whose features are held at once


def refit_experts(job: Job) -> list[Note]:
    """Refit every block of experts in the cut model from the first that lost some onwards."""
    plan = job.plan
    lost = {space.name for space in plan.spaces if space.kind == "expert" and plan.removed[space.name]}
    blocks = dropwhile(lambda block: block.name not in lost, expert_blocks(job.model))
    present = {path for path, _ in job.small.named_modules()}  # a removed layer has no experts
    notes = [
        _refit_block(job, replace(block, size=plan.kept.get(block.name, block.size)))
        for block in blocks
        if block.experts in present
    ]
    return notes or [Note("experts", "skipped", NO_EXPERTS)]


def _refit_block(job: Job, block: ExpertBlock) -> Note:
    calls = BlockCalls(job, block)
    matrices = _LastMatrices(job.small, block, next(iter(calls)))
    if not matrices.sizes:
        reason = "what its experts read is not seen, and no shared expert can take over"
        return Note(block.name, "skipped", reason)
    notes = [
        _refit_part(block.name, matrices, part, calls) for part in parts(matrices.sizes, matrices.experts)
    ]
    repaired = [note for note in notes if note.error is not None]
    if not repaired:
        return notes[0]
    return replace(repaired[0], error=math.prod(note.error or 0.0 for note in repaired))


@dataclass(frozen=True)
class SolvedTogether:
    """Matrices of a block that are solved for together: some of its experts, and some of its tails."""

    experts: range
    tails: range


def parts(sizes: Sequence[int], experts: int) -> list[SolvedTogether]:
    """Matrices with so many features each, the `experts` first, in runs of at most MOST_FEATURES features.

    A matrix with more features is a part alone.

    >>> parts([1500, 1500, 1500, 5000], experts=3)
    ... # doctest: +NORMALIZE_WHITESPACE
    [SolvedTogether(experts=range(0, 2), tails=range(0, 0)),
     SolvedTogether(experts=range(2, 3), tails=range(0, 0)),
     SolvedTogether(experts=range(3, 3), tails=range(0, 1))]
    """
    found, start = [], 0
    for stop in range(1, len(sizes) + 1):
        if stop == len(sizes) or sum(sizes[start : stop + 1]) > MOST_FEATURES:
            inside = range(min(start, experts), min(stop, experts))
            beside = range(max(start - experts, 0), max(stop - experts, 0))
            found.append(SolvedTogether(inside, beside))
            start = stop
    return found


def _refit_part(block: str, matrices: _LastMatrices, part: SolvedTogether, calls: BlockCalls) -> Note:
    """Fit some of a block's matrices to what the block's output misses by now."""
    halves: Halves | None = None
    for call in calls:
        features, missing = matrices.features(call, part)
        new = Halves(*(features.equations(rows, missing) for rows in (call.fitted, call.judging)))
        if halves is None:
            halves = new
        else:
            halves += new
    assert halves is not None  # the data was seen to hold samples
    found = judged_fit(halves, with_offset=False)
    if found.fit is not None:
        matrices.add(part, found.fit.slope[0])
    return Note.of(block, found)


@dataclass(frozen=True, eq=False)
class _Features:
    """The features of a part in one batch: of P pairs of token and expert, and of the tails for T tokens."""

    token: Tensor  # [P]
    expert: Tensor  # [P], counted from the part's first
    values: Tensor  # [P, I]
    experts: int
    tails: Tensor  # [T, S]

    def equations(self, rows: Tensor, missing: Tensor) -> NormalEquations:
        """The normal equations that fit what the output misses, [T, H], for the chosen tokens."""
        chunks = rows.split(TOKENS) or (rows,)
        with without_autocast(missing.device):
            found = [self._equations(chunk, missing[chunk]) for chunk in chunks]
        return sum(found[1:], found[0])

    def _equations(self, rows: Tensor, missing: Tensor) -> NormalEquations:
        row_of_token = torch.full((len(self.tails),), -1, device=rows.device)
        row_of_token[rows] = torch.arange(len(rows), device=rows.device)
        chosen = row_of_token[self.token] >= 0
        row, expert = row_of_token[self.token[chosen]], self.expert[chosen]
        values, missing = in_float32(self.values[chosen]), in_float32(missing)
        width = values.shape[1]
        dense = missing.new_zeros(len(rows), self.experts, width)
        dense[row, expert] = values
        features = torch.cat([dense.flatten(1), in_float32(self.tails[rows])], 1)  # [rows, p]
        gram = features.new_zeros(features.shape[1], features.shape[1])
        for number in range(self.experts):  # each expert has features for the few tokens that it serves
            own = expert == number
            gram[number * width : (number + 1) * width] = multiplied(values[own].T, features[row[own]])
        beside = self.experts * width
        gram[beside:] = multiplied(features[:, beside:].T, features)
        return NormalEquations(
            len(rows),
            gram=float64(gram[None]),
            cross=float64(multiplied(features.T, missing)[None]),
            square=float64(missing.square().sum(0)[None]),
            features=float64(features.sum(0)[None]),
            targets=float64(missing.sum(0)[None]),
        )


class _LastMatrices:
    """The last matrices of a block's experts, and its tails.

    A tail is a linear map beside the experts, such as the last one of a shared expert. Its output is added
    to the block's, scaled token by token.
    """

    def __init__(self, model: nn.Module, block: ExpertBlock, first: BlockCall) -> None:
        self._model, self._block, self._module = model, block, model.get_submodule(caller_of(block))
        # The experts of a list do not show what their last matrices read.
        listed = isinstance(model.get_submodule(block.experts), nn.ModuleList)
        self._watched = [] if listed else [block]
        routed = (f"{block.experts}.", f"{block.router}.")
        self._tails = [
            module
            for path, module in self._module.named_modules(prefix=caller_of(block))
            if isinstance(module, nn.Linear) and not f"{path}.".startswith(routed)
        ]
        run = self._run(first)
        self._tails = [tail for tail in run.outputs if _is_tail(run.out, run.outputs[tail])]
        inner = None if run.router is None else run.router.inner
        self.experts = 0 if inner is None else block.size
        width = 0 if inner is None else inner.shape[1]
        self.sizes = [width] * self.experts + [tail.in_features for tail in self._tails]

    def features(self, call: BlockCall, part: SolvedTogether) -> tuple[_Features, Tensor]:
        """The features of a part, and what the block's output misses, [T, H]."""
        run = self._run(call)
        missing = call.target - in_float32(run.out.detach())
        scaled = [missing[:, :0]]
        for tail in (self._tails[number] for number in part.tails):
            # The gradient of the block's output shows by how much the tail was scaled.
            (slope,) = torch.autograd.grad(
                run.out, run.outputs[tail], torch.ones_like(run.out), retain_graph=True
            )
            scaled.append(run.inputs[tail] * slope.flatten(0, -2)[:, :1])
        tails = torch.cat(scaled, 1)  # [T, S]
        router = run.router
        if router is None or router.inner is None or not part.experts:
            none = torch.zeros(0, dtype=torch.int64, device=missing.device)
            return _Features(none, none, missing.new_zeros(0, 0), 0, tails), missing
        ours = (router.expert >= part.experts.start) & (router.expert < part.experts.stop)
        ours &= router.weight != 0  # a removed expert with a constant is a second call of expert 0, weight 0
        values = router.inner[ours] * router.weight[ours, None]
        expert = router.expert[ours] - part.experts.start
        return _Features(router.token[ours], expert, values, len(part.experts), tails), missing

    def add(self, part: SolvedTogether, slope: Tensor) -> None:
        """Add a fit [p, H] to the part's matrices."""
        experts: Any = self._model.get_submodule(self._block.experts)
        weights = [
            experts.down_proj[number] if experts.is_transposed else experts.down_proj[number].mT
            for number in part.experts
        ]
        weights += [self._tails[number].weight.mT for number in part.tails]
        for weight, change in zip(weights, slope.split([len(weight) for weight in weights]), strict=True):
            weight += change.to(weight)  # [I, H]
        forget_casts()

    def _run(self, call: BlockCall) -> _BlockRun:
        """Run the block alone, with gradients."""
        routers: list[RouterOutput] = []
        inputs: dict[nn.Linear, Tensor] = {}
        outputs: dict[nn.Linear, Tensor] = {}

        def keep(linear: nn.Linear, args: tuple[Any, ...], output: Tensor) -> None:
            inputs[linear], outputs[linear] = args[0].detach().flatten(0, -2), output

        with ExitStack() as stack:
            for linear in self._tails:
                stack.enter_context(linear.register_forward_hook(keep))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(watching_experts(self._model, self._watched, routers.append))
            out = next(tensors_of(self._module(*call.args, **call.kwargs))).flatten(0, -2)
        return _BlockRun(out, inputs, outputs, routers[0] if routers else None)


@dataclass(frozen=True, eq=False)
class _BlockRun:
    """One run of a block: its output, inputs and outputs of its linear maps, and what the router did."""

    out: Tensor  # [T, H]
    inputs: dict[nn.Linear, Tensor]  # [T, S] each
    outputs: dict[nn.Linear, Tensor]
    router: RouterOutput | None


def _is_tail(out: Tensor, output: Tensor) -> bool:
    """Whether a linear map's output is only scaled, token by token, on its way into the block's, [T, H].

    Then the derivative of the sum of all outputs is the scale in every channel, and that of a sum with
    weights is the scale times these weights.
    """
    if output.shape[-1] != out.shape[-1] or output.numel() != out.numel() or not output.requires_grad:
        return False
    weights = torch.linspace(1, 2, out.shape[1], dtype=out.dtype, device=out.device)
    derivative = partial(torch.autograd.grad, out, output, retain_graph=True, allow_unused=True)
    (plain,), (weighted,) = derivative(torch.ones_like(out)), derivative(weights.expand_as(out).contiguous())
    if plain is None or weighted is None:
        return False
    plain, weighted = (in_float32(gradient.flatten(0, -2)) for gradient in (plain, weighted))  # [T, H]
    scale = plain[:, :1]
    rounding = max(1e-5, *(4 * torch.finfo(tensor.dtype).eps for tensor in (out, output)))
    same = partial(torch.allclose, rtol=rounding)
    return same(plain, scale.expand_as(plain)) and same(weighted, scale * weights.to(scale))
