"""One forward pass with shadows: what the model does with every unit, seen from below its Python code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from fairpruner.core.arrays import Ints
from fairpruner.core.spaces import UnitSpace
from fairpruner.discovery.ids import Classes, Ids, Slot, Use, as_ids
from fairpruner.discovery.rules import Call, rule_for
from fairpruner.discovery.shadow import EMPTY, Algebra, Layer, Shadow, extent
from fairpruner.models.calling import call_checked, evaluating, tensors_of


@dataclass(frozen=True)
class Work:
    """MACs of one operation: proportional to the number of kept ids of each axis."""

    macs: int
    axes: tuple[Ints, ...]
    expert: tuple[str, int] | None = None  # the list of modules, and the one among them, that did it


@dataclass(frozen=True)
class Counted:
    """A module's attribute that counts groups or heads: `ids` says to whom each belongs."""

    module: str
    attribute: str
    ids: Ints


@dataclass(frozen=True)
class Trace:
    """All that one forward pass told."""

    classes: Classes
    work: tuple[Work, ...]
    counted: tuple[Counted, ...]


class Tracer(TorchDispatchMode):
    """Runs every operation for real and then, by its rule, on the shadows."""

    def __init__(self, model: nn.Module, experts: Sequence[UnitSpace] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._experts = {(part.tensor, part.dim) for space in experts for part in space.slices}
        self._lists = {
            name: list(module.children())
            for name, module in model.named_modules()
            if (name, 0) in self._experts
        }
        self._places = {
            id(expert): (name, number)
            for name, listed in self._lists.items()
            for number, expert in enumerate(listed)
        }
        self._inputs: dict[tuple[str, int], Any] = {}  # of listed experts
        # Parameters that have the same place in all modules of a list are cut alike.
        alike = [
            same
            for listed in self._lists.values()
            for same in zip(*(e.parameters() for e in listed), strict=True)
        ]
        self._alike: dict[int, tuple[nn.Parameter, ...]] = {id(p): same for same in alike for p in same}
        self.ids = Ids()
        self.algebra = Algebra(self.ids)
        self.work: list[Work] = []
        self.counted: list[Counted] = []
        self._names = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
        self._parameters = {id(p) for p in model.parameters()}
        self._modules = {id(m): name for name, m in model.named_modules()}
        self._stack: list[nn.Module] = []
        self._shadows: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._slots: dict[int, Shadow] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        call = Call(self, func, args, kwargs, out)
        idle = call.results and not any(
            t.numel() for t in call.results
        )  # an expert that no token chose works on nothing
        axes = rule_for(func)(call) if not idle and any(self.shadow(t).layers for t in call.tensors) else ()
        flops = flop_registry.get(func._overloadpacket)
        if flops is not None:
            expert = next(
                (self._places[id(module)] for module in self._stack if id(module) in self._places), None
            )
            self.work.append(
                Work(
                    int(flops(*args, **kwargs, out_val=out)) // 2,
                    tuple(_flat(layer) for layer in axes or ()),
                    expert,
                )
            )
        return out

    def shadow(self, tensor: Any) -> Shadow:
        """The shadow of a tensor; parameters get theirs when they are first met, constants have none."""
        if not isinstance(tensor, torch.Tensor):
            return EMPTY
        if tensor in self._shadows:
            found: Shadow = self._shadows[tensor]
            return found
        return self.slots_of(tensor) if id(tensor) in self._parameters else EMPTY

    def slots_of(self, tensor: torch.Tensor) -> Shadow:
        """Ids for every dimension of a named parameter or buffer; buffers get them only from rules that
        know they are statistics.
        """
        if id(tensor) not in self._names:
            return EMPTY
        if id(tensor) not in self._slots:
            alike = self._alike.get(id(tensor), (tensor,))
            for other in alike:
                self._slots[id(other)] = self._new_slots(other)
                for layer, same in zip(
                    self._slots[id(other)].layers, self._slots[id(alike[0])].layers, strict=True
                ):
                    self.ids.unite(as_ids(layer), as_ids(same))
        return self._slots[id(tensor)]

    def _new_slots(self, tensor: torch.Tensor) -> Shadow:
        name, layers = self._names[id(tensor)], []
        for dim, size in enumerate(tensor.shape):
            if size > 1:
                start = self.new_slot(name, dim, size).start
                shape = [size if d == dim else 1 for d in range(tensor.ndim)]
                layers.append(torch.arange(start, start + size).view(shape).expand(tensor.shape))
        return Shadow(tuple(layers), weight=True)

    def new_slot(self, name: str, dim: int, size: int) -> Slot:
        slot = self.ids.new_slot(name, dim, size)
        if (name, dim) in self._experts:
            self.ids.mark(np.arange(slot.start, slot.start + size), Use.ROUTED)
        return slot

    def put(self, tensor: torch.Tensor, shadow: Shadow) -> None:
        """Give a tensor its shadow; experts are followed only while they lie along one dimension of a
        weight.
        """
        if self._experts:
            kept = tuple(
                layer
                for layer in shadow.layers
                if (shadow.weight and sum(extent(layer)) == 1) or not self.ids.routed(as_ids(layer))
            )
            shadow = Shadow(kept, shadow.weight)
        self._shadows[tensor] = shadow

    def count(self, attribute: str, value: int, ids: Ints) -> None:
        """Remember that the running module's attribute, if it has this value, counts these ids."""
        # the caller, or the module that called a functional helper
        for module in reversed(self._stack[-2:]):
            if id(module) in self._modules and getattr(module, attribute, None) == value:
                self.counted.append(Counted(self._modules[id(module)], attribute, ids))
                return

    def complete_experts(self, model: nn.Module) -> None:
        """Give experts that no token of the example chose what the others of their block have."""
        for name, listed in self._lists.items():
            start = self.new_slot(name, 0, len(listed)).start
            given = [self._inputs.get((name, number)) for number in range(len(listed))]
            if given[0] is not None and all(
                x is given[0] for x in given
            ):  # all work on all tokens: what one does is not done by others once it is gone
                self.work = [
                    (
                        replace(w, axes=(*w.axes, np.array([start + w.expert[1]])))
                        if w.expert and w.expert[0] == name
                        else w
                    )
                    for w in self.work
                ]
        tensors = {name for name, _ in self._experts}
        for name, parameter in model.named_parameters():
            if name in tensors:
                self.slots_of(parameter)
        slots: dict[str, list[Slot]] = {}
        for slot in self.ids.slots:
            slots.setdefault(slot.tensor, []).append(slot)
        for alike in {id(group): group for group in self._alike.values()}.values():
            for same in zip(*(slots.get(self._names[id(p)], []) for p in alike), strict=True):
                self.ids.share_use(same)

    @contextmanager
    def watching_modules(self) -> Iterator[None]:
        """Know which module is running, through global hooks: the user's model gets none."""

        def enter(module: nn.Module, inputs: Any) -> None:
            self._stack.append(module)
            if id(module) in self._places and inputs:
                self._inputs[self._places[id(module)]] = inputs[0]

        def leave(*_: Any) -> None:
            self._stack.pop()

        handles = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _flat(layer: Layer) -> Ints:
    return np.ascontiguousarray(as_ids(layer))


def trace(model: nn.Module, example: Any, experts: Sequence[UnitSpace] = ()) -> Trace:
    """Run the model once on the example and follow every parameter's indices through it, except which
    expert they belong to.
    """
    tracer = Tracer(model, experts)
    with evaluating(model), torch.no_grad(), tracer.watching_modules(), tracer:
        output = call_checked(model, example)
    for tensor in tensors_of(output):
        tracer.algebra.lock(tracer.shadow(tensor), "reaches the model's output")
    tracer.complete_experts(model)
    return Trace(tracer.ids.classes(), tuple(tracer.work), tuple(tracer.counted))
