"""The person who watches a training run: a progress bar, and Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fairpruner.recovery.history import Tally
from fairpruner.terminal import batch_bar

Show = Callable[[int, int, Tally], None]


@contextmanager
def training_bar(epochs: int, steps: int | None, *, quiet: bool) -> Iterator[Show]:
    """A bar with loss, accuracy and time left; call the yielded function with epoch, batch and tally."""
    shown = 0
    with batch_bar(steps and steps * epochs, quiet=quiet) as show_batches:

        def show(epoch: int, position: int, tally: Tally) -> None:
            nonlocal shown
            shown += 1
            done = epoch * steps + position if steps else shown
            show_batches(f"recovering, epoch {epoch + 1} of {epochs}", done, str(tally))

        yield show


@contextmanager
def noticing_interrupts() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM set the event, since half a step is no state to keep; the next one acts as ever."""
    stop = threading.Event()
    usual: dict[signal.Signals, Any] = {}

    def notice(*_: object) -> None:
        stop.set()
        restore()
        print("Stopping after this step. Press Ctrl-C again to stop at once.", file=sys.stderr)

    def restore() -> None:
        for number, handler in usual.items():
            signal.signal(number, handler)

    if threading.current_thread() is threading.main_thread():  # no other thread may handle signals
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # as a shell has it for jobs in the background
                usual[number] = signal.signal(number, notice)
    try:
        yield stop
    finally:
        restore()
