"""Benchmarks are run row by row, and every text and figure made from them is what their results give."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from documents import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from harness import pages, runs

SHOWN = [
    (name, document)
    for document in pages.DOCUMENTS
    for name in re.findall(
        r"<!-- made by: python -m benchmarks (\w+) --table -->", document.read_text(encoding="utf-8")
    )
]


def test_the_documents_show_benchmarks() -> None:
    assert {"summary", "default", "latency"} <= {name for name, _ in SHOWN} <= set(pages.titles())


def test_the_page_of_models_is_made_of_the_rows_of_the_zoo() -> None:
    spec = importlib.util.spec_from_file_location("prunable", ROOT / "docs" / "prunable.py")
    assert spec is not None
    assert spec.loader is not None
    prunable = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prunable)
    results = ROOT / "benchmarks" / "results"
    rows = json.loads((results / "zoo.json").read_text(encoding="utf-8"))["rows"]
    names = json.loads((results / "zoo_timm.json").read_text(encoding="utf-8"))
    shown = (ROOT / "docs" / "prunable.md").read_text(encoding="utf-8")
    assert shown == prunable.page(rows, names)


@pytest.mark.parametrize(("name", "document"), SHOWN, ids=[name for name, _ in SHOWN])
def test_a_document_shows_what_the_results_give(name: str, document: Path) -> None:
    module = importlib.import_module(name)
    assert pages.shown(name, document) == module.page().strip()
    if pages.figure_of(name).name in module.page():
        assert pages.mark_of(module.page()) in pages.figure_of(name).read_text(encoding="utf-8")


def test_no_draw_is_counted_twice_beside_the_peers() -> None:
    """Rows of other benchmarks join the table only where it has no row of the same draw."""
    cifar_peers = importlib.import_module("cifar_peers")
    named = [cifar_peers.named(row) for row in cifar_peers.rows()]
    assert len(named) == len(set(named))


@pytest.mark.parametrize("name", [name for name, _ in SHOWN])
def test_cases_are_distinct_and_a_quick_run_has_few(name: str) -> None:
    module = importlib.import_module(name)
    if not hasattr(module, "cases"):
        return  # it only makes a page of what others measured
    full, quick = ([json.dumps(case) for case in module.cases(q)] for q in (False, True))
    assert len(set(full)) == len(full)
    assert 0 < len(quick) <= min(len(full), 12)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A benchmark of three rows that counts what it measures, with a folder of its own."""
    module: Any = ModuleType("squares")
    module.measured = []

    def measure(case: dict[str, Any], shared: Path) -> dict[str, Any]:
        module.measured.append(case["of"])
        if case["of"] == module.fails_at:
            raise KeyboardInterrupt
        return {"square": case["of"] ** 2}

    module.fails_at = None
    module.cases = lambda quick: ({"of": number} for number in range(1 if quick else 3))
    module.measure = measure
    module.page = lambda: f"{[row['square'] for row in runs.stored('squares')]}"
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    return module


def test_a_stopped_run_goes_on_where_it_stopped(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench.fails_at = 2
    with pytest.raises(KeyboardInterrupt):
        runs.main(bench, [])
    bench.fails_at = None
    runs.main(bench, [])
    assert bench.measured == [0, 1, 2, 2]
    assert "[0, 1, 4]" in capsys.readouterr().out
    content = pages.results("squares")
    assert {"command", "date", "machine", "versions"} <= content["runs"][0].keys()
    assert content["rows"][2]["run"] in range(len(content["runs"]))


def test_a_quick_run_is_stored_apart(bench: Any) -> None:
    runs.main(bench, ["--quick"])
    assert [row["of"] for row in runs.stored("squares")] == [0]
    assert pages.RESULTS.name == "quick"


def test_a_shared_folder_that_is_not_there_is_refused(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runs.main(bench, ["--shared", "nowhere"])
    assert "--shared nowhere is no folder" in capsys.readouterr().err
    assert bench.measured == []


def test_rows_can_be_chosen(bench: Any) -> None:
    runs.main(bench, ["--only", "of=1"])
    assert bench.measured == [1]
