"""Which architecture a set of spaces, scores or a plan belongs to."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from fairpruner.errors import another_model
from fairpruner.models.torch_private import unsaved_buffers


def fingerprint(model: nn.Module) -> str:
    """A short hash of the names and shapes of all tensors that a model saves; their values do not matter.

    >>> fingerprint(nn.Linear(3, 2)) == fingerprint(nn.Linear(3, 2))
    True
    """
    # A buffer that is not saved may take another shape in a forward pass, as a table of positions does.
    unsaved = unsaved_buffers(model)
    return _hash([item for item in _tensors(model) if item[0] not in unsaved])


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _hash(tensors: list[tuple[str, torch.Tensor]]) -> str:
    text = "\n".join(sorted(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_same_model(model: nn.Module, expected: str, opening: str, *, step: str) -> None:
    """Refuse a model with another fingerprint; `opening` begins the error's sentence, `step` ends it."""
    found = fingerprint(model)
    if expected not in (found, _hash(_tensors(model))):  # older files count all buffers
        raise another_model(opening, f"{found} of {type(model).__name__}", expected, step)
