"""Worker processes of a data loader: one that dies is reported as such."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fairpruner.errors import FairprunerError


@contextmanager
def naming_dead_workers() -> Iterator[None]:
    """Inside, the death of a loader's worker process is a FairprunerError.

    torch raises it from a signal handler, so it may come out of any line.
    """
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise FairprunerError(f"A worker process of the data's loader died: {error}") from error
