"""A report: its facts, and how they are printed and written."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fairpruner.reporting.facts import ReportContent
from fairpruner.reporting.page import write_page
from fairpruner.reporting.table import report_tables
from fairpruner.terminal.tables import printed

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

    def __repr__(self) -> str:
        return printed(self) if find_spec("rich") else f"{self.title}\n{self.plan!r}"
