"""Removed experts that leave their mean outputs behind, compared with the other repairs of experts.

Perplexity of a tiny Qwen2-MoE over the first 24,576 validation tokens, in windows of 128, after draws of
20,000 calibration tokens, equally many from each of the text's 10 domains. `reap` with `global`. A repair is
kept whatever the loss on the calibration tokens does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness import pages, runs
from nets import moe_models
from nets.moe_models import cell, plan_for

import fairpruner as fp

WAYS: dict[str, list[str]] = {
    "the cut": [],
    "router weights divided by their sum (`renormalise`)": ["renormalise"],
    "kept and shared experts refitted (`experts`)": ["experts"],
    "removed experts leave constants behind (`constants`)": ["constants"],
    "constants, then refitted (`constants`, `experts`)": ["constants", "experts"],
}
SHARES = (0.25, 0.5)  # removed
Row = dict[str, Any]


def cases(quick: bool) -> Iterator[Row]:
    size = {"tokens": 12_800, "draws": 1} if quick else {"tokens": 20_000, "draws": 5}
    for removed, way in itertools.product(SHARES[-1:] if quick else SHARES, WAYS):
        yield {"way": way, "removed": removed, **size}


def measure(case: Row, shared: Path) -> Row:
    """The perplexity after each draw."""
    model, values = moe_models.model(shared), []
    for seed in range(case["draws"]):
        plan = plan_for(moe_models.scores(shared, seed, case["tokens"]), "reap", "global", case["removed"])
        small = fp.cut(model, plan)
        if methods := WAYS[case["way"]]:
            data = moe_models.draw(shared, seed, case["tokens"])
            small = fp.repair(small, model, plan, data, method=methods, loss=lambda *_: torch.zeros(()))
        values.append(moe_models.perplexity(small, shared))
    return {"full": moe_models.full(shared), "values": values}


def page() -> str:
    """Perplexity by way and share, as Markdown."""
    stored = runs.stored("moe_constants")
    cells = {(row["way"], row["removed"]): cell(row["values"], ".2f") for row in stored}
    title = [
        f"Ways to repair blocks of experts, `reap` with `global` ({row['draws']} draws of {row['tokens']:,}"
        f" tokens, equally much of each domain; full model: {row['full']:.2f}):"
        for row in stored[:1]
    ]
    shares = [removed for removed in SHARES if any((way, removed) in cells for way in WAYS)]
    lines = [[way, *(cells.get((way, removed), "") for removed in shares)] for way in WAYS if cells]
    return "\n\n".join([*title, pages.table(["", *(f"{removed:.0%} removed" for removed in shares)], lines)])
