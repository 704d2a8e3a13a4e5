"""Merge every removed expert into the kept one whose row of the router is most like its own.

A kept expert moves towards the mean of itself and of those that it takes in. How far, is up to the data:
each block, in the order of the forward pass, goes the share of the way that brings it nearest to what it
should give.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fairpruner.core.plan import Plan
from fairpruner.models.calling import tensors_of
from fairpruner.models.experts import ExpertBlock, expert_blocks, is_route
from fairpruner.repair.arrivals import Arrivals, Sweep, caller_of
from fairpruner.repair.notes import NO_EXPERTS, Note
from fairpruner.repair.regression import float64, wide
from fairpruner.repair.wiring import Wire

SHARES = (
    0.0,
    0.1,
    0.2,
    0.35,
    0.5,
    1.0,
)  # of the way; all of it is mostly too far, since two experts have little in common


def merge_experts(
    small: nn.Module, model: nn.Module, plan: Plan, sweep: Sweep, wires: Mapping[str, Wire]
) -> list[Note]:
    """Merge the removed experts of every block into the kept ones of `small`."""
    removed = {
        space.name: torch.tensor(plan.removed[space.name])
        for space in plan.spaces
        if space.kind == "expert" and plan.removed[space.name]
    }
    blocks = [block for block in expert_blocks(model) if block.name in removed]
    return [_merge(small, model, block, removed[block.name], sweep) for block in blocks] or [
        Note("merge", "skipped", NO_EXPERTS)
    ]


def _merge(small: nn.Module, model: nn.Module, block: ExpertBlock, removed: Tensor, sweep: Sweep) -> Note:
    ours, theirs = _stacks(small, block), _stacks(model, block)
    if any(ours[name].shape[1:] != stack.shape[1:] for name, stack in theirs.items()):
        return Note(block.name, "skipped", "its experts lost more than their number")
    near = nearest(_router_rows(model, block), removed)
    means = {
        name: mean_with(stack, theirs[name][removed.to(stack.device)], near) for name, stack in ours.items()
    }
    module, inside = small.get_submodule(caller_of(block)), block.experts.rpartition(".")[2]

    def weights(share: float) -> dict[str, Tensor]:
        stacks = {name: torch.lerp(stack, means[name], share) for name, stack in ours.items()}
        if not isinstance(small.get_submodule(block.experts), nn.ModuleList):
            return {f"{inside}.{name}": stack for name, stack in stacks.items()}
        return {
            f"{inside}.{number}.{name}": tensor
            for name, stack in stacks.items()
            for number, tensor in enumerate(stack)
        }

    errors = dict.fromkeys(SHARES, 0.0)
    for arrival in Arrivals(small, model, block, sweep):
        rows = torch.cat(arrival.halves)
        for share in SHARES:
            out = next(
                tensors_of(functional_call(module, weights(share), arrival.args, dict(arrival.kwargs)))
            ).flatten(0, -2)  # [T, H]
            errors[share] += float((arrival.wanted - wide(out))[rows].square().sum())
    best = min(SHARES, key=errors.__getitem__)
    if best == 0:
        return Note(
            block.name, "kept", "no share of the way to the means brings the block nearer to the original"
        )
    for name, tensor in weights(best).items():
        module.get_parameter(name).copy_(tensor)
    return Note(
        block.name, "repaired", f"merged by {best:.0%} of the way to the means", errors[best] / errors[0.0]
    )


def nearest(rows: Tensor, removed: Tensor) -> Tensor:
    """For each removed expert the place, among the kept ones, of that whose router row points most nearly
    its way; rows [E, H].
    """
    directions = F.normalize(float64(rows), dim=1)
    kept = torch.ones(len(rows), dtype=torch.bool).index_fill(0, removed, False)
    return (directions[removed] @ directions[kept].T).argmax(1)


def mean_with(kept: Tensor, removed: Tensor, near: Tensor) -> Tensor:
    """Tensors of the kept experts [K, …], each averaged with those of the removed [R, …] that are nearest
    to it: K means.
    """
    near = near.to(kept.device)
    together = 1 + torch.bincount(near, minlength=len(kept))  # [K]
    parts = (removed - kept[near]) / together[near].to(kept).view(-1, *[1] * (kept.ndim - 1))
    return kept.index_add(0, near, parts)


def _stacks(model: nn.Module, block: ExpertBlock) -> dict[str, Tensor]:
    """The parameters of a block's experts, [E, …] each."""
    experts = model.get_submodule(block.experts)
    if isinstance(experts, nn.ModuleList):
        return {
            name: torch.stack([expert.get_parameter(name).detach() for expert in experts])
            for name, _ in experts[0].named_parameters()
        }
    return {name: parameter.detach() for name, parameter in experts.named_parameters(recurse=False)}


def _router_rows(model: nn.Module, block: ExpertBlock) -> Tensor:
    """The router's matrix, [E, H]."""
    matrix = next(
        p.detach()
        for p in model.get_submodule(block.router).parameters(recurse=False)
        if is_route(p, block.size)
    )
    return matrix if matrix.shape[0] == block.size else matrix.mT
