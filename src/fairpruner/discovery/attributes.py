"""Attributes that say how many heads an attention module has, or how wide they are together, found by
what they are called.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import nn

from fairpruner.core.arrays import Ints
from fairpruner.core.units import Count, UnitSpace

# Attributes that count heads: their value is a multiple of the number of units.
HEADS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "heads",
    "nhead",
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "kv_heads",
)
# Attributes that tell the width of all heads together: their value is the size of a projection that the
# heads
# own.
WIDTHS = ("all_head_size", "inner_dim", "attn_dim", "split_size", "val_attn_dim", "key_attn_dim")


def head_counts(space: UnitSpace, model: nn.Module) -> tuple[Count, ...]:
    """The counts that must shrink with a space of heads: on the modules that hold its projections, and
    one above.
    """
    counts = []
    for name in dict.fromkeys(_nearby(space)):
        module = model.get_submodule(name)
        for attribute in HEADS + WIDTHS:
            value = getattr(module, attribute, None)
            if type(value) is not int:
                continue
            owner = _shares(space.size, value) if attribute in HEADS else _widths(space, value)
            if owner is not None:
                counts.append(Count(name, attribute, owner))
    return tuple(counts)


def _nearby(space: UnitSpace) -> Iterator[str]:
    for part in space.slices:
        holder = part.tensor.rpartition(".")[0]
        yield holder
        yield holder.rpartition(".")[0]


def _shares(units: int, value: int) -> Ints | None:
    """Heads dealt out evenly to the units."""
    return np.repeat(np.arange(units), value // units) if value % units == 0 and value else None


def _widths(space: UnitSpace, value: int) -> Ints | None:
    """The owners of a projection of this size, or of the first part of one that fuses several."""
    whole = [part.owner for part in space.slices if part.owner.size % value == 0 and (part.owner >= 0).all()]
    return min(whole, key=len)[:value] if whole else None
