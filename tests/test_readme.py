"""The documents' own code runs, their links lead somewhere, and the examples work."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import DOCUMENTS, EXAMPLES, ROOT, blocks
from typer.testing import CliRunner

from fairpruner.cli import app
from fairpruner.demo import Digits, build


@pytest.mark.slow
@pytest.mark.parametrize("document", [d for d in DOCUMENTS if blocks(d, "python")], ids=lambda d: d.name)
def test_python_blocks_run_one_after_the_other(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    digits = Digits.load()[0]
    names: dict[str, Any] = {
        "model": build().eval(),
        "build": build,
        "data": [(digits.x[:64], digits.y[:64])] * 2,
        "example": torch.rand(1, 1, 8, 8),
    }
    for number, block in enumerate(blocks(document, "python")):
        exec(compile(block, f"{document.name}, python block {number}", "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize("document", [d for d in DOCUMENTS if blocks(d, "sh")], ids=lambda d: d.name)
def test_shell_blocks_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line in "".join(blocks(document, "sh")).splitlines():
        program, *arguments = shlex.split(line, comments=True)
        if program == "make":  # the set-up is what runs this test: looked up, not run
            assert re.search(
                rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
            )
            continue
        assert program == "fairpruner"
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output


def test_the_readme_names_every_extra_and_all_brings_them() -> None:
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = declared.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", section, re.MULTILINE)) - {"all", "docs", "dev"}
    brought = re.search(r"^all = \[\"fairpruner\[([\w,]+)\]\"\]", section, re.MULTILINE)
    named = re.search(r"extras you need: (.*?)\.\n", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert brought is not None
    assert named is not None
    assert set(brought[1].split(",")) == extras
    assert set(re.findall(r"`(\w+)`", named[1])) == extras


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=lambda d: d.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (document.parent / target).exists(), target
    for path in re.findall(r"`((?:src|examples|benchmarks|docs|tests)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_examples_run(example: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(example)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
