"""Restoring all state that a model holds: tensors, plain attributes, hooks, modes, gradients.

A model's forward pass may change any of it: caches of anchors or masks, running statistics, counters, lists
of features. `discover`, `score` and other calls that must not change the model undo these changes.

The tensors and dicts that its classes hold, which are caches, are restored too. What lies elsewhere is not:
variables of functions and of Python files. The hooks of a model are restored, and what they recorded stays,
because a hook may be the caller's way to watch a call.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairpruner.errors import FairprunerError
from fairpruner.models.randomness import restore_generator
from fairpruner.models.torch_private import TorchDispatchMode, base_of, written_tensors

# If all parameters take at most this many bytes, they are copied beforehand. In another model, a parameter
# is copied when an operation is about to write into it; few models do that in their forward pass.
COPIED_PARAMETERS = 1 << 30
# Objects inside objects are followed to this depth: a model may hold a trainer that holds the whole program.
DEPTH = 4
# Objects of these packages hold no state of a model, or state that is restored in other ways.
FOREIGN = (sys.stdlib_module_names - {"collections", "types", "weakref"}) | {
    *("torch", "numpy", "accelerate", "triton"),
    "fairpruner",
}

Undo = Callable[[], object]


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restores everything that can be reached from the model, also after an exception.

    >>> class Cached(nn.Linear):
    ...     shape = None
    ...     def forward(self, x):
    ...         self.shape = x.shape
    ...         return super().forward(x)
    >>> model = Cached(3, 2)
    >>> with unchanged(model):
    ...     _ = model(torch.ones(1, 3))
    >>> model.shape
    """
    memory, writes = _Memory(), None
    if not _is_small(model):
        memory.copying = False
        writes = _CopyOnWrite(model, memory.undo)
    memory.remember(model)
    try:
        with writes or nullcontext():
            yield
    finally:
        memory.restore()


@contextmanager
def classes_unchanged(model: nn.Module) -> Iterator[None]:
    """Restores the dicts and tensors that the classes of a model's modules hold; its copies share them.

    `lru_cache` on a method keeps every model that it was called on, so these caches are emptied.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if not _is_foreign(kind)}
    memory, before = _Memory(), {kind: dict(vars(kind)) for kind in kinds}
    for held in before.values():
        memory.remember(_caches(held))
    methods = [getattr(held, "__func__", held) for names in before.values() for held in names.values()]
    called = {method: method.cache_info() for method in methods if hasattr(method, "cache_info")}
    try:
        yield
    finally:
        memory.restore()
        for kind, names in before.items():
            _restore_class(kind, names)
        for method, calls in called.items():
            if method.cache_info() != calls:
                method.cache_clear()


class _Memory:
    """The functions that undo every change to the objects that can be reached from some object."""

    def __init__(self) -> None:
        self.undo: list[Undo] = []
        self.copying = True  # of parameters
        self._alive: list[Any] = []  # keeps ids from being used again
        self._seen: set[int] = set()

    def remember(self, root: Any) -> None:
        """Note the present state of an object, and of all that it holds."""
        waiting: list[tuple[Any, int]] = [(root, 0)]
        while waiting:
            value, depth = waiting.pop()
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._alive.append(value)
                waiting += self._parts(value, depth)

    def restore(self) -> None:
        """Undo all changes."""
        failed: BaseException | None = None
        for undo in reversed(self.undo):
            try:
                undo()
            except BaseException as error:  # noqa: PERF203 (one that fails does not keep others from it)
                failed = failed or error
        if failed is not None:
            raise failed

    def _parts(self, value: Any, depth: int) -> list[tuple[Any, int]]:
        """Note the present state of one object, and return the objects that it holds."""
        if isinstance(value, Tensor):
            self.undo += _tensor(value, copying=self.copying or not isinstance(value, nn.Parameter))
            return []
        if isinstance(value, nn.Module):
            if getattr(value, "max_norm", None):  # such an embedding rescales its rows when it reads them
                self.undo += [_values(p) for p in value.parameters(recurse=False)]
            for name, held in vars(value).items():
                if "_hooks" in name and isinstance(held, dict):  # the hooks themselves are not followed
                    self._seen.add(id(held))
                    self.undo.append(partial(_restore_dict, held, list(held.items())))
            return self._parts(vars(value), depth)
        if isinstance(value, dict):
            self.undo.append(partial(_restore_dict, value, list(value.items())))
            return [(item, depth) for item in value.values()]
        if isinstance(value, (list, deque)):
            self.undo.append(partial(_restore_sequence, value, list(value)))
            return [(item, depth) for item in value]
        if isinstance(value, set):
            self.undo.append(partial(_restore_set, value, set(value)))
            return []
        if isinstance(value, (tuple, frozenset)):
            return [(item, depth) for item in value]
        if isinstance(value, np.ndarray):
            self.undo += [partial(_restore_array, value, value.copy())] if value.flags.writeable else []
            return []
        generator = restore_generator(value)
        if generator is not None:
            self.undo.append(generator)
            return []
        if depth == DEPTH or not _holds_state(value):
            return []
        slots = {name: getattr(value, name) for name in slot_names(value) if hasattr(value, name)}
        self.undo.append(partial(_restore_slots, value, slots))
        return [(held, depth + 1) for held in (slots, getattr(value, "__dict__", slots))]


class _CopyOnWrite(TorchDispatchMode):
    """Copies a parameter before the first operation that writes into its memory."""

    def __init__(self, model: nn.Module, undo: list[Undo]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._undo = undo
        self._uncopied: dict[int, list[nn.Parameter]] = {}  # by where their memory begins
        for parameter in model.parameters():
            if not parameter.is_meta and parameter.layout is torch.strided:
                self._uncopied.setdefault(_memory(parameter), []).append(parameter)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in written_tensors(func, args, kwargs or {}):
            if tensor.layout is torch.strided:
                self._undo += [_values(p) for p in self._uncopied.pop(_memory(tensor), ())]
        return func(*args, **(kwargs or {}))


def _is_small(model: nn.Module) -> bool:
    """Whether a copy of the parameters takes little memory, and not more than they take themselves.

    Random weights that are windows into one pool would take a multiple.
    """
    parameters = [p for p in model.parameters() if type(p) is nn.Parameter and p.layout is torch.strided]
    pools = {_memory(p): p.untyped_storage().nbytes() for p in parameters if not p.is_meta}
    shared = sum(pools.values()) < sum(p.nbytes for p in parameters if not p.is_meta)
    return not shared and sum(p.nbytes for p in model.parameters()) <= COPIED_PARAMETERS


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _holds_state(value: Any) -> bool:
    """Whether an object may hold state of the model; classes, functions and foreign objects do not."""
    if isinstance(value, (type, FunctionType, MethodType)):
        return False
    return is_dataclass(value) or not _is_foreign(type(value))


def _is_foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in FOREIGN


def _caches(names: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a class in which it may keep what its modules computed."""
    kinds = (Tensor, np.ndarray, dict)  # a list is rather a log
    return {
        name: held for name, held in names.items() if isinstance(held, kinds) and not name.startswith("__")
    }


def slot_names(value: Any) -> list[str]:
    """The attributes of an object that its classes keep in `__slots__`."""
    names = []
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            hidden = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if hidden else name)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _tensor(tensor: Tensor, *, copying: bool) -> Iterator[Undo]:
    """A function that undoes changes to one tensor; until it is called, the tensor has no gradient."""
    if tensor.is_leaf:
        if tensor.grad is not None:
            yield partial(setattr, tensor, "grad", tensor.grad)
            tensor.grad = None
        elif tensor.requires_grad:
            yield partial(setattr, tensor, "grad", None)
        yield partial(_restore_flag, tensor, tensor.requires_grad)
    if tensor.is_meta or tensor.layout is not torch.strided:
        return
    if copying:
        yield _values(tensor)
    yield partial(_restore_memory, tensor, tensor.detach())  # undone first: the tensor may have been resized


def _values(tensor: Tensor) -> Undo:
    return partial(_restore_values, tensor, tensor.detach().clone())


def _restore_dict(held: dict[Any, Any], before: list[tuple[Any, Any]]) -> None:
    now = list(held.items())
    if len(now) != len(before) or any(
        key is not old_key or value is not old
        for (key, value), (old_key, old) in zip(now, before, strict=True)
    ):
        # The methods of the base class, since a subclass may override them; an OrderedDict has its own order.
        kind = OrderedDict if isinstance(held, OrderedDict) else dict
        kind.clear(held)
        for key, value in before:
            kind.__setitem__(held, key, value)


def _restore_sequence(held: list[Any] | deque[Any], before: list[Any]) -> None:
    if len(held) != len(before) or any(a is not b for a, b in zip(held, before, strict=True)):
        held.clear()
        held.extend(before)


def _restore_set(held: set[Any], before: set[Any]) -> None:
    if held != before:
        held.clear()
        held.update(before)


def _restore_slots(held: Any, before: dict[str, Any]) -> None:
    for name in slot_names(held):
        if name not in before and hasattr(held, name):
            object.__delattr__(held, name)  # the methods of the base class, since the object may be frozen
        elif name in before and getattr(held, name, None) is not before[name]:
            object.__setattr__(held, name, before[name])


def _restore_class(kind: type, before: Mapping[str, Any]) -> None:
    for name in _caches(vars(kind)).keys() | _caches(before).keys():
        if name not in before:
            type.__delattr__(kind, name)
        elif vars(kind).get(name) is not before[name]:
            type.__setattr__(kind, name, before[name])


def _restore_array(array: np.ndarray, before: np.ndarray) -> None:
    if array.tobytes() != before.tobytes():
        array[...] = before


def _restore_flag(tensor: Tensor, requires_grad: bool) -> None:
    if not tensor.is_leaf:  # a buffer that was written in place from activations with gradients
        if base_of(tensor) is not tensor:
            raise FairprunerError(
                f"The model writes activations with gradients into a tensor {list(tensor.shape)} that"
                " it holds. It is a view of another, so it cannot be restored: hold a clone of it, or write"
                " under torch.no_grad()."
            )
        tensor.detach_()
    if tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)


def _restore_memory(tensor: Tensor, before: Tensor) -> None:
    """Restore the memory of a tensor whose `.data` was replaced."""
    if tensor.data_ptr() != before.data_ptr() or tensor.shape != before.shape:
        tensor.data = before


def _restore_values(tensor: Tensor, before: Tensor) -> None:
    # Inference mode can write into any tensor, and it does not raise the tensor's version.
    with torch.inference_mode():
        # Some types, such as complex32, cannot be compared. What is not a number is written anew, too.
        if tensor.is_complex() or not torch.equal(tensor, before):
            once = tuple(slice(1) if step == 0 else slice(None) for step in tensor.stride())
            tensor[once].copy_(before[once])  # an expanded tensor can be written once only
