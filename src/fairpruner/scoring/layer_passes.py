"""The passes of scoring over the layers of a streamed model: forward, and back if gradients are needed."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from fairpruner.inputs.streamed import ORIGINAL
from fairpruner.inputs.walking import stage
from fairpruner.models.layer_calls import LayerModel
from fairpruner.models.routing import watching_experts
from fairpruner.scoring.demand import Demand, Watched
from fairpruner.scoring.gradients import gradients_of
from fairpruner.scoring.layer_results import RESULT
from fairpruner.scoring.layer_signals import LayerSignals, ScoringJob
from fairpruner.scoring.preparing import distinct

GRADIENT = "gradient"


def score_forward(job: ScoringJob) -> None:
    """Show the layers to the signals on the way forward, up to the last one with a space."""
    for layer in range(max(map(job.layer_of, job.spaces)) + 1):
        if not _done(job, layer):
            _layer_forward(job, layer)
        _drop(job, layer, stage(ORIGINAL, layer))


def _layer_forward(job: ScoringJob, layer: int) -> None:
    signals = LayerSignals(job, layer, lowest=layer)
    title = f"scoring, layer {layer + 1} of {job.walk.streamed.count}"
    job.walk.write(stage(ORIGINAL, layer + 1), title, signals.forward)
    signals.finish()


def score_backward(job: ScoringJob) -> None:
    """Run all layers forward, and show them to the signals on the way back to the first with a space."""
    walk, last = job.walk, job.walk.streamed.count
    if not any(walk.folder.has(stage(GRADIENT, layer)) for layer in range(last + 1)):
        walk.forward(keep=True, around=lambda model, layer: _as_observed(job, model, layer))
        _from_loss(job)
    lowest = min(map(job.layer_of, job.spaces))
    for layer in range(last - 1, lowest - 1, -1):
        if not _done(job, layer):
            _layer_backward(job, layer, lowest)
        _drop(job, layer, stage(ORIGINAL, layer + 1), stage(GRADIENT, layer + 1))


def _layer_backward(job: ScoringJob, layer: int, lowest: int) -> None:
    walk, signals = job.walk, LayerSignals(job, layer, lowest=lowest)

    def above(index: int) -> Tensor:
        return torch.from_numpy(walk.folder.read(stage(GRADIENT, layer + 1), index))

    def below(index: int) -> Tensor:
        return signals.backward(index, above(index))

    title = f"backward, layer {layer + 1} of {walk.streamed.count}"
    walk.write(stage(GRADIENT, layer), title, below, range(1, len(walk.batches)))
    signals.finish(above)


def _done(job: ScoringJob, layer: int) -> bool:
    """Whether all processes have the results of a layer."""
    return all(job.processes.gathered(job.walk.folder.has(stage(RESULT, layer))))


def _drop(job: ScoringJob, layer: int, *names: str) -> None:
    """Remove what a layer needed, once all processes have its results."""
    if _done(job, layer):
        for name in names:
            job.walk.folder.drop(name)


def _as_observed(job: ScoringJob, model: LayerModel, layer: int) -> AbstractContextManager[None]:
    """Experts run on the way forward as they run when signals see them, so that both agree in all bits."""
    watched = Watched.of(model, Demand(job.spaces_of(layer), distinct(job.selections)))
    return watching_experts(model, watched.blocks, lambda output: None)


def _from_loss(job: ScoringJob) -> None:
    """Keep the gradients of the loss for what the last layer returned."""
    walk, last = job.walk, job.walk.streamed.count
    shell = walk.streamed.shell()

    @torch.enable_grad()
    def slope(index: int) -> Tensor:
        batch, stream = walk.batches[index], walk.stream(index, last).requires_grad_()
        loss = job.objective.mean(shell.finish(batch.inputs, stream), batch)
        (gradient,) = gradients_of(loss, [stream], batch)
        return torch.zeros_like(stream) if gradient is None else gradient

    walk.write(stage(GRADIENT, last), "the loss", slope, range(1, len(walk.batches)))
