"""Restoring all state that a model holds: tensors, plain attributes, hooks, modes, gradients.

A model's forward pass may change any of it: caches of anchors or masks, running statistics, counters, lists
of features. `discover`, `score` and other calls that must not change the model undo these changes.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairpruner.models.randomness import restore_generator
from fairpruner.models.torch_private import TorchDispatchMode, written_tensors

# If all parameters take at most this many bytes, they are copied beforehand. In a larger model, a parameter
# is copied when an operation is about to write into it; few models do that in their forward pass.
COPIED_PARAMETERS = 1 << 30
# Objects inside objects are followed to this depth: a model may hold a trainer that holds the whole program.
DEPTH = 2
FOREIGN = sys.stdlib_module_names | {"torch", "numpy", "accelerate"}

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
    memory = _Memory(model)
    try:
        with memory.writes or nullcontext():
            yield
    finally:
        memory.restore()


class _Memory:
    """The functions that undo every change to the objects that can be reached from a model."""

    def __init__(self, model: nn.Module) -> None:
        self._undo: list[Undo] = []
        self._alive: list[Any] = []  # keeps ids from being used again
        self._seen: set[int] = set()
        self._copying = sum(p.nbytes for p in model.parameters()) <= COPIED_PARAMETERS
        self.writes = None if self._copying else _CopyOnWrite(model, self._undo)
        waiting: list[tuple[Any, int]] = [(model, 0)]
        while waiting:
            value, depth = waiting.pop()
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._alive.append(value)
                waiting += self._remember(value, depth)

    def restore(self) -> None:
        """Undo all changes."""
        failed: BaseException | None = None
        for undo in reversed(self._undo):
            try:
                undo()
            except BaseException as error:  # noqa: PERF203 (one that fails does not keep others from it)
                failed = failed or error
        if failed is not None:
            raise failed

    def _remember(self, value: Any, depth: int) -> list[tuple[Any, int]]:
        """Note the present state of one object, and return the objects that it holds."""
        if isinstance(value, Tensor):
            self._undo += _tensor(value, copying=self._copying or not isinstance(value, nn.Parameter))
            return []
        if isinstance(value, nn.Module):
            if getattr(value, "max_norm", None):  # such an embedding rescales its rows when it reads them
                self._undo += [_values(p) for p in value.parameters(recurse=False)]
            return self._remember(vars(value), depth)
        if isinstance(value, dict):
            self._undo.append(partial(_restore_dict, value, list(value.items())))
            return [(item, depth) for item in value.values()]
        if isinstance(value, (list, deque)):
            self._undo.append(partial(_restore_sequence, value, list(value)))
            return [(item, depth) for item in value]
        if isinstance(value, set):
            self._undo.append(partial(_restore_set, value, set(value)))
            return []
        if isinstance(value, (tuple, frozenset)):
            return [(item, depth) for item in value]
        if isinstance(value, np.ndarray):
            self._undo += [partial(_restore_array, value, value.copy())] if value.flags.writeable else []
            return []
        generator = restore_generator(value)
        if generator is not None:
            self._undo.append(generator)
            return []
        if depth == DEPTH or not _holds_state(value):
            return []
        slots = {name: getattr(value, name) for name in slot_names(value) if hasattr(value, name)}
        self._undo.append(partial(_restore_slots, value, slots))
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


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _holds_state(value: Any) -> bool:
    """Whether an object may hold state of the model; classes, functions and foreign objects do not."""
    if isinstance(value, type) or callable(value):
        return False
    package = type(value).__module__.partition(".")[0]
    return isinstance(value, SimpleNamespace) or is_dataclass(value) or package not in FOREIGN


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


def _restore_array(array: np.ndarray, before: np.ndarray) -> None:
    if array.tobytes() != before.tobytes():
        array[...] = before


def _restore_flag(tensor: Tensor, requires_grad: bool) -> None:
    if tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)


def _restore_memory(tensor: Tensor, before: Tensor) -> None:
    """Restore the memory of a tensor whose `.data` was replaced."""
    if tensor.data_ptr() != before.data_ptr() or tensor.shape != before.shape:
        tensor.data = before


def _restore_values(tensor: Tensor, before: Tensor) -> None:
    # Inference mode can write into any tensor, and it does not raise the tensor's version.
    with torch.inference_mode():
        if not torch.equal(tensor, before):
            tensor.copy_(before)
