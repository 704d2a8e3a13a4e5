"""Pages of the site that are made from other files, and formulas as MathML. mkdocs calls the `on_` functions.

The README, the changelog, CONTRIBUTING.md, SECURITY.md, the examples and the list of benchmarks are read from
where they are, so that nothing is written twice. Browsers draw MathML themselves: the site loads no remote
script.
"""

from __future__ import annotations

import ast
import html
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from harness import pages  # noqa: E402

PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the pages that are made from files outside docs/."""
    made = {
        page: _moved((ROOT / source).read_text(encoding="utf-8"), config.extra["repository"])
        for source, page in PAGES.items()
    }
    made |= {"examples.md": _examples()}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Add the list of all benchmarks to their page, and move links that leave docs/."""
    more = _benchmarks() if page.file.src_uri == "benchmarks.md" else ""
    return _moved(markdown + more, config.extra["repository"], root="../")


def on_page_content(content: str, **_: Any) -> str:
    """Replace the LaTeX of every formula by MathML."""
    return FORMULA.sub(_mathml, content)


def _mathml(match: re.Match[str]) -> str:
    return convert(html.unescape(match[2]), display="inline" if match[1] == "span" else "block")


def _moved(text: str, repository: str, root: str = "") -> str:
    """Make links to files below the root links from docs/; what is not on the site is in the repository.

    `root` is the path from the text's own folder to the root; other links stay.
    """

    def link(match: re.Match[str]) -> str:
        path, _, anchor = match[1].partition("#")
        if "://" in path or not path or not path.startswith(root):
            return match[0]
        path = path.removeprefix(root)
        place = PAGES.get(path) or ("examples.md" if path.rstrip("/") == "examples" else None)
        if place is None and path.startswith("docs/"):
            place = path.removeprefix("docs/")
        place = place or f"{repository}/blob/main/{path}"
        return f"]({place}{'#' if anchor else ''}{anchor})"

    return re.sub(r"\]\(([^)\s]*)\)", link, text)


def _examples() -> str:
    lines = ["# Examples", "", "Each is a complete script that `make test` runs.", ""]
    for path in sorted((ROOT / "examples").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        title, _, rest = (ast.get_docstring(ast.parse(source)) or "").partition("\n")
        body = source.split('"""', 2)[2].strip()
        lines += [
            f"## {path.stem.replace('_', ' ')}",
            "",
            title,
            "",
            "```text",
            rest.strip(),
            "```",
            "",
            "```python",
            body,
            "```",
            "",
        ]
    return "\n".join(lines)


def _benchmarks() -> str:
    """One row for each benchmark: what it measures, and the pages that show it."""
    lines = ["", "## All benchmarks", "", "| name | what it measures | shown in |", "|---|---|---|"]
    for name, title in pages.titles().items():
        shown = (d for d in pages.DOCUMENTS if pages.shown(name, d) is not None)
        links = (f"[{d.name}](../{d.relative_to(ROOT).as_posix()})" for d in shown)
        lines.append(f"| `{name}` | {title} | {', '.join(links)} |")
    return "\n".join(lines) + "\n"
