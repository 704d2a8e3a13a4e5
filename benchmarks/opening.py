"""The table on the first screen of the README: the one that docs/benchmarks.md opens with."""

from __future__ import annotations

import overview


def page() -> str:
    """Questions with their measured answers, as Markdown."""
    return overview.table()
