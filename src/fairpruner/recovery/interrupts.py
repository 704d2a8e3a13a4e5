"""Ctrl-C and SIGTERM during a training run: it stops after the current step, when its state can be saved."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def noticing_interrupts() -> Iterator[threading.Event]:
    """Yields an event that the first Ctrl-C or SIGTERM sets; the second one interrupts at once."""
    stop = threading.Event()
    previous: dict[signal.Signals, Any] = {}

    def notice(*_: object) -> None:
        stop.set()
        restore()
        print("Stopping after this step. Press Ctrl-C again to stop at once.", file=sys.stderr)

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    if threading.current_thread() is threading.main_thread():  # only the main thread may handle signals
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # a shell ignores Ctrl-C for background jobs
                previous[number] = signal.signal(number, notice)
    try:
        yield stop
    finally:
        restore()
