"""Seeing what routers and experts do: which token went to which expert, with what weight, and what came
of it.

Blocks call their experts in three ways, each with a watcher of its own. All of them hand over the same
`RouterOutput`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from fairpruner.models.calling import tensors_of
from fairpruner.models.experts import ExpertBlock
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


@contextmanager
def watching_experts(model: nn.Module, blocks: Sequence[ExpertBlock], visit: RouterVisitor) -> Iterator[None]:
    """Inside, with gradients enabled, every forward shows `visit` what each block of experts did;
    afterwards the model is as it was.
    """
    heard: RouterTensors = {}
    fused: dict[Any, ExpertBlock] = {}
    since = RecentTensors()
    with ExitStack() as stack:
        if any(isinstance(model.get_submodule(block.experts), nn.ModuleList) for block in blocks):
            stack.enter_context(since)
        for block in blocks:
            experts, caller = (
                model.get_submodule(block.experts),
                model.get_submodule(block.experts.rpartition(".")[0]),
            )
            if model.get_submodule(block.router) is not caller:
                stack.callback(
                    model.get_submodule(block.router).register_forward_hook(_hear(heard, block)).remove
                )
            if isinstance(experts, nn.ModuleList):
                ListedExperts(block, heard, visit, experts, caller, since).attach(stack)
            elif hasattr(experts, "is_transposed"):
                fused[experts] = block
            else:
                dense = DenseExperts(block, heard, visit)
                dense.attach(stack, experts)
                stack.enter_context(dense)
        if fused:
            stack.enter_context(running_fused(fused, heard, visit))
        yield


def _hear(heard: RouterTensors, block: ExpertBlock) -> Callable[[nn.Module, Any, Any], None]:
    def leave(module: nn.Module, args: Any, output: Any) -> None:
        heard[block.name] = [
            t.detach().reshape(-1, block.size)
            for t in tensors_of(output)
            if t.is_floating_point() and t.shape[-1] == block.size
        ]

    return leave
