"""The pages of the benchmarks: text of the documents that is made from stored results.

A benchmark NAME stores what it measured in results/NAME.json. Its function `page` makes Markdown of that
alone, `fill` puts the text between the markers of a document, and `draw` saves the figure that belongs to
it. tests/test_benchmark_pages.py compares every document and figure with what the results give.
"""

from __future__ import annotations

import ast
import hashlib
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parents[1]
RESULTS = HERE / "results"
DOCUMENTS = (
    HERE.parent / "README.md",
    HERE.parent / "SECURITY.md",
    *sorted((HERE.parent / "docs").glob("*.md")),
)
IMAGES = HERE.parent / "docs" / "images"


def titles() -> dict[str, str]:
    """The first paragraph of each benchmark by name: of the modules that measure, or make a page."""
    found = {}
    for path in sorted(HERE.glob("[a-z]*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        functions = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
        if functions & {"cases", "page"}:
            found[path.stem] = " ".join((ast.get_docstring(module) or "").partition("\n\n")[0].split())
    return found


def results(name: str) -> Any:
    """What a benchmark stored; an empty dict if it never ran."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def store(name: str, content: Any) -> None:
    """Write the results of a benchmark."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, or a sentence if there are no rows."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if lines[2:] else "Not measured yet."


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean, standard deviation and number of some values; nothing if there is none.

    >>> spread([1.0, 2.0]), spread([1.0]), spread([])
    ('1.50 ± 0.71 (2)', '1.00', '')
    """
    if len(values) < 2:
        return "".join(f"{value:.{digits}f}" for value in values)
    mean, deviation = statistics.mean(values), statistics.stdev(values)
    return f"{mean:.{digits}f} ± {deviation:.{digits}f} ({len(values)})"


def markers(name: str) -> tuple[str, str]:
    """What stands before and after the text of a benchmark."""
    return f"<!-- made by: python -m benchmarks {name} --table -->\n", f"<!-- end of {name} -->"


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


def figure_of(name: str) -> Path:
    """Where the figure of a benchmark is."""
    return IMAGES / f"benchmark_{name}.svg"


def picture(name: str, what: str) -> str:
    """The figure of a benchmark in a page of docs/."""
    return f"![{what}](images/{figure_of(name).name})"


def mark_of(text: str) -> str:
    """What a figure carries to show which page it belongs to."""
    return f"page {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def draw(module: ModuleType) -> None:
    """Save the figure that the page of a benchmark shows, marked with this page."""
    text, path = module.page(), figure_of(module.__name__)
    if path.name in text:
        import matplotlib

        # Text stays text, and the same figure is the same file.
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fairpruner"}):
            module.plot().savefig(path, metadata={"Date": None, "Description": mark_of(text)})
