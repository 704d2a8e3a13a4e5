"""What a prompt or a notebook shows of the values of the pipeline: short tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fairpruner as fp
from fairpruner.terminal.text import MOST_ROWS, text_table


@pytest.fixture(scope="module")
def scores() -> fp.Scores:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1200), nn.ReLU(), nn.Linear(1200, 2))
    data = [(torch.randn(16, 4), torch.arange(16) % 2) for _ in range(2)]
    return fp.score(model, data, removal=["wasserstein", "l1"])


def test_spaces(scores: fp.Scores) -> None:
    assert repr(scores.spaces).splitlines() == [
        "Spaces: 2 with 1,208 units",
        "space    kind  units",
        "0      hidden      8",
        "2      hidden  1,200",
        "left out: 1, with reasons in `left_out`",
    ]
    assert repr(scores.spaces["2"]) == "UnitSpace(name='2', kind='hidden', size=1200)"


def test_scores(scores: fp.Scores) -> None:
    first, *rest = repr(scores).splitlines()
    assert first == "Scores: removal wasserstein, l1; protection taylor; 32 samples"
    assert rest == repr(scores.spaces).splitlines()


def test_a_plan(scores: fp.Scores) -> None:
    plan = fp.Plan.removing(scores.spaces, {"2": range(900)})
    assert repr(plan).splitlines() == [
        "Plan: given keeps 25.5% of units, 25.2% of params, 25.2% of flops",
        "space    kind  units  kept",
        "0      hidden      8     8",
        "2      hidden  1,200   300",
    ]


def test_a_report_is_its_tables(scores: fp.Scores, tmp_path: Path) -> None:
    text = repr(fp.report(scores, fp.allocate(scores, alpha=0.1)))
    assert "tod at tolerance 0.1 keeps" in text
    assert "FLOPs are multiply-accumulates (MACs)." in text
    assert "Slice(" not in text


def test_of_very_many_rows_the_first_are_shown() -> None:
    lines = text_table(("row", "square"), [(n, n * n) for n in range(MOST_ROWS + 5)]).splitlines()
    assert len(lines) == MOST_ROWS + 2
    assert lines[-1] == "… and 5 more"
