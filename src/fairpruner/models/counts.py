"""Whole numbers of modules that shrink with units: how they are read and set."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from fairpruner.models.attention import FEWER_HEADS, remember_heads
from fairpruner.models.narrow_heads import HEADS_WIDTHS, KEPT_HEADS, NarrowHeads, narrow_class

IN_CONFIG = "config."  # before the name of a number that a module reads from its configuration
_ENTRY = re.compile(r"(\w+)\[(\d+)\]")  # the name of a number in a tuple or list: sizes[2]


def counted(module: nn.Module, attribute: str, width: int) -> Any:
    """The value of a count; if heads were never cut, their total width is the `width` of their input."""
    if attribute in HEADS_WIDTHS and not isinstance(module, NarrowHeads):
        return width
    if KEPT_HEADS.fullmatch(attribute):
        heads = vars(module).get(attribute)
        return width if heads is None else len(heads) - 1
    if entry := _ENTRY.fullmatch(attribute):
        sizes, position = vars(module).get(entry[1]), int(entry[2])
        return sizes[position] if isinstance(sizes, (tuple, list)) and position < len(sizes) else None
    holder = vars(module).get("config") if attribute.startswith(IN_CONFIG) else module
    return getattr(holder, "__dict__", {}).get(attribute.removeprefix(IN_CONFIG))


def set_count(module: nn.Module, attribute: str, kept: Sequence[int], before: int) -> None:
    """Set a count to the number of `kept` things; a module whose code does not accept fewer gets a class that
    does.
    """
    value = len(kept)
    if attribute.startswith(IN_CONFIG):
        module.config = copy.copy(module.config)  # other modules share the old one
        setattr(module.config, attribute.removeprefix(IN_CONFIG), value)
        return
    if entry := _ENTRY.fullmatch(attribute):
        sizes = list(vars(module)[entry[1]])
        sizes[int(entry[2])] = value
        setattr(module, entry[1], type(vars(module)[entry[1]])(sizes))
        return
    if KEPT_HEADS.fullmatch(attribute):
        heads, *left = vars(module).get(attribute, (before, *range(before)))
        setattr(module, attribute, (heads, *(left[position] for position in kept)))
        accept_counts(module)
        return
    if attribute in HEADS_WIDTHS and not isinstance(module, NarrowHeads):
        vars(module)["input_width"] = before
    if attribute == "num_heads" and (type(module) in FEWER_HEADS or type(module) in FEWER_HEADS.values()):
        remember_heads(module, kept, before)
    setattr(module, attribute, value)
    accept_counts(module)


def accept_counts(module: nn.Module) -> None:
    """Give a module with fewer heads a class that accepts them, if its own does not."""
    if any(name in HEADS_WIDTHS or KEPT_HEADS.fullmatch(name) for name in vars(module)):
        module.__class__ = narrow_class(type(module))
    module.__class__ = FEWER_HEADS.get(type(module), type(module))
