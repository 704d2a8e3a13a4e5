"""Gradient steps on the calibration samples that bring a cut model's activations nearer to the original's.

No labels are used: the target is what the original computes on the same samples. Where a block of both
models (a module made of others: a residual block, an attention layer, the model itself) gives tensors of
the same shape, the squared error between them is a term of the loss, as a share of the original's power.
Matching the activations of all blocks overfits a few thousand samples far less than matching logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from fairpruner.inputs.batches import Batch, forward
from fairpruner.inputs.tokens import counted_rows
from fairpruner.models.calling import tensors_of
from fairpruner.repair.notes import Note

EPOCHS = 10
SAMPLES = 64  # of one step, at most
RATE = 1e-3  # of Adam at the start; a cosine leads it to zero
WIDE = {torch.float32, torch.float64}  # narrower parameters would round the steps away


def tune(
    small: nn.Module, model: nn.Module, read: Callable[[], Iterator[Batch]], *, epochs: int = EPOCHS
) -> list[Note]:
    """Train `small` in place towards the activations of `model`; batch norms keep their statistics."""
    parameters = [p for p in small.parameters() if p.is_floating_point()]
    narrow = {str(p.dtype) for p in parameters} - set(map(str, WIDE))
    if narrow:
        return [Note("tune", "skipped", f"gradient steps need float32, found {', '.join(sorted(narrow))}")]
    optimizer, blocks = torch.optim.Adam(parameters, RATE), _blocks(small, model)
    steps = epochs * sum(math.ceil(batch.size / SAMPLES) for batch in read())
    done = 0
    with (
        torch.enable_grad(),
        _learning(parameters),
        _BlockOutputs(model, blocks) as wanted,
        _BlockOutputs(small, blocks) as given,
    ):
        for epoch in range(epochs):
            for batch in read():
                for part in _parts(batch, epoch):
                    with torch.no_grad():
                        forward(model, part)
                    forward(small, part)
                    loss = _error(given.taken(), wanted.taken(), part)
                    if loss is None:
                        return [Note("tune", "skipped", "no block gives tensors of the original's shape")]
                    for group in optimizer.param_groups:
                        group["lr"] = RATE * (1 + math.cos(math.pi * done / steps)) / 2
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    done += 1
    return [Note("tune", "repaired", f"{done} gradient steps towards the original's activations")]


def _parts(batch: Batch, epoch: int) -> Iterator[Batch]:
    """The samples of a batch, in another order each epoch, SAMPLES at a time."""
    seed = torch.Generator().manual_seed(1_000_003 * epoch + batch.position)
    for chosen in torch.randperm(batch.size, generator=seed).split(SAMPLES):
        yield batch.some(chosen)


def _blocks(small: nn.Module, model: nn.Module) -> list[str]:
    """The modules made of others, the model itself first; in a list that lost modules the others moved up,
    so that nothing inside it is the same module in both models.
    """
    shortened = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) != len(list(small.get_submodule(name).children()))
    )
    return [
        name
        for name, module in small.named_modules()
        if not name.startswith(shortened) and (not name or any(True for _ in module.children()))
    ]


class _BlockOutputs:
    """The tensors that each block of a model gave, call by call, since they were last taken."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        self._blocks = {name: model.get_submodule(name) for name in blocks}
        self._hooks: list[RemovableHandle] = []
        self._seen: dict[str, list[Tensor]] = {}

    def __enter__(self) -> _BlockOutputs:
        self._hooks = [
            module.register_forward_hook(
                lambda module, args, output, name=name: self._seen.setdefault(name, []).extend(
                    t for t in tensors_of(output) if t.is_floating_point()
                )
            )
            for name, module in self._blocks.items()
        ]
        return self

    def __exit__(self, *failure: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def taken(self) -> dict[str, list[Tensor]]:
        seen, self._seen = self._seen, {}
        return seen


def _error(given: dict[str, list[Tensor]], wanted: dict[str, list[Tensor]], batch: Batch) -> Tensor | None:
    """The mean over all tensors of the same shape of their squared error over the original's power."""
    pairs = {
        id(mine): (name, mine, theirs)
        for name, tensors in given.items()
        for mine, theirs in zip(tensors, wanted.get(name, []), strict=False)
        if mine.shape == theirs.shape and mine.requires_grad
    }  # a block inside another may give the very same tensor
    terms = [_relative(mine, theirs, batch, name) for name, mine, theirs in pairs.values()]
    return torch.stack(terms).mean() if terms else None


def _relative(mine: Tensor, theirs: Tensor, batch: Batch, block: str) -> Tensor:
    """The squared error of a tensor, padding of texts left out, as a share of what it should be."""
    if mine.ndim >= 3:
        rows = counted_rows(mine.shape[0] * mine.shape[1], batch.inputs, block).to(mine.device)
        if len(rows) < mine.shape[0] * mine.shape[1]:
            mine, theirs = mine.flatten(0, 1)[rows], theirs.flatten(0, 1)[rows]
    power = torch.linalg.vector_norm(theirs).square() / theirs.numel()
    error: Tensor = F.mse_loss(mine, theirs) / power.clamp_min(torch.finfo(theirs.dtype).tiny)
    return error


@contextmanager
def _learning(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """All parameters take gradients inside, also frozen ones; afterwards they are as they were."""
    before = [p.requires_grad for p in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, required in zip(parameters, before, strict=True):
            parameter.requires_grad_(required)
            parameter.grad = None
