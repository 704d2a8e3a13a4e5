"""ResNet-56 on CIFAR-10 (the paper's Table 1) after recovery: the same fine-tuning for every library.

The models that benchmarks/cifar_peers.py cuts at 46.2 % of the FLOPs, each repaired or with its batch norms
re-estimated, are trained on all 50,000 images for 5 or 15 epochs with `fp.recover`, distilled from the
original: the same recipe, images and seeds for every way. A stopped run goes on from its checkpoint in the
cache of the user. The paper has 93.64 after 300 epochs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cifar_peers
import pages
import runs
import torch
from cifar_models import cifar10, resnet, top1
from torch.utils.data import DataLoader, TensorDataset
from training import CACHE

import fairpruner as fp
from fairpruner.inputs.augmentation import Augmented

WAYS = (
    {"library": "fairpruner", "way": "default"},
    {"library": "Torch-Pruning", "way": "Taylor", "scope": "global"},
    {"library": "fairpruner", "way": "by hand"},
    {"library": "Torch-Pruning", "way": "magnitude", "scope": "local"},
    {"library": "Torch-Pruning", "way": "Hessian", "scope": "global"},
    {"library": "fairpruner", "way": "paper"},
)
Row = dict[str, Any]


def cases(quick: bool) -> Iterator[Row]:
    size = (
        {"depth": 20, "calibration": 250, "test": 1000, "train": 500}
        if quick
        else {"depth": 56, "calibration": 2000, "test": 10_000, "train": 50_000}
    )
    for seed in range(1 if quick else 3):
        for epochs in (1,) if quick else (5, 15):
            for way in WAYS[2:4] if quick else WAYS:
                yield {**way, "epochs": epochs, "seed": seed, "draw": 0, "keep": 0.462, **size}


def measure(case: Row, shared: Path) -> Row:
    cut, better = cifar_peers.smaller(case, shared)
    small = better if better is not None else cut
    assert small is not None
    split = "train" if case["train"] > 10_000 else "train10k"
    x, y = (part[: case["train"]] for part in cifar10(split, shared))
    loader = DataLoader(
        Augmented(TensorDataset(x, y), ["crop", "flip"]), 128, shuffle=True, generator=torch.Generator()
    )
    images, labels = cifar10("test", shared)
    test = images[: case["test"]], labels[: case["test"]]
    name = "-".join(str(value).replace(" ", "_") for value in case.values())
    trained = fp.recover(
        small,
        loader,
        epochs=case["epochs"],
        teacher=resnet(case["depth"], shared),
        recipe=fp.Recipe(seed=case["seed"]),
        folder=CACHE / "cifar_recovery" / name,
    )
    return {"before": round(top1(small, test), 2), "top1": round(top1(trained, test), 2)}


def page() -> str:
    """Ways by epochs, as Markdown."""
    stored, lines = runs.stored("cifar_recovery"), []
    for way in WAYS:
        found = [row for row in stored if way.items() <= row.items()]
        if found:
            title = ", ".join(value for name, value in way.items() if name != "library")
            by_epochs = ([r["top1"] for r in found if r["epochs"] == epochs] for epochs in (5, 15))
            cells = (pages.spread(values) for values in ([r["before"] for r in found[:1]], *by_epochs))
            lines.append([way["library"], title, *cells])
    return pages.table(["library", "way", "before training", "5 epochs", "15 epochs"], lines)
