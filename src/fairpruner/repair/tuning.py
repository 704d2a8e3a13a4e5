"""Gradient steps on the calibration samples that bring a cut model's activations nearer to the original's.

No labels are used: the target is the original's output on the same samples. The loss has one term for each
block: the squared error between the outputs of both models, divided by the original's squared output.
Matching the activations of all blocks overfits a few thousand samples far less than matching logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fairpruner.inputs.activations import BlockOutputs, relative_error
from fairpruner.inputs.batches import Batch, forward
from fairpruner.inputs.tokens import real_tokens
from fairpruner.models.precision import forget_casts
from fairpruner.repair.notes import Note
from fairpruner.repair.targets import Targets, together

EPOCHS = 10
RATE = 1e-3  # of Adam at the start; it falls to zero along a cosine
TEXT_RATE = 3e-5  # the same for texts: ten times as much moves a language model away from the original
WIDE = {torch.float32, torch.float64}  # in narrower types, small steps would be lost by rounding


def tune(
    small: nn.Module, targets: Targets, read: Callable[[], Iterator[Batch]], *, epochs: int = EPOCHS
) -> list[Note]:
    """Train `small` in place towards the original's activations; batch norms keep their statistics."""
    if narrow := narrow_types(small):
        return [Note("tune", "skipped", f"gradient steps need float32, found {', '.join(narrow)}")]
    parameters = [p for p in small.parameters() if p.is_floating_point()]
    rate = RATE if real_tokens(next(read()).inputs) is None else TEXT_RATE
    optimizer = torch.optim.Adam(parameters, rate)
    steps = epochs * sum(math.ceil(batch.size / together(batch)) for batch in read())
    done = 0
    with torch.enable_grad(), _learning(parameters), BlockOutputs(small, targets.blocks) as given:
        for batch, chosen in _parts(read, epochs):
            part = batch.some(chosen)
            forward(small, part)
            loss = relative_error(given.taken(), targets.of(batch, chosen), part)
            if loss is None:
                return [Note("tune", "skipped", "no block gives tensors of the original's shape")]
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 + math.cos(math.pi * done / steps)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            forget_casts()
            done += 1
    return [Note("tune", "repaired", f"{done} gradient steps towards the original's activations")]


def narrow_types(model: nn.Module) -> list[str]:
    """The types of a model's parameters in which small steps would be lost by rounding."""
    return sorted({str(p.dtype) for p in model.parameters() if p.is_floating_point()} - set(map(str, WIDE)))


def _parts(read: Callable[[], Iterator[Batch]], epochs: int) -> Iterator[tuple[Batch, Tensor]]:
    """Every batch of every epoch, with the indices of a few samples, in a new order each epoch."""
    for epoch in range(epochs):
        for batch in read():
            seed = torch.Generator("cpu").manual_seed(1_000_003 * epoch + batch.position)
            for chosen in torch.randperm(batch.size, generator=seed, device="cpu").split(together(batch)):
                yield batch, chosen


@contextmanager
def _learning(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, all parameters require gradients, also frozen ones; afterwards this is restored."""
    before = [p.requires_grad for p in parameters]
    torch.clear_autocast_cache()  # torch 2.7 keeps copies of weights that were cast without gradients
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, required in zip(parameters, before, strict=True):
            parameter.requires_grad_(required)
            parameter.grad = None
