"""Experts that are modules of an `nn.ModuleList`, called by a block's own code, whatever it looks like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

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


class RecentTensors(TorchFunctionMode):
    """Remembers the tensors met since the last call of an expert, as long as the block goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, Tensor] | None = None

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if self.tensors is not None:
            self.tensors.update(
                {id(tensor): tensor for tensor in tensors_of((args, result)) if tensor.requires_grad}
            )
        return result


class ListedExperts:
    """A plain block with an `nn.ModuleList` of experts, which sums up their outputs weighted by the
    router.

    How the block chooses and weighs is its own affair: a backward from the sum to the experts' outputs,
    with the digits of each token's number as gradients, tells the token and the weight of every row. The
    sum is the block's own output, or else the last tensor before it, ahead of a norm or a projection,
    that is one.
    """

    # Their outputs are linear in their parameters jointly.
    LINEAR = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Conv1d)

    def __init__(
        self,
        block: ExpertBlock,
        heard: RouterTensors,
        visit: RouterVisitor,
        experts: nn.ModuleList,
        caller: nn.Module,
        since: RecentTensors,
    ) -> None:
        self._block, self._heard, self._visit, self._experts, self._caller = (
            block,
            heard,
            visit,
            experts,
            caller,
        )
        self._since = since
        self._rows: list[
            tuple[int, Tensor, Tensor]
        ] = []  # (expert, output [n, H], gate [n]) of each call of an expert
        self._gate = torch.empty(0)

    def attach(self, stack: ExitStack) -> None:
        holders = [
            module
            for module in self._experts.modules()
            if next(module.parameters(recurse=False), None) is not None
        ]
        self._exact = all(isinstance(module, self.LINEAR) for module in holders)
        for module in holders:
            stack.callback(module.register_forward_hook(self._product).remove)
        for number, expert in enumerate(self._experts):
            stack.callback(expert.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
            stack.callback(expert.register_forward_hook(partial(self._leave, number)).remove)
        stack.callback(self._caller.register_forward_hook(self._done).remove)

    def _enter(self, expert: nn.Module, args: Any, kwargs: Any) -> None:
        self._since.tensors = None
        source = next(tensors_of((args, kwargs)))
        self._gate = new_gate(source.shape[:-1].numel(), source)

    def _product(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return gated(output, self._gate).clone()  # a copy, since an activation may change it in place

    def _leave(self, number: int, expert: nn.Module, args: Any, output: Any) -> Tensor:
        if not isinstance(output, Tensor):
            raise self._unseen()
        self._rows.append((number, output, self._gate))
        shown = output.clone()
        self._since.tensors = {id(shown): shown}
        return shown

    def _done(self, caller: nn.Module, args: Any, output: Any) -> None:
        calls, self._rows = [row for row in self._rows if len(row[2])], []
        since, self._since.tensors = reversed((self._since.tensors or {}).values()), None
        if not calls:
            return
        last, width = next(tensors_of(output)), calls[0][1].shape[-1]
        tokens = last.numel() // last.shape[-1]
        sums = (
            tensor.reshape(tokens, width)
            for tensor in (last, *since)
            if tensor.shape[-1:] == (width,) and tensor.numel() == tokens * width
        )
        places = next(
            filter(None, (self._places(mixed, [values for _, values, _ in calls]) for mixed in sums)), None
        )
        if places is None:
            raise self._unseen()
        weight, token = places
        expert = torch.cat([torch.full_like(gate, number, dtype=torch.int64) for number, _, gate in calls])
        norm = torch.cat([norms(values.reshape(len(gate), -1)) for _, values, gate in calls]) * weight.abs()
        gates = tuple(gate for *_, gate in calls) if self._exact else ()
        self._visit(
            RouterOutput(
                self._block,
                tokens,
                token,
                expert,
                weight,
                norm,
                gates,
                logits_in(self._heard, self._block, tokens),
            )
        )

    def _places(self, mixed: Tensor, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        """The router weight and the token of every row of the experts' outputs, [P] each; None if they
        are not just weighted and added up.
        """
        tokens, width = mixed.shape
        if width < 3 or not mixed.requires_grad or any(values.shape[-1] != width for values in outputs):
            return None
        digits = (
            torch.arange(tokens, device=mixed.device)[:, None]
            >> torch.arange(max(tokens - 1, 1).bit_length(), device=mixed.device)
            & 1
        )  # [tokens, bits]
        token, done = torch.zeros(0, dtype=torch.int64), 0
        while done < digits.shape[1]:
            some = digits[:, done : done + width - 2]
            ones = digits.new_ones(tokens, 1)
            slopes = torch.cat([ones, some, ones.expand(-1, width - 1 - some.shape[1])], 1).to(
                mixed
            )  # [tokens, H]
            found = torch.autograd.grad(mixed, outputs, slopes, retain_graph=True, allow_unused=True)
            rows = torch.cat(
                [
                    (
                        slopes.new_full((1, width), torch.nan)
                        if gradient is None
                        else gradient.reshape(-1, width)
                    )
                    for gradient in found
                ]
            )  # [P, H]
            weight = rows[:, 0]
            if not torch.allclose(weight, rows[:, -1]):  # nor is it, where an expert has no part in it
                return None
            bits = (rows[:, 1 : 1 + some.shape[1]].abs() > weight.abs()[:, None] / 2).long()
            part = (bits << torch.arange(done, done + some.shape[1], device=bits.device)).sum(1)
            token, done = part if done == 0 else token + part, done + some.shape[1]
        return weight, token

    def _unseen(self) -> NotObservable:
        name = self._block.name
        return NotObservable(
            name,
            f"Block {name!r} does not just add up what its experts give, weighted by its router, so that"
            f" routing cannot be seen: leave it out with skip={name!r}, or score experts with removal='l2'"
            " and protection='deletion'.",
        )
