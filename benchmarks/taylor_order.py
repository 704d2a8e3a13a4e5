"""The order of the Taylor score (the paper's appendix): first and second order beside exact deletion.

CIFAR-10 ResNets, channels inside the blocks, removal by `wasserstein`. At each tolerance ToD makes one plan
for each protection signal: `taylor` (first order), `taylor2` (second order), `deletion` (the change of the
loss when one unit is removed, on 64 images). The table has the Jaccard similarity of the removed sets to
those of `deletion`, and the points of top-1 lost by the cut, on all 10,000 test images.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from harness import pages, runs
from nets.images import cifar10, some, top1
from nets.training import resnet
from torch import nn

import fairpruner as fp

ORDERS = ("taylor", "taylor2", "deletion")
Row = dict[str, Any]


def cases(quick: bool) -> Iterator[Row]:
    size = (
        {"calibration": 250, "deleted": 8, "test": 1000}
        if quick
        else {"calibration": 2000, "deleted": 64, "test": 10_000}
    )
    for depth in (20,) if quick else (20, 56):
        for alpha in (0.1,) if quick else (0.05, 0.1, 0.2, 0.3):
            for order in ORDERS:
                yield {"depth": depth, "alpha": alpha, "protection": order, **size}


@cache
def bench(depth: int, calibration: int, deleted: int, shared: Path) -> tuple[nn.Module, fp.Scores]:
    """The model and its scores, with all three protection signals."""
    model, data = resnet(depth, shared), some(cifar10("train10k", shared), calibration)
    spaces = fp.discover(model, data[0][0][:1], skip=["conv1"])
    few = [(data[0][0][:deleted], data[0][1][:deleted])]
    exact = fp.score(model, few, spaces=spaces, removal="l1", protection="deletion")
    scores = fp.score(model, data, spaces=spaces, protection=["taylor", "taylor2"])
    return model, replace(scores, protections={**scores.protections, **exact.protections})


@cache
def baseline(depth: int, count: int, shared: Path) -> float:
    images, labels = cifar10("test", shared)
    return top1(resnet(depth, shared), (images[:count], labels[:count]))


def measure(case: Row, shared: Path) -> Row:
    model, scores = bench(case["depth"], case["calibration"], case["deleted"], shared)
    plans = {order: fp.allocate(scores.using(protection=order), alpha=case["alpha"]) for order in ORDERS}
    removed = {order: units(plan) for order, plan in plans.items()}
    plan, own, exact = plans[case["protection"]], removed[case["protection"]], removed["deletion"]
    images, labels = cifar10("test", shared)
    found = top1(fp.cut(model, plan), (images[: case["test"]], labels[: case["test"]]))
    return {
        "jaccard": round(len(own & exact) / max(len(own | exact), 1), 4),
        "params_kept": round(plan.share("params"), 4),
        "drop": round(baseline(case["depth"], case["test"], shared) - found, 2),
    }


def units(plan: fp.Plan) -> set[tuple[str, int]]:
    """The removed units."""
    return {(name, unit) for name, removed in plan.removed.items() for unit in removed}


def page() -> str:
    """Similarity, size and drop by tolerance and order, as Markdown."""
    lines = [
        [
            f"ResNet-{row['depth']}",
            f"{row['alpha']:g}",
            f"`{row['protection']}`",
            f"{row['jaccard']:.2f}",
            f"{100 * (1 - row['params_kept']):.1f} %",
            f"{row['drop']:.2f}",
        ]
        for row in runs.stored("taylor_order")
    ]
    head = ["model", "tolerance", "protection", "Jaccard to deletion", "parameters removed", "points lost"]
    return pages.table(head, lines)
