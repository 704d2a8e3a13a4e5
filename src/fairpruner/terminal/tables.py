"""Tables on a terminal.

rich is imported inside functions, because pruning from Python needs no tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Group, RenderableType


@dataclass(frozen=True)
class Printable:
    """One result in the two forms that a command can print."""

    table: RenderableType
    json: Mapping[str, Any]


def table_of(
    title: str, columns: Sequence[str], rows: Iterable[Iterable[object]], notes: Iterable[str] = ()
) -> Group:
    """A title, a table, and notes below it; all columns but the first are aligned to the right."""
    from rich.box import SIMPLE
    from rich.console import Group
    from rich.table import Table

    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    return Group(title, table, *notes)


def stacked(*parts: RenderableType) -> Group:
    """Several tables or lines, one below the other."""
    from rich.console import Group

    return Group(*parts)


def printed(content: RenderableType) -> str:
    """What rich prints, as text."""
    from rich.console import Console

    text = StringIO()
    Console(file=text, width=140, markup=False).print(content)
    return text.getvalue().rstrip()


def amount(value: float) -> str:
    """A count with thousands separators, or a measured number with four digits.

    >>> amount(1200), amount(3.14159)
    ('1,200', '3.142')
    """
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
