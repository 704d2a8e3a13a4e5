"""Observing routed experts: which token was sent to which expert, with what router weight, and the output.

Blocks call their experts in three ways: transformers' fused experts, fused experts that see all tokens, and
lists of modules. Each way has its own observer, and all of them report the same `RouterOutput`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from fairpruner.models.calling import tensors_of
from fairpruner.models.experts import ExpertBlock
from fairpruner.models.reads import NotObservable
from fairpruner.models.routing.dense import DenseExperts
from fairpruner.models.routing.fused import running_fused
from fairpruner.models.routing.listed import ListedExperts, RecentTensors
from fairpruner.models.routing.outputs import (
    RouterOutput,
    RouterTensors,
    RouterVisitor,
    gates_of,
    loss_position_terms,
    probabilities,
    slopes_of,
)

__all__ = [
    "RouterOutput",
    "gates_of",
    "loss_position_terms",
    "probabilities",
    "slopes_of",
    "watching_experts",
]


def _raise(problem: NotObservable) -> None:
    raise problem


@contextmanager
def watching_experts(
    model: nn.Module,
    blocks: Sequence[ExpertBlock],
    visit: RouterVisitor,
    *,
    on_problem: Callable[[NotObservable], None] = _raise,
) -> Iterator[None]:
    """Inside, with gradients enabled, every forward pass calls `visit` with what each block's router did.

    `on_problem` is called for a block that combines its experts in an unknown way; by default it raises.
    """
    tensors: RouterTensors = {}
    fused: dict[Any, ExpertBlock] = {}
    recent = RecentTensors()
    with ExitStack() as stack:
        if any(isinstance(model.get_submodule(block.experts), nn.ModuleList) for block in blocks):
            stack.enter_context(recent)
        for block in blocks:
            experts = model.get_submodule(block.experts)
            caller = model.get_submodule(block.experts.rpartition(".")[0])
            router = model.get_submodule(block.router)
            if router is not caller:
                stack.callback(router.register_forward_hook(_keep_tensors(tensors, block)).remove)
            if isinstance(experts, nn.ModuleList):
                listed = ListedExperts(block, tensors, visit, recent=recent, on_problem=on_problem)
                listed.attach(stack, experts, caller)
            elif hasattr(experts, "is_transposed"):
                fused[experts] = block
            else:
                dense = DenseExperts(block, tensors, visit)
                dense.attach(stack, experts)
                stack.enter_context(dense)
        if fused:
            stack.enter_context(running_fused(fused, tensors, visit))
        yield


def _keep_tensors(tensors: RouterTensors, block: ExpertBlock) -> Callable[[nn.Module, Any, Any], None]:
    """A hook that keeps the router's tensors with one column for each expert."""

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        tensors[block.name] = [
            t.detach().reshape(-1, block.size)
            for t in tensors_of(output)
            if t.is_floating_point() and t.shape[-1] == block.size
        ]

    return leave
