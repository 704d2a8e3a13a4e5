"""Routed experts removed by every signal and rule: perplexity of a tiny Qwen2-MoE, without training.

Half, 3/4 or 5/6 of the experts are removed, after draws of calibration tokens: equally many from each of the
text's 10 domains, or as the text comes. Perplexity is over the first 24,576 validation tokens, in windows of
128. `moe_repair`, `moe_constants`, `moe_costs` and `moe_tasks` measure the same model otherwise.

    pip install "fairpruner[hf]"
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import pages, runs
from nets import moe_models
from nets.moe_models import MIXES, REMOVED, cell, plan_for

import fairpruner as fp

ROWS = (
    ("random", "uniform"),
    ("frequency", "uniform"),
    *((s, rule) for s in ("soft_activation", "reap") for rule in ("uniform", "tod", "global")),
)
Row = dict[str, Any]


def cases(quick: bool) -> Iterator[Row]:
    size = {"tokens": 12_800, "draws": 1} if quick else {"tokens": 100_000, "draws": 5}
    mixes, shares = (MIXES[:1], REMOVED[:1]) if quick else (MIXES, REMOVED)
    for mix, (signal, rule), removed in itertools.product(mixes, ROWS, shares):
        yield {"mix": mix, "signal": signal, "rule": rule, "removed": removed, **size}


def measure(case: Row, shared: Path) -> Row:
    """The perplexity after each draw."""
    values = []
    for seed in range(case["draws"]):
        scores = moe_models.scores(shared, seed, case["tokens"], case["mix"])
        plan = plan_for(scores, case["signal"], case["rule"], case["removed"])
        values.append(moe_models.perplexity(fp.cut(moe_models.model(shared), plan), shared))
    return {"full": moe_models.full(shared), "values": values}


def page() -> str:
    """A table for each mix of calibration text, as Markdown."""
    stored = runs.stored("moe")
    head = ["removal signal", "rule", *(f"{removed:.1%} removed" for removed in REMOVED)]
    shown = [
        f"Full model: {row['full']:.2f}. Mean ± standard deviation over {row['draws']} draws of"
        f" {row['tokens']:,} tokens."
        for row in stored[:1]
    ]
    for mix in MIXES:
        cells = {
            (row["signal"], row["rule"], row["removed"]): cell(row["values"])
            for row in stored
            if row["mix"] == mix
        }
        lines = [
            [signal, rule, *(cells.get((signal, rule, removed), "") for removed in REMOVED)]
            for signal, rule in ROWS
            if any((signal, rule, removed) in cells for removed in REMOVED)
        ]
        shown += [f"Calibration text: {mix}.", pages.table(head, lines)]
    return "\n\n".join(shown)
