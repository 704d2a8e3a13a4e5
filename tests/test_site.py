"""The documentation site builds without warnings, shows every public name, and loads nothing remote."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT
from test_public import public_modules


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    anchors = set(re.findall(r'id="fairpruner\.([\w.]+)"', (site / "api.html").read_text(encoding="utf-8")))
    names = {anchor.rpartition(".")[2] for anchor in anchors}
    for module in public_modules().values():
        assert set(module.__all__) - names == set()


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        loaded = re.findall(
            r'<(?:script|img|link|iframe)[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text(encoding="utf-8")
        )
        assert loaded == [], page.name


def test_formulas_are_mathml(site: Path) -> None:
    text = (site / "method.html").read_text(encoding="utf-8")
    assert text.count("<math") > 20
    assert "arithmatex" not in text


def test_no_page_waits_for_a_diagram_script(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert "mermaid" not in page.read_text(encoding="utf-8"), page.name
