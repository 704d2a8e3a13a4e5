"""How many samples scoring needs: time and stability of the rankings by the number of calibration images.

ResNet-20 on CIFAR-10. Two disjoint draws of N images are scored; the table has the Spearman correlation of
their removal and protection scores (mean over spaces), the Jaccard similarity of the units that ToD removes
at half of the FLOPs, and the processor time as a share of that of 2,000 images.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from harness import pages, runs
from nets.images import cifar10, some
from nets.training import resnet
from taylor_order import units

import fairpruner as fp
from fairpruner.core.correlation import spearman

REMOVALS, USUAL = ("wasserstein", "reconstruction"), 2000
Row = dict[str, Any]


def cases(quick: bool) -> Iterator[Row]:
    for count in (100, 200) if quick else (100, 250, 500, 1000, USUAL, 4000):
        yield {"images": count, "draw": 0}


@cache
def scored(count: int, half: int, draw: int, shared: Path) -> tuple[fp.Scores, float]:
    """Scores of one of two disjoint draws, and the processor seconds they took."""
    model = resnet(20, shared)
    batches = some(cifar10("train10k", shared), 2 * count, batch=50, seed=draw)
    data = batches[half::2]
    spaces = fp.discover(model, data[0][0][:1], skip=["conv1"])
    start = time.process_time()
    return fp.score(model, data, spaces=spaces, removal=REMOVALS), time.process_time() - start


def measure(case: Row, shared: Path) -> Row:
    (one, seconds), (other, _) = (scored(case["images"], half, case["draw"], shared) for half in (0, 1))
    plans = [fp.allocate(scores, keep=fp.Budget("flops", 0.5)) for scores in (one, other)]
    removed = [units(plan) for plan in plans]
    return {
        **{name: _agreement(one.removals[name], other.removals[name]) for name in REMOVALS},
        "taylor": _agreement(one.protections["taylor"], other.protections["taylor"]),
        "jaccard": round(len(removed[0] & removed[1]) / len(removed[0] | removed[1]), 3),
        "seconds": round(seconds, 2),
    }


def _agreement(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    return round(float(np.mean([spearman(one[name], other[name]) or 0.0 for name in one])), 3)


def page() -> str:
    """Stability and time by images, as Markdown."""
    stored = sorted(runs.stored("sample_size"), key=lambda row: row["images"])
    usual = {row["images"]: row["seconds"] for row in stored}.get(USUAL)
    lines = [
        [
            f"{row['images']:,}",
            *(f"{row[name]:.3f}" for name in (*REMOVALS, "taylor", "jaccard")),
            f"{row['seconds'] / usual:.2f}" if usual else "",
        ]
        for row in stored
    ]
    head = ["images", *(f"`{name}`" for name in (*REMOVALS, "taylor")), "removed by ToD, Jaccard", "time"]
    return pages.table(head, lines)
