"""Experts in an `nn.ModuleList`, called by a block's own code, however that code chooses and weighs them.

**How tokens and weights are found.** The block gives s_t = sum over its pairs p of token t of w_p y_p, where
y_p [H] is one row of an expert's output and w_p its router weight. A backward pass from s with a gradient
matrix G [tokens, H] therefore gives row p the gradient w_p G[t]. G is chosen so that its row t spells the
number t: first a 1, then the binary digits of t, then ones up to the last column.

Example: 4 tokens, H = 4. G[2] = [1, 0, 1, 1], since 2 has the digits 0, 1 (lowest first). An expert's row
that comes back as [0.3, 0, 0.3, 0.3] has the router weight 0.3 (column 0) and belongs to token 0*1 + 1*2 = 2.
The last column must repeat column 0; if it does not, the block does more than weigh and add. Numbers of more
than H - 2 digits take several backward passes.

s is the block's output, or else the last tensor before it that passes this test, where a norm or a
projection follows the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fairpruner.models.calling import tensors_of
from fairpruner.models.experts import ExpertBlock
from fairpruner.models.observing import NotObservable
from fairpruner.models.routing.outputs import (
    RouterOutput,
    RouterTensors,
    RouterVisitor,
    gated,
    logits_in,
    new_gate,
    norms,
)

# Modules whose outputs are linear in all their parameters together, so that a gate follows them exactly.
LINEAR = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Conv1d)


class RecentTensors(TorchFunctionMode):
    """Keeps the tensors met since the last call of an expert, until its block ends."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, Tensor] | None = None

    def start(self, first: Tensor) -> None:
        self._tensors = {id(first): first}

    def stop(self) -> Iterator[Tensor]:
        """What was met, the last tensor first; nothing is kept from now on."""
        found, self._tensors = self._tensors or {}, None
        return reversed(found.values())

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if self._tensors is not None:
            met = (tensor for tensor in tensors_of((args, result)) if tensor.requires_grad)
            self._tensors.update({id(tensor): tensor for tensor in met})
        return result


class _ExpertCall(NamedTuple):
    expert: int
    output: Tensor  # [n, H], or [N, T, H]
    gate: Tensor  # [n]


class ListedExperts:
    """Observes one block with an `nn.ModuleList` of experts, whose outputs it weighs and adds up."""

    def __init__(
        self,
        block: ExpertBlock,
        tensors: RouterTensors,
        visit: RouterVisitor,
        *,
        recent: RecentTensors,
        on_problem: Callable[[NotObservable], None],
    ) -> None:
        self._block, self._tensors, self._visit = block, tensors, visit
        self._recent, self._on_problem = recent, on_problem
        self._calls: list[_ExpertCall] = []
        self._gate = torch.empty(0)  # of the expert that runs now
        self._all_gated = True  # whether a gate follows every parameter of the experts
        self._all_tensors = True  # whether every expert returned one tensor

    def attach(self, stack: ExitStack, experts: nn.ModuleList, caller: nn.Module) -> None:
        holders = [m for m in experts.modules() if next(m.parameters(recurse=False), None) is not None]
        self._all_gated = all(isinstance(module, LINEAR) for module in holders)
        for module in holders:
            stack.callback(module.register_forward_hook(self._after_product).remove)
        for number, expert in enumerate(experts):
            stack.callback(expert.register_forward_pre_hook(self._before_expert, with_kwargs=True).remove)
            stack.callback(expert.register_forward_hook(partial(self._after_expert, number)).remove)
        stack.callback(caller.register_forward_hook(self._after_block).remove)

    def _before_expert(self, expert: nn.Module, args: Any, kwargs: Any) -> None:
        self._recent.stop()
        source = next(tensors_of((args, kwargs)))
        self._gate = new_gate(source.shape[:-1].numel(), source)

    def _after_product(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return gated(output, self._gate).clone()  # a copy, since an activation may change it in place

    def _after_expert(self, number: int, expert: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor):
            self._all_tensors = False
            return output
        self._calls.append(_ExpertCall(number, output, self._gate))
        shown = output.clone()
        self._recent.start(shown)
        return shown

    def _after_block(self, caller: nn.Module, args: Any, output: Any) -> None:
        calls, self._calls = [call for call in self._calls if len(call.gate)], []
        all_tensors, self._all_tensors = self._all_tensors, True
        recent = self._recent.stop()
        if not all_tensors:
            self._on_problem(self._problem())
            return
        if not calls:
            return
        last, width = next(tensors_of(output)), calls[0].output.shape[-1]
        tokens = last.numel() // last.shape[-1]
        sums = (
            tensor.reshape(tokens, width)
            for tensor in (last, *recent)
            if tensor.shape[-1:] == (width,) and tensor.numel() == tokens * width
        )
        outputs = [call.output for call in calls]
        traced = next((found for mixed in sums if (found := trace_rows(mixed, outputs))), None)
        if traced is None:
            self._on_problem(self._problem())
            return
        weight, token = traced
        size = [norms(call.output.reshape(len(call.gate), -1)) for call in calls]
        self._visit(
            RouterOutput(
                self._block,
                tokens,
                token,
                expert=torch.cat([torch.full_like(c.gate, c.expert, dtype=torch.int64) for c in calls]),
                weight=weight,
                norm=torch.cat(size) * weight.abs(),
                gates=tuple(call.gate for call in calls) if self._all_gated else (),
                logits=logits_in(self._tensors, self._block, tokens),
            )
        )

    def _problem(self) -> NotObservable:
        name = self._block.name
        return NotObservable(
            name,
            f"Block {name!r} does not just add up its experts' outputs, weighted by its router, so its"
            f" routing cannot be observed: leave it out with skip={name!r} in discover, or score experts"
            " with removal='l2' and protection='deletion'.",
        )


def trace_rows(mixed: Tensor, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """The router weight and the token of every row of the experts' outputs, [P] each, if `mixed`
    [tokens, H] is their weighted sum; None if it is not.

    >>> rows = torch.randn(3, 4, requires_grad=True)
    >>> weighted = rows * torch.tensor([[0.3], [0.5], [2.0]])
    >>> mixed = torch.zeros(5, 4).index_add(0, torch.tensor([4, 0, 4]), weighted)
    >>> weight, token = trace_rows(mixed, [rows])
    >>> token.tolist()
    [4, 0, 4]
    """
    tokens, width = mixed.shape
    if width < 3 or not mixed.requires_grad or any(output.shape[-1] != width for output in outputs):
        return None
    bits = max(tokens - 1, 1).bit_length()
    numbers = torch.arange(tokens, device=mixed.device)[:, None]
    token = torch.zeros(0, dtype=torch.int64)
    for first in range(0, bits, width - 2):
        shifts = torch.arange(first, min(first + width - 2, bits), device=mixed.device)
        slopes = mixed.new_ones(tokens, width)
        slopes[:, 1 : 1 + len(shifts)] = (numbers >> shifts & 1).to(slopes)
        found = torch.autograd.grad(mixed, outputs, slopes, retain_graph=True, allow_unused=True)
        # NaN for an expert that the sum does not depend on: the test below then fails, as it should.
        missing = slopes.new_full((1, width), torch.nan)
        rows = torch.cat(
            [missing if slope is None else slope.reshape(-1, width) for slope in found]
        )  # [P, H]
        weight = rows[:, 0]
        if not torch.allclose(weight, rows[:, -1]):
            return None
        digits = (rows[:, 1 : 1 + len(shifts)].abs() > weight.abs()[:, None] / 2).long()
        part = (digits << shifts).sum(1)
        token = part if first == 0 else token + part
    return weight, token
