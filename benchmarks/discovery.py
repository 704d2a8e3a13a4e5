"""How long discovery takes, verification included, by model and by depth.

The time is a multiple of one forward pass over the same example of 224 px, in processor time. Chains of
small linear maps show how it grows with depth: linearly.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from harness import pages, runs
from harness.torchvision_shim import torchvision

import fairpruner as fp

MODELS = ("resnet50", "vgg16_bn", "mobilenet_v2", "densenet121", "convnext_tiny")
REPEATS, DEPTHS = 5, (250, 1000, 2000)
Row = dict[str, Any]


def cases(quick: bool) -> Iterator[Row]:
    """Models of torchvision, then chains."""
    for name in MODELS[2:3] if quick else MODELS:
        yield {"model": name}
    for depth in (100,) if quick else DEPTHS:
        yield {"model": "chain", "depth": depth}


def measure(case: Row, shared: Path) -> Row:
    if case["model"] == "chain":
        _chain(10)  # loads what discovery needs
        spent = _chain(case["depth"])
        return {"discovery_s": round(spent, 3), "ms_per_map": round(1000 * spent / case["depth"], 2)}
    model = torchvision.models.get_model(case["model"], weights=None).eval()
    example = torch.randn(1, 3, 224, 224)
    forwards, discoveries = [], []
    with torch.no_grad():
        model(example)
        for _ in range(REPEATS):
            forwards += [_seconds(lambda: model(example)) for _ in range(3)]
            discoveries.append(_seconds(lambda: fp.discover(model, example)))
    forward, discovery = statistics.median(forwards), statistics.median(discoveries)
    spaces = fp.discover(model, example)
    return {
        "discovery_s": round(discovery, 3),
        "forwards": round(discovery / forward, 1),
        "spaces": len(spaces),
        "units": sum(space.size for space in spaces),
    }


def _chain(depth: int) -> float:
    model = torch.nn.Sequential(*(m for _ in range(depth) for m in (torch.nn.Linear(8, 8), torch.nn.ReLU())))
    return _seconds(lambda: fp.discover(model, torch.randn(1, 8)))


def _seconds(action: Callable[[], object]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def page() -> str:
    """Models, then chains, as Markdown."""
    models = [row for row in runs.stored("discovery") if "forwards" in row]
    chains = [row for row in runs.stored("discovery") if "depth" in row]
    parts = [
        pages.table(
            ["model", "forward passes", "spaces", "units"],
            [[r["model"], f"{r['forwards']:.1f}", f"{r['spaces']}", f"{r['units']:,}"] for r in models],
        ),
        pages.table(
            ["chain of linear maps", "ms per map"],
            [[f"{row['depth']:,}", f"{row['ms_per_map']:.1f}"] for row in chains],
        ),
    ]
    return "\n\n".join(part for part, rows in zip(parts, (models, chains), strict=True) if rows)
