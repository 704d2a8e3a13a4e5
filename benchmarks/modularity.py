"""The paper's table of extensibility: other removal signals under ToD and under the rule `uniform`.

CIFAR-10 ResNets without training, channels inside the blocks, exactly the same FLOPs for both rules. Top-1 on
all 10,000 test images, after the cut and after sequential repair; draws of 2,000 calibration images. The
protection signal is the paper's `taylor`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from harness import pages, runs
from nets.images import cifar10, some, top1
from nets.training import resnet
from torch import nn

import fairpruner as fp

SIGNALS, RULES = ("l1", "fpgm", "reconstruction"), ("tod", "uniform")
Row = dict[str, Any]


def cases(quick: bool) -> Iterator[Row]:
    size = {"calibration": 250, "test": 1000} if quick else {"calibration": 2000, "test": 10_000}
    for depth in (20,) if quick else (20, 56):
        for draw in range(1 if quick else 3):
            for keep in (0.7,) if quick else (0.7, 0.5):
                for signal in SIGNALS[:1] if quick else SIGNALS:
                    for rule in RULES:
                        same = {"depth": depth, "keep": keep, "draw": draw, **size}
                        yield {**same, "signal": signal, "rule": rule}


@cache
def bench(depth: int, draw: int, count: int, shared: Path) -> tuple[nn.Module, list[Any], fp.Scores]:
    """The model, its calibration data and its scores."""
    model, data = resnet(depth, shared), some(cifar10("train10k", shared), count, seed=draw)
    spaces = fp.discover(model, data[0][0][:1], skip=["conv1"])
    return model, data, fp.score(model, data, spaces=spaces, removal=SIGNALS)


def measure(case: Row, shared: Path) -> Row:
    model, data, scores = bench(case["depth"], case["draw"], case["calibration"], shared)
    budget = fp.Budget("flops", case["keep"])
    plan = fp.allocate(scores.using(case["signal"]), keep=budget, rule=case["rule"], exact=True)
    small = fp.cut(model, plan)
    images, labels = cifar10("test", shared)
    test = images[: case["test"]], labels[: case["test"]]
    return {
        "flops_kept": round(plan.share("flops"), 4),
        "top1": round(top1(small, test), 2),
        "repaired": round(top1(fp.repair(small, model, plan, data, method="sequential"), test), 2),
    }


def page() -> str:
    """ToD beside uniform for each signal, as Markdown."""
    stored, lines = runs.stored("modularity"), []
    for depth, keep in sorted({(row["depth"], row["keep"]) for row in stored}, reverse=True):
        for signal in SIGNALS:
            cells = [
                pages.spread(
                    [
                        row[what]
                        for row in stored
                        if (row["depth"], row["keep"], row["signal"], row["rule"])
                        == (depth, keep, signal, rule)
                    ]
                )
                for what in ("top1", "repaired")
                for rule in RULES
            ]
            if any(cells):
                lines.append([f"ResNet-{depth}", f"{keep:g}", signal, *cells])
    head = [
        "model",
        "FLOPs kept",
        "removal",
        "cut, ToD",
        "cut, uniform",
        "repaired, ToD",
        "repaired, uniform",
    ]
    return pages.table(head, lines)
