"""Checks of the fields of a file's JSON content, made before anything is computed from them."""

from __future__ import annotations

import math
from typing import Any

from fairpruner.errors import FairprunerError

BIGGEST = 2**62  # of whole numbers, so that sums of two fit in 64 bits


def whole(value: Any, what: str, *, at_least: int = 0, at_most: int = BIGGEST) -> int:
    """A whole number within bounds.

    >>> whole(3, "size", at_least=1)
    3
    """
    if type(value) is not int or not at_least <= value <= at_most:
        raise _wrong(what, value, f"a whole number from {at_least} to {at_most}")
    return value


def real(value: Any, what: str) -> float:
    """A finite number."""
    if type(value) not in (int, float) or abs(value) > BIGGEST or not math.isfinite(value):
        raise _wrong(what, value, "a finite number")
    return float(value)


def text(value: Any, what: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise _wrong(what, value, "text")
    return value


def truth(value: Any, what: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise _wrong(what, value, "true or false")
    return value


def listed(value: Any, what: str) -> list[Any]:
    """A list of anything."""
    if not isinstance(value, list):
        raise _wrong(what, value, "a list")
    return value


def mapped(value: Any, what: str) -> dict[str, Any]:
    """A mapping from strings to anything."""
    if not isinstance(value, dict):
        raise _wrong(what, value, "a mapping")
    return value


def field(content: Any, name: str) -> Any:
    """A field of a mapping that must have it."""
    found = mapped(content, f"what should hold {name!r}")
    if name not in found:
        raise FairprunerError(f"The field {name!r} is missing.")
    return found[name]


def _wrong(what: str, value: Any, expected: str) -> FairprunerError:
    shown = repr(value)[:60] if type(value) in (float, str, bool, type(None)) else f"a {type(value).__name__}"
    if type(value) is int:
        shown = str(value) if abs(value) < 2**63 else "a number of more than 63 bits"
    return FairprunerError(f"{what} is {shown}, expected {expected}.")
