"""The tensors of a model by name, and the indices of them that a cut keeps."""

from __future__ import annotations

from torch import Tensor, nn

from fairpruner.core.arrays import Ints
from fairpruner.core.plan import Plan
from fairpruner.models.narrowing import kept_indices

KeptByDim = dict[tuple[str, int], Ints]  # (tensor, dim) -> the kept indices; absent if all are kept


def kept_by_dim(plan: Plan) -> KeptByDim:
    """The kept indices along each dim of each tensor that loses some."""
    return {
        (tensor, dim): kept
        for tensor, dims in kept_indices(plan.spaces, plan.removed).items()
        for dim, kept in dims.items()
    }


def tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers."""
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}
