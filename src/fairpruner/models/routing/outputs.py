"""What is seen of one call of a block, and the exact first-order terms that gates take out of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairpruner.models.experts import ExpertBlock


@dataclass(frozen=True, eq=False)
class RouterOutput:
    """One call of a block: P pairs of a token and an expert; those of weight 0 were not chosen."""

    block: ExpertBlock
    tokens: int
    token: Tensor  # [P] of each pair
    expert: Tensor  # [P]
    weight: Tensor  # [P] router weights
    norm: Tensor  # [P] norms of what the pairs add to the block's output
    # ones, [P] together, whose gradients are each pair's part of <gradient, weights of the expert>; none
    # if
    # experts hide some
    gates: tuple[Tensor, ...]
    logits: Tensor | None  # [tokens, E] of the router
    # [P, I] what the last products of the experts read, where each pair's output is just that times its
    # weight
    inner: Tensor | None = None

    def by_expert(self, values: Tensor) -> Tensor:
        """Values [P] summed over the pairs of each expert, [E]."""
        return self.by_group(values, torch.zeros_like(self.token), 1)[0]

    def by_group(self, values: Tensor, group: Tensor, groups: int) -> Tensor:
        """Values [P] summed over the pairs of each group, given for each pair, and expert: [groups, E],
        on the CPU, since blocks may lie on several devices.
        """
        sums = torch.zeros(groups * self.block.size, dtype=torch.float64)
        return sums.index_add_(
            0, (group * self.block.size + self.expert).cpu(), values.detach().to("cpu", torch.float64)
        ).view(groups, -1)

    def tally(self, counted: Tensor) -> dict[str, Tensor]:
        """What the `counted` tokens, bool [tokens], sum up to for each expert."""
        counted = counted.to(self.token.device)
        ours = counted[self.token] & (self.weight != 0)  # [P]
        sums = {
            "tokens": counted.sum().to("cpu", torch.float64)[None],
            "selected": self.by_expert(ours),
            "weight": self.by_expert(ours * self.weight),
            "output": self.by_expert(ours * self.norm),
        }
        if self.logits is not None:
            sums["softmax"] = probabilities(self.logits.detach())[counted].sum(0).to("cpu", torch.float64)
        return sums


def probabilities(logits: Tensor) -> Tensor:
    """The softmax of a router's logits, [tokens, E]; some routers hand out probabilities already."""
    values = logits if logits.dtype == torch.float64 else logits.float()
    return (
        values
        if bool((values >= 0).all())
        and torch.allclose(values.sum(1), torch.ones_like(values[:, 0]), atol=1e-3)
        else values.softmax(1)
    )


class Gated(torch.autograd.Function):
    """The identity on [P, …], through which a gate of ones [P] gets the gradient <dL/dvalue, value> of
    each row.

    Whatever is linear in its parameters jointly, as a product with a bias, has <dL/dparameters,
    parameters> = <dL/dvalue, value>. So the gates of an expert's products, summed, are its term in the
    paper's R-Score, and no weight ever gets a gradient.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(value, gate)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        value, gate = ctx.saved_tensors
        width = value.numel() // max(1, len(gate))  # an expert may be called on no token at all
        rows, slopes = (t.reshape(len(gate), width).to(gate.dtype) for t in (value, gradients[0]))
        return gradients[0], torch.linalg.vecdot(rows, slopes)


def new_gate(rows: int, like: Tensor) -> Tensor:
    """Ones that can get a gradient, [rows], in at least float32."""
    return torch.ones(
        rows,
        dtype=torch.float64 if like.dtype == torch.float64 else torch.float32,
        device=like.device,
        requires_grad=True,
    )


def gated(value: Tensor, gate: Tensor) -> Tensor:
    output: Tensor = Gated.apply(value, gate)  # type: ignore[no-untyped-call]
    return output


def loss_position_terms(calls: Sequence[RouterOutput], losses: Tensor) -> list[Tensor]:
    """For each call the sum, [E], over all tokens of their router weight times <gradient of their own
    loss, weights of the expert>.

    `losses` [N, T] are those of the tokens; texts do not mix, so that one backward serves a position of
    all of them.
    """
    texts, length = losses.shape
    terms = [torch.zeros(call.block.size, dtype=torch.float64) for call in calls]
    weights = [
        call.by_group(call.weight, call.token, call.tokens).view(texts, length, -1) for call in calls
    ]  # [N, T, E] each
    for position in range(length):
        if losses[:, position].any():
            found = torch.autograd.grad(
                losses[:, position].sum(), gates_of(calls), retain_graph=True, allow_unused=True
            )
            for term, weight, call, slopes in zip(
                terms, weights, calls, slopes_of(calls, found), strict=True
            ):
                term += (weight[:, position] * call.by_group(slopes, call.token // length, texts)).sum(0)
    return terms


def gates_of(calls: Sequence[RouterOutput]) -> list[Tensor]:
    return [gate for call in calls for gate in call.gates]


def slopes_of(calls: Sequence[RouterOutput], gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """For each call its pairs' parts of <gradient, weights of the expert>, [P], from the gradients of all
    gates.
    """
    slopes = [
        torch.zeros_like(gate) if gradient is None else gradient
        for gate, gradient in zip(gates_of(calls), gradients, strict=True)
    ]
    starts = itertools.accumulate((len(call.gates) for call in calls), initial=0)
    return [
        torch.cat(slopes[start : start + len(call.gates)]) for start, call in zip(starts, calls, strict=False)
    ]


RouterVisitor = Callable[[RouterOutput], None]
# block -> what its router gave for every token and expert, [tokens, E] each
RouterTensors = dict[str, list[Tensor]]


def logits_in(heard: RouterTensors, block: ExpertBlock, tokens: int, position: int = 0) -> Tensor | None:
    found = heard.get(block.name)
    return found[position] if found and len(found[position]) == tokens else None


def norms(output: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(
        output.detach().flatten(1),
        dim=1,
        dtype=torch.float64 if output.dtype == torch.float64 else torch.float32,
    )
    return norms
