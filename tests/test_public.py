"""What docs/api.md shows is public; documents and examples use nothing else."""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from documents import DOCUMENTS, EXAMPLES, ROOT, blocks

import fairpruner


@cache
def public_modules() -> dict[str, ModuleType]:
    """The package and the modules that the API page shows, by the names under which they may be imported."""
    shown = re.findall(
        r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    found = {name: pkgutil.resolve_name(name) for name in shown}
    return {"fairpruner": fairpruner} | {
        n: value for n, value in found.items() if isinstance(value, ModuleType)
    }


def private_uses(source: str) -> Iterator[str]:
    """The names that some code imports from the package, or reads as `fp.NAME`, and that are not public."""
    modules, tree = public_modules(), ast.parse(source)
    aliases = {
        a.asname or a.name
        for n in ast.walk(tree)
        if isinstance(n, ast.Import)
        for a in n.names
        if a.name == "fairpruner"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                a.name for a in node.names if a.name.split(".")[0] == "fairpruner" and a.name not in modules
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fairpruner":
            module = modules.get(node.module or "")
            allowed = set(module.__all__) if module else set()
            yield from (f"{node.module}.{a.name}" for a in node.names if a.name not in allowed)
        elif (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases
        ):
            yield from {f"fp.{node.attr}"} - {f"fp.{name}" for name in (*fairpruner.__all__, "__version__")}


@pytest.mark.parametrize(
    "code",
    [
        "from fairpruner.core.plan import Plan",
        "import fairpruner.core.sealed",
        "from fairpruner import core",
        "import fairpruner as fp\nfp.core.plan",
        "from fairpruner.inputs import hugging_face",
    ],
)
def test_a_private_use_would_be_seen(code: str) -> None:
    assert len(list(private_uses(code))) == 1


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_documents_use_only_public_names(document: Path) -> None:
    for language in ("python", "py"):
        for block in blocks(document, language):
            assert not list(private_uses(block))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_examples_use_only_public_names(example: Path) -> None:
    assert not list(private_uses(example.read_text(encoding="utf-8")))


@pytest.mark.parametrize("module", sorted(public_modules()))
def test_every_public_name_exists_and_has_a_docstring(module: str) -> None:
    for name in public_modules()[module].__all__:
        value = getattr(public_modules()[module], name)
        assert value.__doc__, name
