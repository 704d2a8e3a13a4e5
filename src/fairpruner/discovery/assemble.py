"""Make spaces of units from classes of ids, and record the reasons for those that are left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from fairpruner.core.arrays import Ints
from fairpruner.core.units import Count, Kind, Role, Slice, UnitSpace
from fairpruner.discovery.heads import head_counts
from fairpruner.discovery.ids import Partition, Usage
from fairpruner.discovery.recorder import BLANK, SizeAttribute
from fairpruner.discovery.trace import Trace


def assemble(trace: Trace, model: nn.Module) -> tuple[list[UnitSpace], dict[str, str]]:
    """The spaces, and name -> reason for units that a weight writes but that cannot be removed."""
    partition = trace.partition
    families = _families(partition)
    slices = _slices(partition, families)
    counts = _counts(trace.size_attributes, families)
    routed = {axis.tensor for axis in partition.axes if partition.own_usage[axis.start] & Usage.ROUTED}
    spaces: list[UnitSpace] = []
    left_out: dict[str, str] = {}
    for number, name in enumerate(_names(partition, families)):
        ids = families.members[number]
        reason = _why_not(partition, ids)
        if reason:
            left_out[name] = reason
            continue
        producer = partition.axes[families.producer[number]].tensor
        kind = _kind(
            partition, ids, matrices_only=producer in routed or model.get_parameter(producer).ndim < 3
        )
        space = UnitSpace(
            name, kind, families.size(number), tuple(slices[number]), tuple(counts.get(number, ()))
        )
        if kind == "head":
            space = replace(space, counts=(*space.counts, *head_counts(space, model)))
        spaces.append(space)
    return spaces, left_out


def as_data_flows(spaces: Iterable[UnitSpace], trace: Trace) -> list[UnitSpace]:
    """Spaces in the order in which the forward pass first used the weights that write them."""
    met = {(axis.tensor, axis.dim): position for position, axis in enumerate(trace.partition.axes)}
    return sorted(
        spaces,
        key=lambda space: min(
            met.get((s.tensor, s.dim), len(met)) for s in space.slices_of("write") or space.slices
        ),
    )


@dataclass(frozen=True, eq=False)
class _Families:
    """A family is a set of classes that own indices of exactly the same axes.

    A family becomes one space, and each of its classes one unit. Families are in the order of their
    producers. For every id, [ids], `of` is its family (-1: none) and `unit` is its unit in this family.
    """

    members: list[Ints]  # the ids of each family
    producer: list[int]  # the first axis that writes each family, a position in Partition.axes
    of: Ints
    unit: Ints

    def size(self, number: int) -> int:
        return int(self.unit[self.members[number]].max()) + 1


def _families(partition: Partition) -> _Families:
    """The families that some weight writes.

    Example: a Linear(4, 8), and a Linear(8, 2) that reads it. The rows of the first, its bias and the
    columns of the second make 8 classes of 3 ids. All own indices of the same 3 axes, so they are one
    family of 8 units.
    """
    axis_of = np.repeat(np.arange(len(partition.axes)), [a.size for a in partition.axes])
    axis_of = np.concatenate([[-1], axis_of]).astype(np.int64)  # [ids]; NONE lies on no axis
    written = np.flatnonzero(partition.usage & (Usage.WRITE | Usage.ROUTED) == Usage.WRITE)
    written = written[written > 0]
    signature = _signatures(partition, axis_of)
    order = written[np.argsort(signature[written], kind="stable")]
    members = [f for f in np.split(order, np.flatnonzero(np.diff(signature[order])) + 1) if f.size]

    def first_writer(ids: Ints) -> int:
        """Axes are numbered as the forward pass met them."""
        return int(axis_of[ids[partition.own_usage[ids] & Usage.WRITE != 0]].min())

    producer = [first_writer(ids) for ids in members]
    order = np.argsort(producer, kind="stable")
    members, producer = [members[n] for n in order], [producer[n] for n in order]
    of, unit = (np.full(partition.roots.size, -1, dtype=np.int64) for _ in range(2))
    for number, ids in enumerate(members):
        of[ids] = number
        # Units are numbered by their first index in the producer.
        classes, first = np.unique(partition.roots[ids[axis_of[ids] == producer[number]]], return_index=True)
        rank = np.argsort(np.argsort(first))
        unit[ids] = rank[np.searchsorted(classes, partition.roots[ids])]
    return _Families(members, producer, of, unit)


def _signatures(partition: Partition, axis_of: Ints) -> Ints:
    """A number for each id; it is equal for classes of the same axes that are locked for the same reason."""
    pairs = np.sort(partition.roots[1:] * len(partition.axes) + axis_of[1:])
    pairs = pairs[np.flatnonzero(np.diff(pairs, prepend=-1))]  # each class on each axis, once
    roots, axes = np.divmod(pairs, max(len(partition.axes), 1))
    token = np.random.default_rng(0).integers(1, 2**62, size=len(partition.axes))
    total = np.zeros(partition.roots.size, dtype=np.int64)
    np.add.at(total, roots, token[axes])  # wraps around: a hash of the set of axes
    return total[partition.roots] + partition.lock * 7919


def _names(partition: Partition, families: _Families) -> Iterator[str]:
    """The producer's module path; further families of the same producer are numbered."""
    times: dict[str, int] = {}
    for position in families.producer:
        tensor = partition.axes[position].tensor
        name = module_of(tensor)
        times[name] = times.get(name, 0) + 1
        yield f"{name}#{times[name]}" if times[name] > 1 else name


def module_of(tensor: str) -> str:
    """The path of the module that holds a tensor; for a parametrized tensor, of the module that uses it."""
    if ".parametrizations." in tensor:
        return tensor.split(".parametrizations.")[0]
    return tensor.rpartition(".")[0] or tensor


def _why_not(partition: Partition, ids: Ints) -> str:
    """Why the units of a family cannot be removed; "" if they can."""
    if partition.lock[ids[0]]:
        return partition.reasons[int(partition.lock[ids[0]])]
    if not partition.usage[ids[0]] & Usage.READ:
        return "no weight reads it"
    if np.unique(partition.roots[ids]).size == 1:
        return (
            "a norm, a softmax or a shared size ties all its channels, so they can only be removed together"
        )
    return ""


def _kind(partition: Partition, ids: Ints, *, matrices_only: bool) -> Kind:
    if partition.usage[ids[0]] & Usage.HEAD:
        return "head"
    return "hidden" if matrices_only else "channel"


def _slices(partition: Partition, families: _Families) -> list[list[Slice]]:
    """The slices of every family, in the order in which the forward pass used them last."""
    found: list[list[tuple[int, Slice]]] = [[] for _ in families.members]
    for axis in partition.axes:
        if axis.tensor == BLANK:
            continue
        ids = axis.ids
        for number in np.unique(families.of[ids]):
            if number >= 0:
                owner = np.where(families.of[ids] == number, families.unit[ids], -1)
                part = Slice(axis.tensor, axis.dim, owner, _role(partition, ids[owner >= 0]))
                found[number].append((int(partition.last[ids].max()), part))
    return [[part for _, part in sorted(parts, key=lambda item: item[0])] for parts in found]


def _role(partition: Partition, ids: Ints) -> Role:
    usage = int(np.bitwise_or.reduce(partition.own_usage[ids]))
    return "read" if usage & Usage.READ else "write" if usage & Usage.WRITE else "carry"


def _counts(attributes: Iterable[SizeAttribute], families: _Families) -> dict[int, list[Count]]:
    """Family number -> the attributes that count its units."""
    found: dict[int, list[Count]] = {}
    for attribute in attributes:
        of = families.of[attribute.ids]
        for number in np.unique(of[of >= 0]):
            owner = np.where(of == number, families.unit[attribute.ids], -1)
            found.setdefault(int(number), []).append(Count(attribute.module, attribute.attribute, owner))
    return found
