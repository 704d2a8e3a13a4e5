"""The state of a trace: shadows of tensors, running modules, and attributes that count units."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fairpruner.core.arrays import Ints
from fairpruner.discovery.experts import ExpertLists
from fairpruner.discovery.ids import NONE, Axis, Ids, Usage, as_ids
from fairpruner.discovery.normalised import normalised_weights
from fairpruner.discovery.shadow import EMPTY, Algebra, Shadow, extent

BLANK = "<zeros>"  # stands for the name of a tensor of zeros that the model makes in its forward pass


@dataclass(frozen=True, eq=False)
class SizeAttribute:
    """An attribute of a module that counts groups or heads, and the id of each thing it counts."""

    module: str
    attribute: str
    ids: Ints  # [value of the attribute]


class Recorder:
    """Holds the shadows of tensors; the rules of operations read and change them."""

    def __init__(self, model: nn.Module, experts: ExpertLists, shared: Collection[str] = ()) -> None:
        self.ids = Ids()
        self.algebra = Algebra(self.ids)
        self.size_attributes: list[SizeAttribute] = []
        self.running: list[nn.Module] = []  # modules whose forward has begun, outermost first
        self.random: dict[str, None] = {}  # operations that drew random numbers, and where; in order
        # Modules with weights that may be shared by heads, and the ids that met them there.
        self.suspects: list[tuple[str, Ints]] = []
        self._shared = frozenset(shared)
        self._experts = experts
        self._names = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
        self._parameters = {id(p) for p in model.parameters()}
        self._modules = {id(m): name for name, m in model.named_modules()}
        self._normalised = normalised_weights(model)
        self._shadows: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._named: dict[int, Shadow] = {}  # of parameters and buffers

    def shadow(self, tensor: Any, *, buffers: bool = False) -> Shadow:
        """The shadow of a tensor; it is empty for constants.

        Parameters and buffers get theirs when they are first used. A tensor computed from buffers alone
        counts as a constant, unless `buffers` is true.
        """
        if not isinstance(tensor, torch.Tensor):
            return EMPTY
        found: Shadow = EMPTY
        if tensor in self._shadows:
            found = self._shadows[tensor]
        elif id(tensor) in self._parameters or (buffers and tensor.is_floating_point()):
            found = self.named_shadow(tensor)
        return EMPTY if found.buffer and not buffers else found

    def put(self, tensor: torch.Tensor, shadow: Shadow) -> None:
        """Give a tensor its shadow; experts are followed only along a dimension of a weight."""
        if self._experts.axes:
            kept = tuple(
                idmap
                for idmap in shadow.maps
                if (shadow.weight and sum(extent(idmap)) == 1) or not self.ids.routed(as_ids(idmap))
            )
            shadow = replace(shadow, maps=kept)
        self._shadows[tensor] = shadow

    def named_shadow(self, tensor: torch.Tensor) -> Shadow:
        """One id for every index of every dimension of a parameter or buffer."""
        if id(tensor) not in self._names:
            return EMPTY
        if id(tensor) not in self._named:
            twins = self._experts.twins.get(id(tensor), (tensor,))
            shadows = [self._new_shadow(twin) for twin in twins]
            self._named |= {id(twin): shadow for twin, shadow in zip(twins, shadows, strict=True)}
            for shadow in shadows[1:]:
                for idmap, first in zip(shadow.maps, shadows[0].maps, strict=True):
                    self.ids.unite(as_ids(idmap), as_ids(first))
        return self._named[id(tensor)]

    def _new_shadow(self, tensor: torch.Tensor) -> Shadow:
        name = self._names[id(tensor)]
        shadow = self._with_ids(name, tensor)
        for idmap in shadow.maps:
            if shadow.buffer:
                self.ids.mark(as_ids(idmap), Usage.BUFFER)
            if name in self._normalised:
                self.ids.lock(as_ids(idmap), self._normalised[name])
        return shadow

    def _with_ids(self, name: str, tensor: torch.Tensor) -> Shadow:
        maps = []
        for dim, size in enumerate(tensor.shape if tensor.numel() else ()):
            if size > 1:
                axis = self.new_axis(name, dim, size)
                shape = [size if d == dim else 1 for d in range(tensor.ndim)]
                maps.append(torch.from_numpy(axis.ids).view(shape).expand(tensor.shape))
        return Shadow(tuple(maps), weight=True, buffer=id(tensor) not in self._parameters)

    def new_axis(self, name: str, dim: int, size: int) -> Axis:
        axis = self.ids.new_axis(name, dim, size)
        if (name, dim) in self._experts.axes:
            self.ids.mark(axis.ids, Usage.ROUTED)
        return axis

    @property
    def running_path(self) -> str:
        """The path of the innermost module that is running."""
        return next((self._modules[id(m)] for m in reversed(self.running) if id(m) in self._modules), "")

    def heads_share(self, ids: Ints, width: int) -> bool:
        """Whether a weight that reads `width` numbers at a time reads whole heads one after the other, rather
        than the same position of several groups. It is known for the modules that were given at the start;
        others are recorded as suspects.
        """
        ids = ids[ids != NONE]
        if not ids.size or not (self.ids.axis_sizes(ids) > width).all():
            return False
        self.suspects.append((self.running_path, np.unique(ids)))
        return self.running_path in self._shared

    def count(self, attribute: str, value: int, ids: Ints) -> None:
        """Record that an attribute of the running module counts these ids, if it has this value."""
        for module in reversed(self.running[-2:]):  # a helper may run inside the module with the attribute
            if id(module) in self._modules and getattr(module, attribute, None) == value:
                self.size_attributes.append(SizeAttribute(self._modules[id(module)], attribute, ids))
                return

    def count_parts(self, parts: Sequence[Ints]) -> None:
        """Remember that a tuple of the running module, if it has these lengths, counts the ids of each part
        that a tensor is split into.
        """
        for module in reversed(self.running[-2:]):
            for name, value in vars(module).items() if id(module) in self._modules else ():
                if type(value) in (tuple, list) and list(value) == [part.size for part in parts]:
                    self.size_attributes += [
                        SizeAttribute(self._modules[id(module)], f"{name}[{position}]", part)
                        for position, part in enumerate(parts)
                    ]
                    return

    def drew(self, operation: str) -> None:
        """Remember that an operation drew random numbers in the running module."""
        path = next((self._modules[id(m)] for m in reversed(self.running) if id(m) in self._modules), "")
        self.random[f"{operation} in {path or 'the model itself'}"] = None

    def finish_experts(self, model: nn.Module) -> dict[str, Axis]:
        """Treat experts that no token chose like the others of their list; returns the axis of each list."""
        # An axis for each list: its indices are the experts.
        lists = {name: self.new_axis(name, 0, len(listed)) for name, listed in self._experts.lists.items()}
        # Ids for parameters of experts that the forward pass has not used.
        routed = {name for name, _ in self._experts.axes}
        for name, parameter in model.named_parameters():
            if name in routed:
                self.named_shadow(parameter)
        # Parameters at the same place in all experts of a list get the usage of all of them together.
        axes: dict[str, list[Axis]] = {}
        for axis in self.ids.axes:
            axes.setdefault(axis.tensor, []).append(axis)
        for twins in self._experts.groups_of_twins:
            for same_place in zip(*(axes.get(self._names[id(p)], []) for p in twins), strict=True):
                self.ids.share_usage(same_place)
        return lists

    def met(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether operations have met all of these parameters."""
        return all(id(parameter) in self._named for parameter in parameters)

    def blank(self, tensor: torch.Tensor) -> None:
        """Give a new tensor of zeros its own ids, so that an initial state joins the units it is added to."""
        if tensor not in self._shadows and tensor.is_floating_point():
            self._shadows[tensor] = self._with_ids(BLANK, tensor)
            for idmap in self._shadows[tensor].maps:
                self.ids.mark(as_ids(idmap), Usage.BUFFER)

    def unmet(self, model: nn.Module) -> list[str]:
        """The names of parameters that no operation has met."""
        return [name for name, parameter in model.named_parameters() if id(parameter) not in self._named]


def flat(idmap: torch.Tensor) -> Ints:
    """The ids of a map as a flat, contiguous array."""
    return np.ascontiguousarray(as_ids(idmap))
