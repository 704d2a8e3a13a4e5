"""Fused experts of which some are replaced by constants, while the router still chooses among all of them.

`fairpruner` copies this file into the folder of a Hugging Face model that has such experts. It needs only
torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Constants(nn.Module):
    """What R removed of E experts add for a token that chose them, and the new number of every expert.

    A kept expert has a number below E - R; the others are the numbers of the rows of `values`, plus E - R.
    """

    def __init__(self, experts: int, removed: int, width: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(removed, width))  # [R, H]
        self.register_buffer("number", torch.zeros(experts, dtype=torch.int64))  # [E]
        self.number: Tensor


class ConstantExperts(nn.Module):
    """Experts that are called with the choices of a router over all E experts, removed ones included."""

    constants: Constants

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        number = self.constants.number[chosen]  # [T, k]
        values = self.constants.values
        kept = len(self.constants.number) - len(values)
        gone = number >= kept
        # All implementations of transformers need an expert for each choice: expert 0, with weight 0.
        output: Tensor = super().forward(hidden, number.masked_fill(gone, 0), weights.masked_fill(gone, 0))
        wide = torch.promote_types(weights.dtype, values.dtype)
        shares = weights.new_zeros(*chosen.shape[:-1], len(self.constants.number), dtype=wide)  # [T, E]
        shares = shares.scatter_add(-1, number, weights.to(wide))[..., kept:]
        return output + (shares @ values.to(wide)).to(output.dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Classes made while a program runs cannot be pickled by name."""
        return _rebuilt, (type(self).__mro__[2], self.__dict__)


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _constant_class(cls: type[nn.Module]) -> type[nn.Module]:
    if cls not in _CLASSES:
        _CLASSES[cls] = type(
            f"Constant{cls.__name__}", (ConstantExperts, cls), {"__module__": cls.__module__}
        )
    return _CLASSES[cls]


def _rebuilt(cls: type[nn.Module], state: dict[str, Any]) -> nn.Module:
    module = cls.__new__(_constant_class(cls))
    module.__dict__ = state
    return module


def takes_constants(experts: nn.Module) -> bool:
    """Whether these are fused experts of transformers, which are called with tokens, choices and weights."""
    return hasattr(experts, "is_transposed") and isinstance(getattr(experts, "down_proj", None), nn.Parameter)


def leave_constants(experts: nn.Module, constants: Constants) -> None:
    """Give fused experts constants for those that were removed, in place."""
    if not takes_constants(experts) or isinstance(experts, ConstantExperts):
        raise ValueError(f"A {type(experts).__name__} cannot leave constants for removed experts.")
    experts.constants = constants
    experts.__class__ = _constant_class(type(experts))
