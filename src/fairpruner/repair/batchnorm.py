"""Running means and variances of batch norms, estimated again over the calibration data."""

from __future__ import annotations

from fairpruner.inputs.batches import forward
from fairpruner.models.torch_private import AnyBatchNorm
from fairpruner.repair.job import Job
from fairpruner.repair.notes import Note


def reestimate(job: Job) -> list[Note]:
    """Set the running statistics of every batch norm to their means over the samples."""
    small = job.small
    norms = {
        name: module
        for name, module in small.named_modules()
        if isinstance(module, AnyBatchNorm) and module.running_mean is not None
    }
    momentums = {name: norm.momentum for name, norm in norms.items()}
    counters = {
        name: norm.num_batches_tracked.clone()
        for name, norm in norms.items()
        if norm.num_batches_tracked is not None
    }
    seen = 0
    try:
        for norm in norms.values():
            norm.train()
        for batch in job.read():
            seen += batch.size
            for norm in norms.values():
                norm.momentum = batch.size / seen
            forward(small, batch)
    finally:
        for name, norm in norms.items():
            norm.eval()
            norm.momentum = momentums[name]
            if name in counters and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.copy_(counters[name])
    if not norms:
        return [Note("batchnorm", "skipped", "the model has no batch norm with running statistics")]
    return [Note(name, "repaired", "statistics estimated again") for name in norms]
