"""Which architecture a set of spaces, scores or a plan belongs to."""

from __future__ import annotations

import hashlib

from torch import nn

from fairpruner.errors import another_model


def fingerprint(model: nn.Module) -> str:
    """A short hash of the names and shapes of all parameters and buffers; their values do not matter.

    >>> fingerprint(nn.Linear(3, 2)) == fingerprint(nn.Linear(3, 2))
    True
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    text = "\n".join(sorted(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_same_model(model: nn.Module, expected: str, opening: str, *, step: str) -> None:
    """Refuse a model with another fingerprint; `opening` begins the error's sentence, `step` ends it."""
    found = fingerprint(model)
    if found != expected:
        raise another_model(opening, f"{found} of {type(model).__name__}", expected, step)
