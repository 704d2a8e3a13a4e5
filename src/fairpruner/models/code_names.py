"""The names that the code of a module mentions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from torch import nn


def names_in_code(cls: type[nn.Module]) -> frozenset[str] | None:
    """All names in the methods of a module class, except its constructor; None if `forward` cannot be read.

    >>> sorted({"weight", "in_features"} & names_in_code(nn.Linear))
    ['weight']
    """
    names: set[str] = set()
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for name, member in vars(base).items():
            if callable(member) and name not in ("__init__", "extra_repr", "reset_parameters"):
                code = _code(member)
                if code is None and name == "forward":
                    return None
                names |= set(_names(code)) if code is not None else set()
    return frozenset(names)


def _code(function: Callable[..., Any]) -> CodeType | None:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return getattr(function, "__code__", None)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
