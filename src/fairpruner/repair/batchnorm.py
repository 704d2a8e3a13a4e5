"""Running means and variances of batch norms, estimated again over the calibration data."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from fairpruner.inputs.batches import forward
from fairpruner.models.calling import tensors_of
from fairpruner.models.torch_private import AnyBatchNorm
from fairpruner.repair.job import Job
from fairpruner.repair.notes import Note

ONE_VALUE = "no batch gives it two values of a channel, as a variance needs: give batches of more samples"


def reestimate(job: Job) -> list[Note]:
    """Set the running statistics of every batch norm to their means over the samples."""
    norms = {
        name: module
        for name, module in job.small.named_modules()
        if isinstance(module, AnyBatchNorm) and module.running_mean is not None
    }
    if not norms:
        return [Note("batchnorm", "skipped", "the model has no batch norm with running statistics")]
    momentums = {name: norm.momentum for name, norm in norms.items()}
    counters = {
        name: norm.num_batches_tracked.clone()
        for name, norm in norms.items()
        if norm.num_batches_tracked is not None
    }
    seen = dict.fromkeys(norms, 0)  # values of a channel
    try:
        with ExitStack() as hooks:
            for name, norm in norms.items():
                hook = partial(_weigh, seen, name)
                hooks.enter_context(norm.register_forward_pre_hook(hook, with_kwargs=True))
            for batch in job.read():
                forward(job.small, batch)
    finally:
        for name, norm in norms.items():
            norm.eval()
            norm.momentum = momentums[name]
            if name in counters and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.copy_(counters[name])
    return [
        Note(name, "repaired", "statistics estimated again")
        if seen[name]
        else Note(name, "skipped", ONE_VALUE)
        for name in norms
    ]


def _weigh(seen: dict[str, int], name: str, norm: Any, args: Any, kwargs: Any) -> None:
    """Give the values of this call the same weight as those before; a single one leaves the statistics."""
    source = next(tensors_of([args, kwargs]))  # [N, C, ...]
    values = source.numel() // source.shape[1]
    norm.train(values > 1)  # torch refuses to compute the variance of one value
    if values > 1:
        seen[name] += values
        norm.momentum = values / seen[name]
