"""The one exception a user of this package has to know."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


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
