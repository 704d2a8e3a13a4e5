"""The one exception a user of this package has to know."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType


class FairprunerError(Exception):
    """A mistake the caller can mend: says what was found, what was expected and what to do next."""


class FairprunerWarning(UserWarning):
    """Something that works but may not be what the caller wants, with what to do about it."""


def unknown(what: str, found: object, known: Iterable[str]) -> FairprunerError:
    """The error for a name that is not one of `known`, with the closest one.

    >>> print(unknown("metric", "flop", ["params", "flops"]))
    Unknown metric 'flop': did you mean 'flops'? Known: flops, params.
    """
    names = sorted(known)
    close = get_close_matches(str(found), names, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return FairprunerError(f"Unknown {what} {found!r}: {hint}Known: {', '.join(names) or 'none'}.")


def another_model(opening: str, found: str, expected: str, step: str) -> FairprunerError:
    """The error for a plan, spaces or a table made for a model of another architecture.

    >>> print(another_model("The plan belongs", "1f", "2c", "Score this model."))
    The plan belongs to another model: found the fingerprint 1f, expected 2c. Score this model.
    """
    return FairprunerError(
        f"{opening} to another model: found the fingerprint {found}, expected {expected}. {step}"
    )


def import_extra(module: str, extra: str, what: str) -> ModuleType:
    """A module of an optional package, or the error that names the extra which installs it.

    >>> import_extra("no_such_package.part", "train", "Recovery")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fairpruner.errors.FairprunerError: Recovery needs no_such_package, which is not installed: pip install ...
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise FairprunerError(
            f"{what} needs {error.name}, which is not installed: pip install 'fairpruner[{extra}]'."
        ) from error
