"""docs/architecture.md names files and functions that exist, all of the top level, and the real layers."""

from __future__ import annotations

import ast
import re

import pytest
from documents import ROOT

SOURCE = ROOT / "src" / "fairpruner"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
STEPS = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", PAGE, re.MULTILINE)


def defined(path: str) -> set[str]:
    """The names that a file defines, methods as Class.method."""
    names = set()
    for node in ast.parse((SOURCE / path).read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{n.name}" for n in node.body if isinstance(n, ast.FunctionDef)}
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_the_walks_cover_every_stage() -> None:
    assert len(STEPS) > 30
    assert {path.partition("/")[0] for path, _ in STEPS} >= {
        *("discovery", "scoring", "allocation", "surgery.py", "repair", "files", "models", "core", "inputs")
    }


@pytest.mark.parametrize(("path", "name"), STEPS)
def test_every_step_exists(path: str, name: str) -> None:
    assert name in defined(path)


def test_every_path_on_the_page_exists() -> None:
    for path in re.findall(r"`([a-z_]+/[\w/.]*)`", PAGE):
        assert (ROOT / path if path.startswith(("src/", "docs/")) else SOURCE / path).exists(), path


def test_the_tree_is_the_top_level_of_the_package() -> None:
    listed = re.findall(r"^  (\w+(?:\.py|/)) ", PAGE, re.MULTILINE)
    found = {
        f"{entry.name}/" if entry.is_dir() else entry.name
        for entry in SOURCE.iterdir()
        if entry.name not in ("__pycache__", "py.typed")
    }
    assert set(listed) == found
    assert len(listed) == len(found)


def test_the_layers_are_those_that_import_linter_checks() -> None:
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^layers = \[\n(.*?)^\]", settings, re.DOTALL | re.MULTILINE)
    assert block is not None
    checked = [layer.split(" | ") for layer in re.findall(r'"([^"]+)"', block[1])]
    table = PAGE.partition("## The layers")[2].partition("\n## ")[0]
    shown = [
        re.findall(r"`(\w+)`", row) for row in re.findall(r"^\| (`[^|\\]+`(?: \\\| `\w+`)*) \|", table, re.M)
    ]
    assert shown == checked
