"""What a terminal shows: tables, and the progress of a pass over data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


@dataclass(frozen=True)
class Shown:
    """One result in both forms."""

    table: RenderableType
    json: Mapping[str, Any]


def table_of(
    title: str, columns: Sequence[str], rows: Iterable[Iterable[object]], notes: Iterable[str] = ()
) -> Group:
    """A title, a table whose first column is to the left and the others to the right, and notes below."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    return Group(title, table, *notes)


def amount(value: float) -> str:
    """A count, or what may have decimals, such as milliseconds."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


@contextmanager
def progress(title: str, data: Iterable[Any]) -> Iterator[Callable[[int], None]]:
    """A bar on stderr with rate and time left, quiet when it is no terminal; call the yielded function
    with the samples of each batch.
    """
    try:
        total: int | None = len(data)  # type: ignore[arg-type]
    except TypeError:
        total = None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("batches, {task.fields[rate]:.0f} samples/s,"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task(title, total=total, rate=0.0)
        seen = 0

        def advance(samples: int) -> None:
            nonlocal seen
            seen += samples
            bar.update(task, advance=1, rate=seen / max(bar.tasks[task].elapsed or 0.0, 1e-9))

        yield advance
