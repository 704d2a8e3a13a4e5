"""A router's weight with silenced rows: the logits of these rows are -inf for every input."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fairpruner.core.units import Slice, UnitSpace
from fairpruner.models.torch_private import held_tensors, plain_function
from fairpruner.models.weight_operations import WEIGHT_OPERATIONS

# Products of an input with a router's rows: the last dimension of the result is the logits.
PRODUCTS = frozenset(
    [
        *(function for function, operation in WEIGHT_OPERATIONS.items() if operation.axis == -1),
        torch.einsum,
        Tensor.__matmul__,
        Tensor.__rmatmul__,
    ]
)


class SilencedRows(Tensor):
    """A router's parameter in a masked model; copies of it and casts to other types stay silenced."""

    silenced: Tensor  # [E], true where the logit is -inf

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with plain_function():
            out = func(*args, **(kwargs or {}))
        rows = next((a for a in (*args, *(kwargs or {}).values()) if isinstance(a, cls)), None)
        if rows is None or out is rows or not isinstance(out, Tensor):
            return out
        if func in PRODUCTS:
            return out.as_subclass(Tensor).masked_fill(rows.silenced.to(out.device), -math.inf)
        # A result with as many elements is a cast, a copy or a transpose.
        return _silenced(out, rows.silenced) if out.numel() == rows.numel() else out.as_subclass(Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = fresh = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        return fresh


def silence(weight: Tensor, rows: Tensor) -> SilencedRows:
    """A router's weight, [E, width] or [width, E], with the rows that are true in [E] silenced too."""
    return _silenced(weight, rows | weight.silenced if isinstance(weight, SilencedRows) else rows)


def _silenced(tensor: Tensor, silenced: Tensor) -> SilencedRows:
    rows = tensor.as_subclass(SilencedRows)
    rows.silenced = silenced
    return rows


def close(part: Slice, tensor: Tensor, gone: Tensor) -> Tensor:
    """A router's tensor that sends no token to the experts that are true in `gone` [E]."""
    if tensor.numel() > part.owner.size:
        return silence(tensor, gone)
    # A bias of -inf also works in routers that add it to probabilities, not to logits.
    return tensor.index_fill(part.dim, gone.nonzero().squeeze(1).to(tensor.device), -math.inf)


@contextmanager
def without_expert(model: nn.Module, space: UnitSpace, unit: int) -> Iterator[None]:
    """Inside, no token is sent to one expert of the model itself."""
    places: list[tuple[dict[str, Any], str, Tensor, Slice]] = []
    for part in space.slices_of("route"):
        path, _, name = part.tensor.rpartition(".")
        module = model.get_submodule(path)
        held = held_tensors(module, name)
        places.append((held, name, held[name], part))
    try:
        for held, name, tensor, part in places:
            held[name] = close(part, tensor.detach(), torch.from_numpy(part.owner == unit))
        yield
    finally:
        for held, name, tensor, _ in places:
            held[name] = tensor
