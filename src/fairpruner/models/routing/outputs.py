"""What one call of a block of experts shows, and the exact first-order terms that its gates give.

**Gates.** An operation z = f(W, x) that is linear in its parameters W (a matrix product with its bias, the
scale of a norm) satisfies <dL/dW, W> = <dL/dz, z>, because f(g W, x) = g z for every number g. So a gate
g = 1 on the rows of z gets the gradient <dL/dz, z>, row by row. Summed over the operations of an expert,
this is each token's part of the expert's term in the paper's R-Score. No weight needs a gradient for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairpruner.models.devices import has_float64
from fairpruner.models.experts import ExpertBlock
from fairpruner.models.precision import in_float32, wide_dtype


@dataclass(frozen=True, eq=False)
class RouterOutput:
    """One call of a block: P pairs of a token and an expert. A pair of weight 0 was not chosen."""

    block: ExpertBlock
    tokens: int
    token: Tensor  # [P] of each pair
    expert: Tensor  # [P]
    weight: Tensor  # [P] router weights
    norm: Tensor  # [P] norms of what the pairs add to the block's output
    gates: tuple[Tensor, ...]  # ones, [P] together; empty if some parameters of the experts have no gate
    logits: Tensor | None  # [tokens, E] of the router
    # [P, I] the inputs of the experts' last matrices, if a pair's output is that product times its weight
    inner: Tensor | None = None

    def by_expert(self, values: Tensor) -> Tensor:
        """Values [P] summed over the pairs of each expert, [E]."""
        return self.by_group(values, torch.zeros_like(self.token), 1)[0]

    def by_group(self, values: Tensor, group: Tensor, groups: int) -> Tensor:
        """Values [P] summed over the pairs of each group and expert, [groups, E].

        `group` [P] is the group of each pair. The sums are returned on the CPU, because blocks may lie on
        several devices.
        """
        values, place = values.detach(), group * self.block.size + self.expert
        if not has_float64(values.device):
            values = values.cpu()
        sums = torch.zeros(groups * self.block.size, dtype=torch.float64, device=values.device)
        return sums.index_add_(0, place.to(values.device), values.double()).cpu().view(groups, -1)

    def tally(self, counted: Tensor) -> dict[str, Tensor]:
        """Sums over the `counted` tokens, bool [tokens], for each expert, [E]."""
        counted = counted.to(self.token.device)
        ours = counted[self.token] & (self.weight != 0)  # [P]
        sums = {
            "tokens": counted.sum().cpu().to(torch.float64)[None],
            "selected": self.by_expert(ours),
            "weight": self.by_expert(ours * self.weight),
            "output": self.by_expert(ours * self.norm),
        }
        if self.logits is not None:
            sums["softmax"] = probabilities(self.logits.detach())[counted].sum(0).cpu().to(torch.float64)
        return sums


def probabilities(logits: Tensor) -> Tensor:
    """The softmax of a router's logits, [tokens, E]; unchanged if the router already gave probabilities."""
    values = in_float32(logits)
    normalised = torch.allclose(values.sum(1), torch.ones_like(values[:, 0]), atol=1e-3)
    return values if normalised and bool((values >= 0).all()) else values.softmax(1)


class Gated(torch.autograd.Function):
    """The identity on [P, …]; a gate of ones [P] gets the gradient <dL/dvalue, value> of each row."""

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
    return torch.ones(rows, dtype=wide_dtype(like), device=like.device, requires_grad=True)


def gated(value: Tensor, gate: Tensor) -> Tensor:
    """`Gated` with types."""
    output: Tensor = Gated.apply(value, gate)  # type: ignore[no-untyped-call]
    return output


def loss_position_terms(outputs: Sequence[RouterOutput], losses: Tensor) -> list[Tensor]:
    """For each output the sum over all tokens t of g_t <gradient of t's loss, weights of the expert>, [E].

    g_t is the router weight of the token t. `losses` [N, T] are the losses of the tokens. No text depends on
    another, so one backward pass serves one position of all texts.
    """
    texts, length = losses.shape
    terms = [torch.zeros(output.block.size, dtype=torch.float64, device="cpu") for output in outputs]
    # [N, T, E] each
    weights = [
        output.by_group(output.weight, output.token, output.tokens).view(texts, length, -1)
        for output in outputs
    ]
    for position in range(length):
        if losses[:, position].any():
            found = torch.autograd.grad(
                losses[:, position].sum(), gates_of(outputs), retain_graph=True, allow_unused=True
            )
            slopes = slopes_of(outputs, found)
            for term, weight, output, slope in zip(terms, weights, outputs, slopes, strict=True):
                term += (weight[:, position] * output.by_group(slope, output.token // length, texts)).sum(0)
    return terms


def gates_of(outputs: Sequence[RouterOutput]) -> list[Tensor]:
    """The gates of all outputs, in order."""
    return [gate for output in outputs for gate in output.gates]


def slopes_of(outputs: Sequence[RouterOutput], gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """For each output, each pair's part of <gradient, weights of the expert>, [P].

    `gradients` are those of all gates, in the order of `gates_of`.
    """
    slopes = [
        torch.zeros_like(gate) if gradient is None else gradient
        for gate, gradient in zip(gates_of(outputs), gradients, strict=True)
    ]
    starts = itertools.accumulate((len(output.gates) for output in outputs), initial=0)
    return [
        torch.cat(slopes[start : start + len(output.gates)])
        for start, output in zip(starts, outputs, strict=False)
    ]


RouterVisitor = Callable[[RouterOutput], None]
# name of the block -> what its router module returned for every token and expert, [tokens, E] each
RouterTensors = dict[str, list[Tensor]]


def logits_in(tensors: RouterTensors, block: ExpertBlock, tokens: int, position: int = 0) -> Tensor | None:
    """The router's tensor at a position in its output, [tokens, E]; None if it gave none of this length."""
    found = tensors.get(block.name)
    return found[position] if found and len(found[position]) == tokens else None


def norms(output: Tensor) -> Tensor:
    """The Euclidean norm of each row, [P, …] -> [P], in at least float32."""
    rows: Tensor = torch.linalg.vector_norm(output.detach().flatten(1), dim=1, dtype=wide_dtype(output))
    return rows
