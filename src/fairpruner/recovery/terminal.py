"""The person who watches a training run: a progress bar, and Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fairpruner.recovery.history import Tally

Show = Callable[[int, int, Tally], None]


@contextmanager
def training_bar(epochs: int, steps: int | None, *, quiet: bool) -> Iterator[Show]:
    """A bar on stderr with loss, accuracy and time left, none where that is no terminal; call what is
    yielded with epoch, batches of it done and their tally.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("batches, {task.fields[tally]},"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("", total=steps and steps * epochs, tally="")

        def show(epoch: int, position: int, tally: Tally) -> None:
            done = epoch * steps + position if steps else bar.tasks[task].completed + 1
            bar.update(
                task,
                completed=done,
                description=f"recovering, epoch {epoch + 1} of {epochs}",
                tally=str(tally),
            )

        yield show


@contextmanager
def noticing_interrupts() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, for half a step is no state to keep; a second one interrupts at once, as
    ever.
    """
    stop = threading.Event()
    ignored = (
        signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    )  # as a shell has it for jobs in the background
    if (
        ignored or threading.current_thread() is not threading.main_thread()
    ):  # no other thread may handle signals
        yield stop
        return

    def notice(*_: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, usual)
        print("Stopping after this step. Press Ctrl-C again to stop at once.", file=sys.stderr)

    usual = signal.signal(signal.SIGINT, notice)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, usual)
