"""The tensors of a model by name, and what a cut leaves of them."""

from __future__ import annotations

from torch import Tensor, nn

from fairpruner.core.arrays import Ints
from fairpruner.core.plan import Plan
from fairpruner.models.narrowing import kept_indices

Kept = dict[tuple[str, int], Ints]  # (tensor, dim) -> the indices that stay; absent where all stay


def kept_by_dim(plan: Plan) -> Kept:
    """The indices that a cut leaves along each dim of each tensor that loses some."""
    return {
        (tensor, dim): kept
        for tensor, dims in kept_indices(plan.spaces, plan.removed).items()
        for dim, kept in dims.items()
    }


def tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers."""
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}
