"""What each step of a repair without training adds, with half of the experts of a tiny Qwen2-MoE removed.

Perplexity over the first 24,576 validation tokens, in windows of 128, after draws of 20,000 calibration
tokens, equally many from each of the text's 10 domains.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from harness import pages, runs
from nets import moe_models
from nets.moe_models import cell, plan_for

import fairpruner as fp
from fairpruner.repair.experts import MOST_FEATURES

PART = 512  # features, a fraction of the tiny model's: real blocks are refitted in parts
IN_PARTS = f"refitted in parts of {PART} features"
STEPS: dict[str, list[str]] = {
    "the cut": [],
    "kept experts moved towards the removed ones nearest to them": ["merge"],
    "kept and shared experts refitted": ["experts"],
    "moved, then refitted": ["merge", "experts"],
    IN_PARTS: ["experts"],
}
Row = dict[str, Any]


def cases(quick: bool) -> Iterator[Row]:
    size = {"tokens": 12_800, "draws": 1} if quick else {"tokens": 20_000, "draws": 5}
    rules, steps = (["global"], list(STEPS)[:3]) if quick else (["uniform", "global"], list(STEPS))
    for rule, step in itertools.product(rules, steps):
        yield {"rule": rule, "step": step, **size}


def measure(case: Row, shared: Path) -> Row:
    """The perplexity after each draw."""
    model, values = moe_models.model(shared), []
    for seed in range(case["draws"]):
        plan = plan_for(moe_models.scores(shared, seed, case["tokens"]), "reap", case["rule"], 0.5)
        small = fp.cut(model, plan)
        if methods := STEPS[case["step"]]:
            most = PART if case["step"] == IN_PARTS else MOST_FEATURES
            data = moe_models.draw(shared, seed, case["tokens"])
            with mock.patch("fairpruner.repair.experts.MOST_FEATURES", most):
                small = fp.repair(small, model, plan, data, method=methods)
        values.append(moe_models.perplexity(small, shared))
    return {"full": moe_models.full(shared), "values": values}


def page() -> str:
    """Perplexity by rule and step, as Markdown."""
    stored = runs.stored("moe_repair")
    title = [
        f"Repair without training, half of the experts removed ({row['draws']} draws of {row['tokens']:,}"
        " tokens, equally much of each domain):"
        for row in stored[:1]
    ]
    lines = [
        [
            f"reap, {row['rule']}: {row['step']}",
            cell(row["values"]),
            f"{statistics.mean(row['values']) / row['full']:.2f}",
        ]
        for row in stored
    ]
    return "\n\n".join([*title, pages.table(["step", "perplexity", "times the full model's"], lines)])
