"""Calling a user's model, and leaving it as it was."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from fairpruner.errors import FairprunerError
from fairpruner.models.preserving import classes_unchanged, slot_names, unchanged
from fairpruner.models.randomness import random_state_kept

# torch raises a plain RuntimeError with these words if the main memory is full.
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")

BATCHED = "Inputs need a batch dimension: wrap a dataset of single samples in torch.utils.data.DataLoader."


def is_out_of_memory(error: Exception) -> bool:
    """Whether an exception says that memory ran out."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or any(words in str(error) for words in OUT_OF_MEMORY)


def call(model: nn.Module, example: Any) -> Any:
    """Call the model with a copy of an example, which the model may overwrite."""
    return call_directly(model, copied(example))


def call_directly(model: nn.Module, example: Any) -> Any:
    """Call the model with an example: a tensor, a tuple of arguments, or a dict of keyword arguments."""
    if isinstance(example, Mapping):
        return model(**example)
    if isinstance(example, (tuple, list)):
        return model(*example)
    return model(example)


def call_checked(model: nn.Module, example: Any) -> Any:
    """`call`; a failure is reported in one sentence that shows the example."""
    try:
        return call(model, example)
    except FairprunerError:
        raise
    except Exception as error:
        opening = "Memory ran out" if is_out_of_memory(error) else "The example does not fit the model"
        step = "" if is_out_of_memory(error) else f". {BATCHED}"
        raise FairprunerError(
            f"{opening}: {type(model).__name__} called with {describe(example)} raised"
            f" {type(error).__name__}: {error}{step}"
        ) from error


@contextmanager
def naming_failure(model: nn.Module, doing: str) -> Iterator[None]:
    """Report an exception of the user's model in one sentence that says what was being done."""
    try:
        yield
    except FairprunerError:
        raise
    except Exception as error:
        raise FairprunerError(
            f"{type(model).__name__} failed while {doing}: it raised {type(error).__name__}: {error}"
        ) from error


def copied(value: Any) -> Any:
    """A copy of an example: the same structure, every tensor cloned, other objects copied."""
    return _copied(value, {})


def _copied(value: Any, clones: dict[int, Any]) -> Any:
    if id(value) in clones:  # one tensor given twice stays one tensor
        return clones[id(value)]
    if isinstance(value, torch.Tensor):
        clones[id(value)] = clone = value.detach().clone().requires_grad_(value.requires_grad)
        return clone
    if isinstance(value, Mapping):
        named = {key: _copied(item, clones) for key, item in value.items()}
        return named if type(value) in (dict, OrderedDict) else _mapping_like(value, named)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_copied(item, clones) for item in value))
    if isinstance(value, (tuple, list)):
        items = [_copied(item, clones) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    try:
        return copy.deepcopy(value, clones)
    except (TypeError, RuntimeError):  # deepcopy refuses handles and tensors with a gradient history
        return value


def _mapping_like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A copy of a mapping with other items, of its own class if that can be changed."""
    twin: Any = copy.copy(value)
    try:
        for key, item in items.items():
            twin[key] = item
    except TypeError:
        return items
    return twin


def describe(value: Any) -> str:
    """Types, dtypes and shapes of an example, in one line."""
    if isinstance(value, torch.Tensor):
        sizes = " nested" if value.is_nested else list(value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}{sizes}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {describe(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(describe(v) for v in value) + ")"
    return type(value).__name__


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor inside plain containers and dataclasses, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_of([getattr(value, f.name) for f in fields(value)])


def output_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor that a caller can reach in a model's output, attributes of its objects included.

    Caches are skipped: a model passes them to its own next call, so their width may shrink with the model.

    >>> from types import SimpleNamespace
    >>> [tuple(t.shape) for t in output_tensors({"a": SimpleNamespace(b=[torch.zeros(2)])})]
    [(2,)]
    """
    yield from _output_tensors(value, set())


def _output_tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if id(value) in seen or isinstance(value, (type, ModuleType, nn.Module)):
        return
    seen.add(id(value))
    if any(base.__name__.endswith("Cache") for base in type(value).__mro__):
        return
    if isinstance(value, Mapping):
        items = [*value.keys(), *value.values()]
    elif isinstance(value, (tuple, list, set, frozenset, deque)):
        items = list(value)
    elif isinstance(value, FunctionType):
        items = list(inspect.getclosurevars(value).nonlocals.values())
    elif isinstance(value, MethodType):
        items = [value.__self__]
    elif isinstance(value, partial):
        items = [value.func, value.args, value.keywords]
    else:
        items = [getattr(value, name, None) for name in slot_names(value)]
        items += getattr(value, "__dict__", {}).values()
    for item in items:
        yield from _output_tensors(item, seen)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards the model's state and all random states are as before."""
    with unchanged(model), in_eval_mode(model):
        yield


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside and afterwards, for a copy that nobody else holds; random states are restored.

    Inside, the fused kernel of `nn.MultiheadAttention` is off, because it hides the projections from
    tracing, counting and signals.
    """
    fastpath = torch.backends.mha.get_fastpath_enabled()
    devices = (tensor.device for tensor in chain(model.parameters(), model.buffers()))
    with classes_unchanged(model), random_state_kept(devices):
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            model.train()  # makes modules drop tensors that they derived from their weights
            model.eval()
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fastpath)
