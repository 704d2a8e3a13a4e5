"""Fused experts that each compute all tokens, as in Llama 4."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import has_torch_function

from fairpruner.models.experts import ExpertBlock
from fairpruner.models.observing import consumed
from fairpruner.models.routing.outputs import (
    RouterOutput,
    RouterTensors,
    RouterVisitor,
    gated,
    logits_in,
    new_gate,
    norms,
)
from fairpruner.models.torch_calls import TorchCalls


class DenseExperts(TorchCalls):
    """Observes experts that compute batched products of all tokens, [E * T, H].

    The router has multiplied these inputs by its weights before.
    """

    def __init__(self, block: ExpertBlock, tensors: RouterTensors, visit: RouterVisitor) -> None:
        super().__init__()
        self._block, self._tensors, self._visit = block, tensors, visit
        self._weights: set[int] = set()
        self._gate = torch.empty(0, device="cpu")

    def attach(self, stack: ExitStack, experts: nn.Module) -> None:
        """Put hooks on the experts, until the stack closes."""
        self._weights = {id(parameter) for parameter in experts.parameters()}
        stack.callback(experts.register_forward_pre_hook(self._enter).remove)
        stack.callback(experts.register_forward_hook(self._leave).remove)

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if function is not torch.bmm or id(args[1]) not in self._weights:
            return function(*args, **kwargs)
        rows, weight = args
        if has_torch_function((rows,)):
            in_token_order = rows.transpose(0, 1).flatten(0, 1)  # [T * E, I]
            seen = consumed(in_token_order, weight.mT)
            rows = seen.unflatten(0, (-1, self._block.size)).transpose(0, 1)  # [E, T, I]
        return gated(torch.bmm(rows, weight), self._gate)

    def _enter(self, experts: nn.Module, args: Any) -> None:
        self._gate = new_gate(len(args[0]), args[0])

    def _leave(self, experts: nn.Module, args: Any, output: Tensor) -> None:
        tokens = len(args[0]) // self._block.size
        weights = logits_in(self._tensors, self._block, tokens)
        logits = logits_in(self._tensors, self._block, tokens, -1)
        if len(args) > 1 or weights is None or len(args[0]) != weights.numel():
            return
        pair = torch.arange(weights.numel(), device=weights.device)
        self._visit(
            RouterOutput(
                self._block,
                tokens,
                token=pair % tokens,
                expert=pair // tokens,
                weight=weights.T.reshape(-1),
                norm=norms(output),
                gates=(self._gate,),
                logits=logits,
            )
        )
