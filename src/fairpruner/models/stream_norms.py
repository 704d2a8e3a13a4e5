"""RMSNorms of a residual stream that lost channels: weights and epsilons that keep their output exact."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairpruner.core.units import UnitSpace


def rescale_norms(small: nn.Module, space: UnitSpace, kept: int) -> None:
    """Multiply the weights of a cut model's norms by sqrt(J / K), and their epsilons by J / K, in place.

    With J channels of which K are kept, each norm then returns what it would return if the removed channels
    were zero.
    """
    for norm in space.norms if kept < space.size else ():
        growth = space.size / kept
        module = small.get_submodule(norm.module)
        weight = module.weight
        assert isinstance(weight, Tensor)
        with torch.no_grad():
            weight.add_(norm.offset).mul_(growth**0.5).sub_(norm.offset)
        setattr(module, norm.epsilon, getattr(module, norm.epsilon) * growth)
