"""One forward pass with shadows: what the model does with every unit, seen from below its Python code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from ..calling import call_checked, evaluating, tensors_of
from ..types import Ints
from .ids import Classes, Ids
from .rules import Call, rule_for
from .shadow import EMPTY, Algebra, Layer, Shadow


@dataclass(frozen=True)
class Work:
    """MACs of one operation: proportional to the number of kept ids of each axis."""

    macs: int
    axes: tuple[Ints, ...]


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

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
        axes = rule_for(func)(call) if any(self.shadow(t).layers for t in call.tensors) else ()
        flops = flop_registry.get(func._overloadpacket)
        if flops is not None:
            self.work.append(Work(int(flops(*args, **kwargs, out_val=out)) // 2, tuple(_flat(layer) for layer in axes or ())))
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
        """Ids for every dimension of a named parameter or buffer; buffers get them only from rules that know they are statistics."""
        if id(tensor) not in self._names:
            return EMPTY
        if id(tensor) not in self._slots:
            layers = []
            for dim, size in enumerate(tensor.shape):
                if size > 1:
                    start = self.ids.new_slot(self._names[id(tensor)], dim, size).start
                    shape = [size if d == dim else 1 for d in range(tensor.ndim)]
                    layers.append(torch.arange(start, start + size).view(shape).expand(tensor.shape))
            self._slots[id(tensor)] = Shadow(tuple(layers), weight=True)
        return self._slots[id(tensor)]

    def put(self, tensor: torch.Tensor, shadow: Shadow) -> None:
        self._shadows[tensor] = shadow

    def count(self, attribute: str, value: int, ids: Ints) -> None:
        """Remember that the running module's attribute, if it has this value, counts these ids."""
        for module in reversed(self._stack[-2:]):  # the caller, or the module that called a functional helper
            if id(module) in self._modules and getattr(module, attribute, None) == value:
                self.counted.append(Counted(self._modules[id(module)], attribute, ids))
                return

    @contextmanager
    def watching_modules(self) -> Iterator[None]:
        """Know which module is running, through global hooks: the user's model gets none."""

        def leave(*_: Any) -> None:
            self._stack.pop()

        handles = [register_module_forward_pre_hook(lambda module, _: self._stack.append(module)), register_module_forward_hook(leave, always_call=True)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _flat(layer: Layer) -> Ints:
    return np.ascontiguousarray(layer.reshape(-1).numpy())


def trace(model: nn.Module, example: Any) -> Trace:
    """Run the model once on the example and follow every parameter's indices through it."""
    tracer = Tracer(model)
    with evaluating(model), torch.no_grad(), tracer.watching_modules(), tracer:
        output = call_checked(model, example)
    for tensor in tensors_of(output):
        tracer.algebra.lock(tracer.shadow(tensor), "reaches the model's output")
    return Trace(tracer.ids.classes(), tuple(tracer.work), tuple(tracer.counted))
