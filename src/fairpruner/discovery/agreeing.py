"""Whether spaces from a file are those of a model: a trace of the model must find the same units.

The output of a cut cannot show everything. With texts of one token, for example, attention does not depend on
queries and keys, so a file could name the wrong rows of their weights. What belongs together in a trace does
not depend on the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from fairpruner.core.arrays import Ints
from fairpruner.core.units import Count, Slice, UnitSpace
from fairpruner.discovery.heads import head_counts
from fairpruner.discovery.recorder import BLANK
from fairpruner.discovery.routed import expert_space
from fairpruner.discovery.stream import as_scales, rms_norms
from fairpruner.discovery.trace import Trace, trace
from fairpruner.models.experts import expert_blocks

IsCutRight = Callable[[Sequence[UnitSpace]], bool]


def untraced(
    model: nn.Module, examples: Sequence[Any], spaces: Sequence[UnitSpace], *, is_cut_right: IsCutRight
) -> str:
    """Why some units are not those that a trace of the model finds; "" if they are.

    Residual blocks are not traced. An attribute that discovery would not take for a count of these units is
    refused if the cut is right without it: the example may not use it, and any value would do.
    """
    experts = [expert_space(model, block, examples[0]) for block in expert_blocks(model)]
    claimed = {norm.module: norm for space in spaces for norm in space.norms}
    norms = rms_norms(model, examples[0]) if claimed else {}
    for path, norm in claimed.items():
        if path not in norms or norms[path].to_json() != norm.to_json():
            return f"{path} is no RMSNorm with this epsilon"
    for space in spaces:
        reason = _misplaced(space)
        if reason:
            return reason
    for space in (space for space in spaces if space.kind == "expert"):
        if not any(_are_alike(space, known) for known in experts):
            return f"the experts of space {space.name!r} are not those of the model"
    with as_scales(model, norms.values()):
        seen = trace(model, examples, [known for known in experts if known.min_keep < known.size])
    units = _Units(seen)
    odd: set[str] = set()  # attributes
    for space in (space for space in spaces if space.kind not in ("expert", "block")):
        reason = units.disagreement(space)
        if reason:
            return reason
        known = {_key(count) for count in (*units.counts(space), *head_counts(space, model))}
        odd |= {count.attribute for count in space.counts if _key(count) not in known}
    for attribute in sorted(odd):
        without = [
            replace(space, counts=tuple(c for c in space.counts if c.attribute != attribute))
            for space in spaces
        ]
        if is_cut_right(without):
            return f"it sets the attribute {attribute}, which does not count these units"
    return ""


def _misplaced(space: UnitSpace) -> str:
    """Why a space has parts that its kind does not have; "" if it has none.

    A residual block owns whole tensors of modules that are replaced, and counts nothing.
    """
    if (space.replaced and space.kind != "block") or (space.norms and space.kind != "stream"):
        return f"space {space.name!r} of kind {space.kind} replaces modules or rescales norms"
    if space.kind != "block":
        return ""
    inside = tuple(f"{part.module}." for part in space.replaced)
    whole = all(
        part.dim == 0 and part.owner[0] >= 0 and (part.owner == part.owner[0]).all() for part in space.slices
    )
    if space.counts or not whole or not all(part.tensor.startswith(inside) for part in space.slices):
        return f"space {space.name!r} of kind block owns more than whole tensors of its blocks"
    return ""


def _key(count: Count) -> tuple[str, str, bytes]:
    return count.module, count.attribute, count.owner.astype(np.int64).tobytes()


def _are_alike(space: UnitSpace, known: UnitSpace) -> bool:
    """Whether two spaces of experts have the same slices, counts and groups."""

    def facts(of: UnitSpace) -> tuple[Any, ...]:
        slices = {(s.tensor, s.dim, s.role, s.owner.astype(np.int64).tobytes()) for s in of.slices}
        return of.size, of.groups, slices, {_key(count) for count in of.counts}

    return facts(space) == facts(known) and space.min_keep >= known.min_keep


class _Units:
    """The classes of ids of a trace, which can only be removed together."""

    def __init__(self, seen: Trace) -> None:
        self._seen, self._partition = seen, seen.partition
        self._ids = {(axis.tensor, axis.dim): axis.ids for axis in self._partition.axes}
        real = [axis.ids for axis in self._partition.axes if axis.tensor != BLANK]
        self._real = np.concatenate(real) if real else np.zeros(0, dtype=np.int64)

    def disagreement(self, space: UnitSpace) -> str:
        """Why the units of a space are not whole classes that can be removed; "" if they are."""
        unit = self._unit_of_ids(space)
        for part in self._slices(space):
            if (part.tensor, part.dim) not in self._ids:
                return f"the example does not use {part.tensor}"
        roots = self._partition.roots
        lowest, highest = np.full(roots.size, space.size), np.full(roots.size, -1)
        np.minimum.at(lowest, roots[self._real], unit[self._real])
        np.maximum.at(highest, roots[self._real], unit[self._real])
        owned = unit >= 0
        split = np.flatnonzero(owned & (lowest[roots] != highest[roots]))
        if split.size:
            return f"a unit of {self._tensor(split[0])} is not one unit of the model"
        locked = np.flatnonzero(owned & (self._partition.lock > 0))
        if locked.size:
            reason = self._partition.reasons[int(self._partition.lock[locked[0]])]
            return f"{self._tensor(locked[0])} {reason}"
        return ""

    def counts(self, space: UnitSpace) -> Iterator[Count]:
        """The attributes that count units of a space in the trace."""
        unit = self._unit_of_ids(space)
        for attribute in self._seen.size_attributes:
            if (unit[attribute.ids] >= 0).any():
                yield Count(attribute.module, attribute.attribute, unit[attribute.ids])

    def _slices(self, space: UnitSpace) -> list[Slice]:
        """The slices of more than one index; a single one is not followed."""
        return [part for part in space.slices if part.owner.size > 1]

    def _unit_of_ids(self, space: UnitSpace) -> Ints:
        """The unit that owns each id, or -1."""
        unit = np.full(self._partition.roots.size, -1)
        for part in self._slices(space):
            ids = self._ids.get((part.tensor, part.dim))
            if ids is not None:
                unit[ids] = np.maximum(unit[ids], part.owner)
        return unit

    def _tensor(self, number: int) -> str:
        """The tensor on which an id lies."""
        return next(a.tensor for a in self._partition.axes if a.start <= number < a.start + a.size)
