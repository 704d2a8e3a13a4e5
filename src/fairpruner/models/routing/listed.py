"""Experts in an `nn.ModuleList`, called by a block's own code, however that code chooses and weighs them.

The block must give each token a weighted sum of its experts' outputs. `weighted_sums` finds the weight and
the token of every row that an expert returned. The sum is the block's output, or, where a norm or a
projection follows it, the last tensor before the output that is such a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairpruner.models.calling import tensors_of
from fairpruner.models.experts import ExpertBlock
from fairpruner.models.reads import NotObservable
from fairpruner.models.routing.outputs import (
    RouterOutput,
    RouterTensors,
    RouterVisitor,
    gated,
    logits_in,
    new_gate,
    norms,
)
from fairpruner.models.routing.weighted_sums import trace_rows
from fairpruner.models.torch_calls import TorchCalls

# Modules whose outputs are linear in all their parameters together, so that a gate follows them exactly.
LINEAR = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Conv1d)


class RecentTensors(TorchCalls):
    """Keeps the tensors that were computed since the last call of an expert, until its block ends."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, Tensor] | None = None

    def start(self, first: Tensor) -> None:
        """Keep this tensor and those that follow."""
        self._tensors = {id(first): first}

    def stop(self) -> Iterator[Tensor]:
        """The kept tensors, the last one first; nothing is kept from now on."""
        found, self._tensors = self._tensors or {}, None
        return reversed(found.values())

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = function(*args, **kwargs)
        if self._tensors is not None:
            met = (tensor for tensor in tensors_of((args, result)) if tensor.requires_grad)
            self._tensors.update({id(tensor): tensor for tensor in met})
        return result


class _ExpertCall(NamedTuple):
    """One call of one expert on n tokens."""

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
        # Of the call of the block that runs now:
        self._calls: list[_ExpertCall] = []
        self._gate = torch.empty(0, device="cpu")  # of the expert that runs now
        self._all_tensors = True  # whether every expert returned one tensor
        # Of the block: whether a gate follows every parameter of its experts.
        self._all_gated = True

    def attach(self, stack: ExitStack, experts: nn.ModuleList, caller: nn.Module) -> None:
        """Put hooks on the experts and on the module that calls them, until the stack closes."""
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
        return gated(output, self._gate).clone()  # a copy, because an activation may change it in place

    def _after_expert(self, number: int, expert: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor):
            self._all_tensors = False
            return output
        self._calls.append(_ExpertCall(number, output, self._gate))
        shown = output.clone()
        self._recent.start(shown)
        return shown

    def _after_block(self, caller: nn.Module, args: Any, output: Any) -> None:
        calls = [call for call in self._calls if len(call.gate)]
        all_tensors = self._all_tensors
        self._calls, self._all_tensors = [], True  # ready for the block's next call
        before_output = self._recent.stop()
        if all_tensors and not calls:
            return
        found = self._router_output(calls, next(tensors_of(output)), before_output) if all_tensors else None
        if found is None:
            self._on_problem(self._problem())
        else:
            self._visit(found)

    def _router_output(
        self, calls: Sequence[_ExpertCall], output: Tensor, before_output: Iterable[Tensor]
    ) -> RouterOutput | None:
        """What the router did, if the block's output or a tensor before it is a sum of the experts' rows."""
        width = calls[0].output.shape[-1]
        tokens = output.numel() // output.shape[-1]
        sums = (
            tensor.reshape(tokens, width)
            for tensor in (output, *before_output)
            if tensor.shape[-1:] == (width,) and tensor.numel() == tokens * width
        )
        expert_outputs = [call.output for call in calls]
        traced = next((found for mixed in sums if (found := trace_rows(mixed, expert_outputs))), None)
        if traced is None:
            return None
        weight, token = traced
        expert = [torch.full_like(call.gate, call.expert, dtype=torch.int64) for call in calls]
        norm = [norms(call.output.reshape(len(call.gate), -1)) for call in calls]
        return RouterOutput(
            self._block,
            tokens,
            token,
            expert=torch.cat(expert),
            weight=weight,
            norm=torch.cat(norm) * weight.abs(),
            gates=tuple(call.gate for call in calls) if self._all_gated else (),
            logits=logits_in(self._tensors, self._block, tokens),
        )

    def _problem(self) -> NotObservable:
        name = self._block.name
        return NotObservable(
            name,
            f"Block {name!r} does not just add up its experts' outputs, weighted by its router, so its"
            f" routing cannot be observed: leave it out with skip={name!r} in discover, or score experts"
            " with removal='l2' and protection='deletion'.",
        )
