"""Printing to streams that are closed or full, or whose encoding lacks a character."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def usable_streams() -> Iterator[None]:
    """Inside, printing does not fail; a full device ends the process with one sentence and exit code 1."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # the shell closed it: >&-
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # until the process ends
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # for characters that the encoding does not have
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here, because a failure while Python ends cannot be caught
    except OSError as error:
        if error.errno not in FULL:
            raise
        # What is still in the buffer goes nowhere, so that Python does not fail on it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(f"Error: Cannot write: {error.strerror}. Free some space, or choose another place.")
