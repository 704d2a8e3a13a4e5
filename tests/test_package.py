"""What would be published: the wheel holds exactly the package, and both archives pass the checks."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from documents import ROOT


def run(*command: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("dist")
    run("build", "--no-isolation", "--outdir", folder)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def test_the_wheel_holds_every_file_of_the_package(archives: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(archives[0]) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = ROOT / "src" / "fairpruner"
    expected = {
        p.relative_to(ROOT / "src").as_posix()
        for p in package.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    assert held == expected
    assert "fairpruner/py.typed" in held


def test_the_sdist_holds_what_the_tests_need(archives: tuple[Path, Path]) -> None:
    with tarfile.open(archives[1]) as sdist:
        held = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    assert {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "Makefile",
        "mkdocs.yml",
        "tests/conftest.py",
        "docs/method.md",
    } <= held


def test_the_archives_pass_the_checks(archives: tuple[Path, Path]) -> None:
    run("twine", "check", "--strict", *archives)
    run("check_wheel_contents", archives[0])


def test_the_citation_names_the_version() -> None:
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    declared = re.search(
        r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert cited is not None
    assert declared is not None
    assert cited[1] == declared[1]
