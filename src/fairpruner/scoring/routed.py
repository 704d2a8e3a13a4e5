"""Tallies of routed experts: sums over the tokens of a batch for each expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fairpruner.errors import FairprunerError
from fairpruner.inputs.batches import Batch
from fairpruner.inputs.losses import token_losses
from fairpruner.inputs.tokens import counted_tokens
from fairpruner.models.experts import ExpertBlock
from fairpruner.models.routing import RouterOutput, loss_position_terms, slopes_of
from fairpruner.scoring.demand import Demand

Tallies = dict[str, dict[str, Tensor]]  # block -> quantity -> its sum over the batch's tokens, [E]


def check_signals(demand: Demand, routing: Sequence[RouterOutput], *, on_tokens: bool) -> None:
    """Refuse signals of experts that the loss or the experts of this model do not allow."""
    if demand.any_of("routed_gradients", "routed_losses"):
        for output in routing:
            if not output.gates:
                raise FairprunerError(
                    f"The experts of block {output.block.name!r} hold parameters outside of linear and norm"
                    " modules, so routed_taylor cannot follow them: give another protection signal for"
                    " experts, such as 'deletion'."
                )
    if demand.any_of("routed_losses") and not on_tokens:
        raise FairprunerError(
            "Signal 'routed_taylor_exact' needs the loss of every token, which only the default loss of a"
            " language model has: use protection='routed_taylor'."
        )


def not_shown(model: nn.Module, block: ExpertBlock) -> str:
    """Why a block that reported no routing is left out."""
    experts = type(model.get_submodule(block.experts)).__name__
    return (
        f"Block {block.name!r} calls its {experts} in a way that is not known, so its routing cannot be"
        f" observed: leave it out with skip={block.name!r} in discover, or score experts with removal='l2'"
        " and protection='deletion'."
    )


def tallies_of(routing: Sequence[RouterOutput], blocks: Sequence[ExpertBlock], batch: Batch) -> Tallies:
    """How often and with what weight the batch's tokens used each expert of each block."""
    tallies: Tallies = {}
    for output in routing:
        counted = counted_tokens(batch.inputs, batch.labels, output.block.name)
        if counted is None or counted.numel() != output.tokens:
            counted = torch.ones(output.tokens, dtype=torch.bool, device="cpu")
        for quantity, total in output.tally(counted.reshape(-1)).items():
            _add(tallies, output, quantity, total)
    for block in blocks:
        if block.name not in tallies:
            raise FairprunerError(
                f"Block {block.name!r} was not called in batch {batch.position}, so its experts cannot be"
                f" scored: give inputs that use it, or leave it out with skip={block.name!r}."
            )
    return tallies


def add_exact_terms(
    tallies: Tallies, routing: Sequence[RouterOutput], model_output: Any, batch: Batch
) -> None:
    """Add the terms of routed_taylor_exact, from one backward pass for every position of the texts."""
    losses = token_losses(model_output, batch)
    assert losses is not None  # check_signals has refused other losses
    for output, term in zip(routing, loss_position_terms(routing, losses), strict=True):
        _add(tallies, output, "exact_term", term)


def add_weighted_terms(
    tallies: Tallies,
    routing: Sequence[RouterOutput],
    gate_gradients: Sequence[Tensor | None],
    *,
    samples: int,
) -> None:
    """Add the terms of routed_taylor, from the gradients of the mean loss for the experts' gates."""
    for output, slopes in zip(routing, slopes_of(routing, gate_gradients), strict=True):
        # The gradient of the mean loss times the number of samples is the sum over the samples.
        _add(tallies, output, "weighted_term", output.by_expert(slopes * output.weight) * samples)


def _add(tallies: Tallies, output: RouterOutput, quantity: str, total: Tensor) -> None:
    sums = tallies.setdefault(output.block.name, {})
    sums[quantity] = sums[quantity] + total if quantity in sums else total
