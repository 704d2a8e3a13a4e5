"""The exact change of a batch's loss when one unit is removed: one forward pass for every unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from fairpruner.core.units import UnitSpace
from fairpruner.inputs.batches import Batch
from fairpruner.models.blocks import without_block
from fairpruner.models.observing import watching
from fairpruner.models.reads import Read
from fairpruner.models.routing import watching_experts
from fairpruner.models.silencing import without_expert
from fairpruner.scoring.demand import Watched
from fairpruner.scoring.objective import Objective


def loss_changes(
    model: nn.Module,
    watched: Watched,
    hooked: Mapping[Read, nn.Module],
    *,
    objective: Objective,
    batch: Batch,
) -> Callable[[UnitSpace, int], float]:
    """A function (space, unit) -> the change of the mean loss without that unit."""

    def loss_without(space: UnitSpace | None, unit: int) -> float:
        def zero_unit(read: Read, source: Tensor, axis: int) -> Tensor:
            if read.space is not space:
                return source
            kept = torch.from_numpy(read.owner(source.shape[axis]) != unit).to(source)  # [C]
            return (source.movedim(axis, -1) * kept).movedim(-1, axis)

        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(watching(watched.reads, zero_unit, hooked))
            # Fused experts show what their last matrices read only while our function runs them.
            stack.enter_context(watching_experts(model, watched.fused, lambda output: None))
            if space is not None and space.kind == "block":
                stack.enter_context(without_block(model, space, unit))
            if space is not None and space.kind == "expert":
                stack.enter_context(without_expert(model, space, unit))
            return float(objective.mean(objective.run(model, batch), batch))

    whole = loss_without(None, -1)
    return lambda space, unit: loss_without(space, unit) - whole
