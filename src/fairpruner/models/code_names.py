"""The names that the code of a module mentions."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn


def names_in_code(cls: type[nn.Module]) -> frozenset[str] | None:
    """All names in the methods of a module class, except its constructor; None if `forward` cannot be read.

    >>> sorted({"weight", "in_features"} & names_in_code(nn.Linear))
    ['weight']
    """
    names: set[str] = set()
    for name, method in _methods(cls):
        if method is None and name == "forward":
            return None
        names |= set(_names(method.__code__)) if method is not None else set()
    return frozenset(names)


def names_in_functions(cls: type[nn.Module]) -> frozenset[str]:
    """All names in the functions outside of a module class that its methods mention.

    Hugging Face models compute attention in such a function, which reads attributes of the module.
    """
    methods = [method for _, method in _methods(cls) if method is not None]
    mentioned = (m.__globals__.get(name) for m in methods for name in set(_names(m.__code__)))
    functions = (function for value in mentioned if (function := _function(value)) is not None)
    return frozenset(name for function in functions for name in _names(function.__code__))


def _methods(cls: type[nn.Module]) -> Iterator[tuple[str, FunctionType | None]]:
    """Name and function of all methods that may run in a forward pass; None for what cannot be read."""
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for name, member in vars(base).items():
            if callable(member) and name not in ("__init__", "extra_repr", "reset_parameters"):
                yield name, _function(member)


def _function(value: Any) -> FunctionType | None:
    """A function, without what decorators put around it; None for anything else."""
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value if isinstance(value, FunctionType) else None


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
