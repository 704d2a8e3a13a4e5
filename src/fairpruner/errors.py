"""The exception and the warning of this package, and checks that every stage shares."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from numbers import Integral
from types import ModuleType

LISTED = 40  # names in an error


class FairprunerError(Exception):
    """A mistake that the caller can correct.

    The message states what was found, what was expected and the next step.
    """


class FairprunerWarning(UserWarning):
    """The call works but may not give what the caller wants; the message states the next step."""


def unknown(what: str, found: object, known: Iterable[str]) -> FairprunerError:
    """The error for a name that is not one of `known`; it suggests the closest known name.

    >>> print(unknown("metric", "flop", ["params", "flops"]))
    Unknown metric 'flop': did you mean 'flops'? Known: flops, params.
    """
    names = sorted(known)
    close = get_close_matches(str(found), names, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    shown = ", ".join(name[:60] for name in names[:LISTED]) + (", …" if len(names) > LISTED else "")
    return FairprunerError(f"Unknown {what} {str(found)[:200]!r}: {hint}Known: {shown or 'none'}.")


def another_model(opening: str, found: str, expected: str, step: str) -> FairprunerError:
    """The error for a plan, spaces or a table made for a model of another architecture.

    >>> print(another_model("The plan belongs", "1f", "2c", "Score this model."))
    The plan belongs to another model: found the fingerprint 1f, expected 2c. Score this model.
    """
    return FairprunerError(
        f"{opening} to another model: found the fingerprint {found}, expected {expected}. {step}"
    )


def is_whole_number(value: object, at_least: int) -> bool:
    """Whether a value is an integer, of Python or numpy, that is not below `at_least`; a bool is not.

    >>> is_whole_number(3, at_least=1), is_whole_number(True, at_least=1), is_whole_number(2.0, at_least=1)
    (True, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= at_least


def check_whole_number(name: str, value: object, at_least: int = 1) -> None:
    """Raise unless an argument is a whole number that is not below `at_least`.

    >>> check_whole_number("epochs", 0)
    Traceback (most recent call last):
    ...
    fairpruner.errors.FairprunerError: epochs=0, expected a whole number of at least 1.
    """
    if not is_whole_number(value, at_least):
        raise FairprunerError(f"{name}={value!r}, expected a whole number of at least {at_least}.")


def import_extra(module: str, extra: str, what: str) -> ModuleType:
    """Import a module of an optional package; the error names the extra that installs it.

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
