"""Steps and progress bars on stderr.

rich is imported inside functions, because pruning from Python needs no bars.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from time import perf_counter
from typing import Any


def announce(step: str) -> None:
    """Print the next step of a long job on stderr, if that is a terminal."""
    if sys.stderr.isatty():
        print(step, file=sys.stderr)


@contextmanager
def progress(title: str, data: Iterable[Any]) -> Iterator[Callable[[int], None]]:
    """A bar for one pass over data; call the yielded function with the number of samples of each batch."""
    try:
        total: int | None = len(data)  # type: ignore[arg-type]
    except TypeError:
        total = None
    batches, seen, start = 0, 0, perf_counter()
    with batch_bar(total) as show:

        def advance(samples: int) -> None:
            nonlocal batches, seen
            batches, seen = batches + 1, seen + samples
            show(title, batches, f"{seen / max(perf_counter() - start, 1e-9):.0f} samples/s")

        yield advance


@contextmanager
def batch_bar(total: int | None, *, quiet: bool = False) -> Iterator[Callable[[str, int, str], None]]:
    """A bar of batches on stderr; call the yielded function with a title, the batches done and a note.

    Nothing is shown if stderr is not a terminal or rich is not installed.
    """
    if quiet or not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda title, done, note: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("batches, {task.fields[note]},"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, note="")
        yield lambda title, done, note: bar.update(task, description=title, completed=done, note=note)


@contextmanager
def silenced(library: str) -> Iterator[None]:
    """Inside, the loggers of a library print only errors; afterwards they are as before."""
    logger = logging.getLogger(library)
    disabled, level = logger.disabled, logger.level
    logger.disabled = True  # a library may set the level of its own logger again
    logger.setLevel(logging.ERROR)  # for the loggers of its modules, which inherit the level
    try:
        yield
    finally:
        logger.disabled = disabled
        logger.setLevel(level)
