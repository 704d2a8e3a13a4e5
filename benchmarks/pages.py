"""The tables of the documents: each stands between two markers and is written by the benchmark it names.

A benchmark NAME stores what it measured in results/NAME.json. Its function `page` makes Markdown of that
alone, and `fill` puts the text into the document that has its markers. tests/test_benchmark_pages.py
compares every document with what the results give.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DOCUMENTS = (HERE.parent / "README.md", *sorted((HERE.parent / "docs").glob("*.md")))


def results(name: str) -> Any:
    """What a benchmark stored; an empty dict if it never ran."""
    path = HERE / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def store(name: str, content: Any) -> None:
    """Write the results of a benchmark."""
    path = HERE / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows))


def markers(name: str) -> tuple[str, str]:
    """What stands before and after the text of a benchmark."""
    return f"<!-- made by: python benchmarks/{name}.py --table -->\n", f"<!-- end of {name} -->"


def shown(name: str, document: Path) -> str | None:
    """The text of a benchmark in a document, or None if the document has no place for it."""
    start, end = markers(name)
    _, found, rest = document.read_text(encoding="utf-8").partition(start)
    return rest.partition(end)[0].strip() if found else None


def fill(name: str, text: str) -> None:
    """Put the text of a benchmark into the document that has its markers, and print it."""
    start, end = markers(name)
    for document in DOCUMENTS:
        if shown(name, document) is not None:
            before, _, rest = document.read_text(encoding="utf-8").partition(start)
            after = rest.partition(end)[2]
            document.write_text(f"{before}{start}\n{text}\n\n{end}{after}", encoding="utf-8")
    print(text)
