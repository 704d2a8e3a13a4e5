"""The fused experts of transformers, run by our own function, which sees every pair of token and expert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
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
from fairpruner.models.transformers_private import apply_gate, experts_implementation, experts_run_by


@contextmanager
def running_fused(
    fused: Mapping[Any, ExpertBlock], tensors: RouterTensors, visit: RouterVisitor
) -> Iterator[None]:
    """Inside, transformers calls our `run` for fused experts.

    It gets hidden states [T, H], and the chosen experts and their router weights, [T, k] each.
    """

    def run(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        order = chosen.reshape(-1).argsort(stable=True)  # [P] pairs, those of one expert together
        expert, weight = chosen.reshape(-1)[order], weights.reshape(-1)[order]
        token = order // chosen.shape[1]
        counts = torch.bincount(expert, minlength=len(experts.down_proj)).tolist()
        gate = new_gate(len(order), hidden)
        first = "gate_up_proj" if experts.has_gate else "up_proj"
        up = gated(_products(experts, first, hidden[token], counts), gate)  # [P, I or 2 I]
        inner = apply_gate(experts, up) if experts.has_gate else experts.act_fn(up)  # [P, I]
        if has_torch_function((inner,)):  # show observers the hidden units, in the order of tokens
            down = experts.down_proj.mT if experts.is_transposed else experts.down_proj
            inner = consumed(inner[order.argsort()], down)[order]
        output = gated(_products(experts, "down_proj", inner, counts), gate)  # [P, H]
        normed = getattr(experts, "has_post_expert_norm", False)  # transformers 5.18 does not have it
        if normed:
            output = experts.post_expert_norm(output)
        output = output * weight[:, None]
        if experts in fused:
            block = fused[experts]
            visit(
                RouterOutput(
                    block,
                    len(hidden),
                    token,
                    expert,
                    weight=weight.detach(),
                    norm=norms(output),
                    gates=(gate,),
                    logits=logits_in(tensors, block, len(hidden)),
                    inner=None if normed else inner.detach(),
                )
            )
        return torch.zeros_like(hidden).index_add(0, token, output.to(hidden.dtype))

    with experts_implementation(run) as ours, experts_run_by(ours, [experts.config for experts in fused]):
        yield


def _products(experts: Any, name: str, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """The experts' matrices applied to their rows, [P, in] -> [P, out].

    The first `counts[0]` rows belong to expert 0, the next `counts[1]` rows to expert 1, …
    """
    weights: Tensor = getattr(experts, name)  # [E, out, in], or the other way round
    biases = getattr(experts, f"{name}_bias") if experts.has_bias else [None] * len(weights)
    parts = zip(
        rows.to(weights.dtype).split(counts),
        weights.mT if experts.is_transposed else weights,
        biases,
        strict=True,
    )
    return torch.cat([F.linear(own, weight, bias) for own, weight, bias in parts if len(own)])
