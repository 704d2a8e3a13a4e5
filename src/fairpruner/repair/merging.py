"""Merge every removed expert into the kept expert with the most similar router row.

A kept expert moves towards the mean of itself and the removed experts that are merged into it. The data
decides how far: in the order of the forward pass, each block takes the share of the way with which its output
is nearest to what it should return (see `block_calls`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fairpruner.models.calling import tensors_of
from fairpruner.models.experts import ExpertBlock, expert_blocks, is_route
from fairpruner.models.precision import forget_casts, in_float32
from fairpruner.repair.block_calls import BlockCalls, caller_of
from fairpruner.repair.job import Job
from fairpruner.repair.notes import NO_EXPERTS, Note
from fairpruner.repair.regression import float64

# Of the way. All of it is mostly too far, because two experts have little in common.
SHARES = (0.0, 0.1, 0.2, 0.35, 0.5, 1.0)


def merge_experts(job: Job) -> list[Note]:
    """Merge the removed experts of every block into the kept ones of the cut model."""
    removed = {
        space.name: torch.tensor(job.plan.removed[space.name], device="cpu")
        for space in job.plan.spaces
        if space.kind == "expert" and job.plan.removed[space.name] and job.plan.kept[space.name]
    }
    blocks = [block for block in expert_blocks(job.model) if block.name in removed]
    notes = [_merge(job, block, removed[block.name]) for block in blocks]
    return notes or [Note("merge", "skipped", NO_EXPERTS)]


def _merge(job: Job, block: ExpertBlock, removed: Tensor) -> Note:
    small, ours, theirs = job.small, _stacks(job.small, block), _stacks(job.model, block)
    if any(ours[name].shape[1:] != stack.shape[1:] for name, stack in theirs.items()):
        return Note(block.name, "skipped", "its experts lost more than their number")
    near = nearest(_router_rows(job.model, block), removed)
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
    for call in BlockCalls(job, block):
        rows = torch.cat([call.fitted, call.judging])
        for share in SHARES:
            result = functional_call(module, weights(share), call.args, dict(call.kwargs))
            out = next(tensors_of(result)).flatten(0, -2)  # [T, H]
            errors[share] += float((call.target - in_float32(out))[rows].square().sum())
    best = min(SHARES, key=errors.__getitem__)
    if best == 0:
        reason = "no share of the way to the means brings the block nearer to the original"
        return Note(block.name, "kept", reason)
    for name, tensor in weights(best).items():
        module.get_parameter(name).copy_(tensor)
    forget_casts()
    reason = f"merged by {best:.0%} of the way to the means"
    return Note(block.name, "repaired", reason, errors[best] / errors[0.0])


def nearest(rows: Tensor, removed: Tensor) -> Tensor:
    """For each removed expert, the position of the most similar kept expert; router rows [E, H]."""
    directions = F.normalize(float64(rows), dim=1)
    kept = torch.ones(len(rows), dtype=torch.bool, device="cpu").index_fill(0, removed, False)
    return (directions[removed] @ directions[kept].T).argmax(1)


def mean_with(kept: Tensor, removed: Tensor, near: Tensor) -> Tensor:
    """Tensors of the kept experts [K, …], each averaged with those of the removed [R, …] nearest to it."""
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
