"""Tables of plain text, for prompts and notebooks: they need no package."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MOST_ROWS = 40


def text_table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Aligned columns, the first to the left, the others to the right; of very many rows, the first ones.

    >>> print(text_table(("space", "units"), [("stem", 24), ("head", 1000)]))
    space  units
    stem      24
    head    1000
    """
    cells = [tuple(map(str, row)) for row in rows]
    lines = [tuple(columns), *cells[:MOST_ROWS]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    more = len(cells) - MOST_ROWS
    return "\n".join([*texts, f"… and {more} more"] if more > 0 else texts)
