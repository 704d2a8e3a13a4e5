"""Every table that a benchmark writes into a document is what its stored results give."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
from documents import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import pages

SHOWN = [
    (name, document)
    for document in pages.DOCUMENTS
    for name in re.findall(
        r"<!-- made by: python benchmarks/(\w+)\.py --table -->", document.read_text(encoding="utf-8")
    )
]


def test_the_documents_show_benchmarks() -> None:
    assert {"summary", "default", "latency"} <= {name for name, _ in SHOWN}


@pytest.mark.parametrize(("name", "document"), SHOWN, ids=[name for name, _ in SHOWN])
def test_a_document_shows_what_the_results_give(name: str, document: Path) -> None:
    assert pages.shown(name, document) == importlib.import_module(name).page().strip()
