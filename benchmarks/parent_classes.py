"""Groups of classes instead of single classes: how much the ranking of the Wasserstein signal changes.

`fp.score(..., groups=K)` compares K groups of similar classes. The table has the Spearman correlation of the
removal scores with those of all single classes, mean over spaces and the lowest space: ResNet-20 on 2,000
images of CIFAR-10 (10 classes), and ResNet-50 on the ImageNet sample (1,000 classes, one image of each, so
that single classes have one sample only). The processor time is a share of that of single classes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import imagenet
import numpy as np
from harness import pages, runs
from nets.images import cifar10, some
from nets.training import resnet

import fairpruner as fp
from fairpruner.core.correlation import spearman

Row = dict[str, Any]


def cases(quick: bool) -> Iterator[Row]:
    for groups in (3,) if quick else range(2, 10):
        yield {"model": "ResNet-20", "images": 250 if quick else 2000, "groups": groups}
    for groups in () if quick else (10, 50, 200):
        yield {"model": "ResNet-50", "images": 500, "groups": groups}


@cache
def scored(model: str, images: int, groups: int | None, shared: Path) -> tuple[fp.Scores, float]:
    """Scores, and the processor seconds they took."""
    if model == "ResNet-20":
        net, data = resnet(20, shared), some(cifar10("train10k", shared), images)
    else:
        net, data = imagenet.original(model, shared), imagenet.images(model, images, shared)[0]
    spaces = fp.discover(net, data[0][0][:1])
    start = time.process_time()
    return fp.score(net, data, spaces=spaces, groups=groups), time.process_time() - start


def measure(case: Row, shared: Path) -> Row:
    full, usual = scored(case["model"], case["images"], None, shared)
    grouped, seconds = scored(case["model"], case["images"], case["groups"], shared)
    ranks = [spearman(full.removal[name], grouped.removal[name]) or 0.0 for name in full.removal]
    return {
        "spearman": round(float(np.mean(ranks)), 4),
        "lowest": round(float(np.min(ranks)), 4),
        "time": round(seconds / usual, 3),
    }


def page() -> str:
    """Correlation by groups, as Markdown."""
    lines = [
        [
            row["model"],
            f"{row['groups']}",
            f"{row['spearman']:.3f}",
            f"{row['lowest']:.3f}",
            f"{row['time']:.2f}",
        ]
        for row in runs.stored("parent_classes")
    ]
    return pages.table(["model", "groups", "Spearman, mean", "lowest space", "time"], lines)
