"""A removed expert leaves its mean output behind, and the router stays as it was (MoNE).

A token that chooses the removed expert e with the weight w gets w c_e. The constant c_e minimises the sum of
|w y - w c_e|² over the calibration tokens that choose e, whose output is y. So it is the mean of y, weighted
by w². An expert is linear in h, the input of its last matrix D and bias b: c_e = D h̄ + b with the mean h̄.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairpruner.core.units import UnitSpace
from fairpruner.inputs.batches import forward
from fairpruner.inputs.hugging_face import is_model
from fairpruner.inputs.tokens import counted_rows
from fairpruner.models.constant_experts import ConstantExperts, Constants, leave_constants, takes_constants
from fairpruner.models.experts import ExpertBlock, expert_blocks
from fairpruner.models.narrowing import kept_indices, restore_units
from fairpruner.models.routing import RouterOutput, watching_experts
from fairpruner.repair.job import Job
from fairpruner.repair.notes import NO_EXPERTS, Note

NOT_FUSED = "only fused experts of a transformers model can be replaced by constants"
DONE = "its removed experts have left constants behind before"
UNSEEN = "a norm follows its experts, so their outputs are not the products of their last matrices"


def replace_by_constants(job: Job) -> list[Note]:
    """Give every block that lost experts its whole router back, and a constant for each removed expert."""
    lost = {s.name: s for s in job.plan.spaces if s.kind == "expert" and job.plan.removed[s.name]}
    present = {path for path, _ in job.small.named_modules()}  # a removed layer has no experts
    every = [b for b in expert_blocks(job.model) if b.name in lost and b.experts in present]
    done = [b for b in every if isinstance(job.small.get_submodule(b.experts), ConstantExperts)]
    blocks = [b for b in every if b not in done]
    fused = [b for b in blocks if is_model(job.small) and takes_constants(job.model.get_submodule(b.experts))]
    means = _mean_inputs(job, fused)
    notes = [Note(b.name, "kept", DONE) for b in done]
    notes += [_replace(job, b, lost[b.name], means[b.name]) for b in fused if b.name in means]
    notes += [Note(b.name, "skipped", UNSEEN) for b in fused if b.name not in means]
    notes += [Note(b.name, "skipped", NOT_FUSED) for b in blocks if b not in fused]
    return notes or [Note("constants", "skipped", NO_EXPERTS)]


def _mean_inputs(job: Job, blocks: list[ExpertBlock]) -> dict[str, Tensor]:
    """Block -> what the last matrices of its experts read in the original, weighted means, [E, I]."""
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    inputs: Any = None

    def visit(router: RouterOutput) -> None:
        if router.inner is None:
            return
        size, width = router.block.size, router.inner.shape[1]
        empty = (
            torch.zeros(size, dtype=torch.float64, device="cpu"),
            torch.zeros(size, width, dtype=torch.float64, device="cpu"),
        )
        total, summed = sums.setdefault(router.block.name, empty)
        counted = torch.zeros(router.tokens, dtype=torch.bool, device="cpu")
        counted[counted_rows(router.tokens, inputs, router.block.name)] = True
        share = router.weight.cpu().double().square() * counted[router.token.cpu()]  # [P]
        total.index_add_(0, router.expert.cpu(), share)
        summed.index_add_(0, router.expert.cpu(), router.inner.cpu().double() * share[:, None])

    with watching_experts(job.model, blocks, visit):
        for batch in job.read() if blocks else ():
            inputs = batch.inputs
            forward(job.model, batch)
    # The last matrix of an expert that no token chose counts as reading 0.
    return {name: summed / total.clamp_min(1e-300)[:, None] for name, (total, summed) in sums.items()}


def _replace(job: Job, block: ExpertBlock, space: UnitSpace, means: Tensor) -> Note:
    plan = job.plan
    removed = torch.tensor(plan.removed[space.name], device="cpu")
    kept = np.setdiff1d(np.arange(block.size), removed)
    theirs: Any = job.model.get_submodule(block.experts)
    ours: Any = job.small.get_submodule(block.experts)
    outputs = _outputs(theirs, means)[removed]  # [R, H]
    beside = kept_indices(plan.spaces, plan.removed).get(f"{block.experts}.down_proj", {})
    if (stream := beside.get(2 if theirs.is_transposed else 1)) is not None:
        outputs = outputs[:, torch.from_numpy(stream)]  # channels of the residual stream were removed, too
    down = ours.down_proj
    constants = Constants(block.size, len(removed), outputs.shape[1]).to(down.device, down.dtype)
    constants.values.copy_(outputs.to(constants.values.dtype))
    constants.number.copy_(torch.cat([torch.from_numpy(kept), removed]).argsort())
    restore_units(job.small, job.model, plan.spaces, removed=plan.removed, space=space, outside=block.experts)
    leave_constants(ours, constants)
    return Note(block.name, "repaired", f"{len(removed)} removed experts left their mean outputs behind")


def _outputs(experts: Any, means: Tensor) -> Tensor:
    """The outputs of experts whose last matrices read `means`, [E, I] -> [E, H] in float64."""
    down = experts.down_proj.detach().cpu()  # [E, H, I], or [E, I, H]
    down = down.mT if experts.is_transposed else down
    # Expert by expert, because all matrices in float64 would be twice the block, or more.
    found = torch.stack([matrix.double() @ mean for matrix, mean in zip(down, means, strict=True)])
    return found + experts.down_proj_bias.detach().cpu().double() if experts.has_bias else found
