"""First-order terms of every sample and unit, from the gradients of what weights read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fairpruner.inputs.batches import Batch
from fairpruner.models.precision import in_float32
from fairpruner.models.reads import Read
from fairpruner.models.routing import RouterOutput
from fairpruner.scoring.samples import rows_along, samples_of_rows


class GateInput(NamedTuple):
    """The input of a weight, as a tensor whose gradient comes from this weight alone."""

    read: Read
    tensor: Tensor
    axis: int


def gate_terms(
    gates: Sequence[GateInput],
    gradients: Sequence[Tensor | None],
    outputs: Sequence[RouterOutput],
    *,
    batch: Batch,
    scale: int,
) -> dict[str, Tensor]:
    """<activation, gradient> of every sample and unit, summed over all weights that read it: space -> [N, J].

    The gradients are those of the mean loss over `scale` samples. Times `scale` they are the gradients of
    each sample's loss.
    """
    terms: dict[str, Tensor] = {}
    expert_terms: dict[Read, list[Tensor]] = {}  # [rows, J] of every call of an expert
    for (read, gate, axis), gradient in zip(gates, gradients, strict=True):
        if gradient is None or not gate.numel():
            continue
        pair = (gate.detach(), gradient.detach())
        if read.expert:
            activation, slope = (rows_along(t, axis) for t in pair)
            activation, slope = (read.by_unit(t, -1, len(t)) for t in (activation, slope))
        else:
            activation, slope = (read.by_unit(t, axis, batch.size) for t in pair)  # [N, J, F]
        term = (in_float32(activation) * in_float32(slope)).sum(2) * scale
        if read.expert:
            expert_terms.setdefault(read, []).append(term)
        else:
            before = terms.get(read.space.name)
            terms[read.space.name] = term if before is None else before.to(term.device) + term
    for read, rows in expert_terms.items():
        term = torch.cat(rows)
        sample, _ = samples_of_rows(read, outputs, batch, len(term))
        sums = terms.get(read.space.name, term.new_zeros(batch.size, term.shape[1]))
        terms[read.space.name] = sums.to(term.device).index_add(0, sample, term)
    return terms
