"""A report: its facts, and how they are printed and written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fairpruner.reporting.facts import ReportContent
from fairpruner.reporting.page import write_page
from fairpruner.reporting.table import report_tables

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, eq=False)
class Report(ReportContent):
    """A plan, its effect on each space, its diagnosis, and measured numbers; rich prints it as tables."""

    def save_html(self, path: str | Path) -> None:
        """Write the interactive page: one file that needs no network."""
        write_page(self, path)

    def __rich__(self) -> RenderableType:
        return report_tables(self)
