"""Refit what the kept experts of a block, and a shared one, add to its output, so that the block gives what the original gave.

A block's output is linear in the last matrices of its experts: what they read, times the router's weight, are the features.
Blocks are refitted one after the other in the order of the forward pass, in a sweep over the data each, so that memory
holds the sums of one block. Where a block's output is added to a residual stream, the original's sum is the target:
the refit then also undoes the drift of the blocks before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import dropwhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..calling import tensors_of
from ..experts import ExpertBlock, expert_blocks
from ..inputs.batches import Batch, forward
from ..inputs.tokens import counted_rows
from ..routing import Call, watching_experts
from ..types import Plan
from .notes import Note
from .products import SUMS
from .regression import Sums, choose, first_half, wide
from .wiring import Wire

MOST_FEATURES = 8192  # of one block: more would make the products of all pairs too large
ROWS = 8192  # tokens whose features are held at once


def refit_experts(small: nn.Module, model: nn.Module, plan: Plan, sweep: Callable[[], Iterable[Batch]], wires: Mapping[str, Wire]) -> list[Note]:
    """Refit every block of experts in `small` from the first that lost some onwards."""
    lost = {space.name for space in plan.spaces if space.kind == "expert" and plan.removed[space.name]}
    blocks = dropwhile(lambda block: block.name not in lost, expert_blocks(small))
    return [_refit(small, model, block, sweep()) for block in blocks]


def _refit(small: nn.Module, model: nn.Module, block: ExpertBlock, batches: Iterable[Batch]) -> Note:
    halves: tuple[Sums, Sums] | None = None
    features = _Features(small, block)
    for batch in batches:
        target, here = _reach(model, block.name, batch), _reach(small, block.name, batch)
        error = (target.sum - here.sum if target.sum is not None and here.sum is not None else target.out - here.out).flatten(0, -2)  # [T, H]
        seen = features.of(here)
        if features.obstacle:
            return Note(block.name, "skipped", features.obstacle)
        rows = counted_rows(len(error), batch.inputs, block.name)
        first = first_half(rows, len(error), batch.size, batch.position)
        new = tuple(seen.sums(rows[half].to(error.device), error) for half in (first, ~first))
        halves = (new[0], new[1]) if halves is None else (halves[0] + new[0], halves[1] + new[1])
    assert halves is not None  # the data was seen to hold samples
    choice = choose(halves, with_offset=False)
    if choice.fit is not None:
        features.add(choice.fit.slope[0])
    return Note.of(block.name, choice)


@dataclass(frozen=True, eq=False)
class _Arrival:
    """What a block was called with, what it gave, and what became of that in the sum behind it."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Tensor
    sum: Tensor | None


class _Reached(BaseException):
    """Ends a forward pass of which no more is needed; no error, so that nothing on the way takes it for one."""


class _UpTo(TorchFunctionMode):
    """Runs a model as far as the sum into which a module's output goes."""

    def __init__(self) -> None:
        super().__init__()
        self.call: tuple[tuple[Any, ...], Mapping[str, Any], Tensor] | None = None
        self.sum: Tensor | None = None

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        self.call = args, kwargs, next(tensors_of(output))

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self.call is not None and function in SUMS and any(operand is self.call[2] for operand in args):
            self.sum = result
            raise _Reached
        return result


def _reach(model: nn.Module, path: str, batch: Batch) -> _Arrival:
    run = _UpTo()
    hook = model.get_submodule(path).register_forward_hook(run.leave, with_kwargs=True)
    try:
        with run:
            forward(model, batch)
    except _Reached:
        pass
    finally:
        hook.remove()
    assert run.call is not None
    return _Arrival(*run.call, run.sum)


@dataclass(frozen=True, eq=False)
class _Seen:
    """The features of one call of a block: those of the experts, sparse, and those of every tail."""

    pairs: tuple[Tensor, Tensor, Tensor]  # token [P], expert [P], features [P, I] of the pairs, or empty
    experts: int
    tails: Tensor  # [T, S]

    def sums(self, rows: Tensor, error: Tensor) -> Sums:
        """Products of all pairs of features, and with the error [T, H], over the chosen tokens."""
        parts = [self._sums(some, error[some]) for some in rows.split(ROWS)] or [self._sums(rows, error[rows])]
        return sum(parts[1:], parts[0])

    def _sums(self, rows: Tensor, error: Tensor) -> Sums:
        token, expert, values = self.pairs
        place = torch.full((len(self.tails),), -1, device=rows.device).index_copy(0, rows, torch.arange(len(rows), device=rows.device))
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
            len(rows), gram.double()[None], cross.double()[None], error.double().square().sum()[None], whole.double().sum(0)[None], error.double().sum(0)[None]
        )


class _Features:
    """What the last matrices of a block's experts and of its tails read, weighted as it reaches the block's output.

    A tail is a linear map beside the experts, as that of a shared expert, whose output is added to the block's, scaled token by token.
    """

    def __init__(self, model: nn.Module, block: ExpertBlock) -> None:
        self._model, self._block, self._module = model, block, model.get_submodule(block.name)
        inside = (f"{block.experts}.", f"{block.router}.")
        below = {f"{block.name}.{path}": module for path, module in self._module.named_modules()}
        self._linears = [m for path, m in below.items() if isinstance(m, nn.Linear) and not f"{path}.".startswith(inside)]
        self._tails: list[nn.Linear] = []
        self._with_experts = False
        self.obstacle = ""

    def of(self, arrival: _Arrival) -> _Seen:
        """Run the block once more by itself and see; gradients tell how much of each tail arrives at the output."""
        calls: list[Call] = []
        passed: dict[nn.Linear, tuple[Tensor, Tensor]] = {}

        def note(linear: nn.Linear, args: tuple[Any, ...], output: Tensor) -> None:
            passed[linear] = args[0].detach().flatten(0, -2), output

        hooks = [linear.register_forward_hook(note) for linear in self._linears]
        try:
            with torch.enable_grad(), watching_experts(self._model, [self._block], calls.append):
                out = next(tensors_of(self._module(*arrival.args, **arrival.kwargs))).flatten(0, -2)  # [T, H]
        finally:
            for hook in hooks:
                hook.remove()
        found = {linear: scale for linear, (_, output) in passed.items() if (scale := _scale(out, output)) is not None}
        self._tails = list(found)
        tails = torch.cat([out.detach()[:, :0], *(passed[linear][0] * scale[:, None] for linear, scale in found.items())], 1)  # [T, S]
        call = next(iter(calls), None)
        inner = None if call is None else call.inner
        width = 0 if inner is None else inner.shape[1]
        self._with_experts = 0 < self._block.size * width <= MOST_FEATURES - tails.shape[1]
        if not self._with_experts and not 0 < tails.shape[1] <= MOST_FEATURES:
            self.obstacle = "what its experts read is not seen, or is too much, and no shared expert can take over"
        if call is None or inner is None or not self._with_experts:
            nothing = torch.zeros(0, dtype=torch.int64, device=out.device)
            return _Seen((nothing, nothing, out.detach().new_zeros(0, 0)), 0, tails)
        return _Seen((call.token, call.expert, inner * call.weight[:, None]), self._block.size, tails)

    def add(self, slope: Tensor) -> None:
        """Add a fit [p, H] to the matrices."""
        with torch.no_grad():
            if self._with_experts:
                experts: Any = self._model.get_submodule(self._block.experts)
                weight = experts.down_proj
                turned = weight if experts.is_transposed else weight.mT  # [E, I, H]
                inside = turned.shape[0] * turned.shape[1]
                turned += slope[:inside].view(turned.shape).to(weight)
                slope = slope[inside:]
            for linear, part in zip(self._tails, slope.split([tail.in_features for tail in self._tails]), strict=True):
                linear.weight += part.T.to(linear.weight)


def _scale(out: Tensor, passed: Tensor) -> Tensor | None:
    """By what each token's output of a linear map is scaled in the block's, [T]; None if that is not all that happens to it."""
    if passed.shape[-1] != out.shape[-1] or passed.numel() != out.numel() or not passed.requires_grad:
        return None
    probe = torch.linspace(1, 2, out.shape[1], dtype=out.dtype, device=out.device)
    slopes = partial(torch.autograd.grad, out, passed, retain_graph=True, allow_unused=True)
    (ones,), (ramp,) = slopes(torch.ones_like(out)), slopes(probe.expand_as(out).contiguous())
    if ones is None or ramp is None:
        return None
    ones, ramp = ones.flatten(0, -2), ramp.flatten(0, -2)  # [T, H]
    scale: Tensor = ones[:, 0]
    return scale if torch.allclose(ones, scale[:, None].expand_as(ones)) and torch.allclose(ramp, scale[:, None] * probe) else None
