"""Worker processes of a data loader: the death of one is reported when its batch is requested."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fairpruner.errors import FairprunerError
from fairpruner.models.torch_private import watch_worker_processes


@contextmanager
def naming_dead_workers() -> Iterator[None]:
    """Inside, the death of a loader's worker process is a FairprunerError."""
    undo = defer_worker_deaths()
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise FairprunerError(f"A worker process of the data's loader died: {error}") from error
    finally:
        undo()


def defer_worker_deaths() -> Callable[[], object]:
    """From now on, a loader raises the death of its worker when a batch is requested; returns the undo.

    By default torch raises it at once from a signal handler, so it can interrupt any line of the program,
    also a line that reports an error or cleans up.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        return lambda: None
    watch_worker_processes()
    usual: Any = signal.getsignal(signal.SIGCHLD)

    def later(number: int, frame: Any) -> None:
        with suppress(RuntimeError):
            usual(number, frame)

    signal.signal(signal.SIGCHLD, later)
    return lambda: signal.signal(signal.SIGCHLD, usual)
