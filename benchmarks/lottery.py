"""Lottery tickets: iterative magnitude pruning with rewinding beside one `fp.prune`, at the same size.

A ResNet-8 is trained on the 10,000 images. *tickets*: in each round the channels with the smallest l1 norms
are removed, a fifth of the parameters of every space alike; the weights left are rewound to those after the
first epoch and trained again. *one-shot*: `fp.prune` cuts the trained net once, to the same parameters, with
and without one epoch of `fp.recover`. The cost counts training only, in epochs of the full net: an epoch of
a smaller net costs its share of the FLOPs. `fp.prune` sees 2,000 of the training images.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from harness import pages, runs
from nets import training
from nets.cifar_models import CifarResNet
from nets.images import cifar10, some, top1
from torch import Tensor, nn

import fairpruner as fp

WAYS = ("tickets", "one-shot", "one-shot and an epoch")
Row = dict[str, Any]
Images = tuple[Tensor, Tensor]


def cases(quick: bool) -> Iterator[Row]:
    size = (
        {"train": 500, "epochs": 2, "rounds": 1, "calibration": 250, "test": 500}
        if quick
        else {"train": 10_000, "epochs": 15, "rounds": 4, "calibration": 2000, "test": 10_000}
    )
    for seed in range(1 if quick else 3):
        for way in WAYS:
            yield {"way": way, "seed": seed, **size}


@cache
def started(seed: int, train: int, epochs: int, shared: Path) -> tuple[nn.Module, nn.Module, Images]:
    """The net after the first epoch, the trained net, and the images."""
    torch.manual_seed(seed)
    images, labels = cifar10("train10k", shared)
    data = images[:train], labels[:train]
    early = CifarResNet(8)
    training.train(early, data, 1, seed=seed)
    full = copy.deepcopy(early)
    training.train(full, data, epochs - 1, seed=seed)
    return early, full, data


@cache
def tickets(seed: int, train: int, epochs: int, rounds: int, shared: Path) -> tuple[nn.Module, float, float]:
    """The net after all rounds, the share of parameters it keeps, and the epochs that all training took."""
    early, full, images = started(seed, train, epochs, shared)
    example, spent = images[0][:1], float(epochs)
    small, start = full, early
    for _ in range(rounds):
        scores = fp.score(small, some(images, 100), removal="l1", protection="random")
        plan = fp.allocate(scores, keep=fp.Budget("params", 0.8), rule="uniform")
        small = start = fp.cut(start, plan)  # the same units of the early weights
        small = copy.deepcopy(small)
        training.train(small, images, epochs - 1, seed=seed)
        spent += (epochs - 1) * fp.count_flops(small, example) / fp.count_flops(full, example)
    return small, fp.count_params(small) / fp.count_params(full), spent


def measure(case: Row, shared: Path) -> Row:
    seed, train, epochs = case["seed"], case["train"], case["epochs"]
    _, full, images = started(seed, train, epochs, shared)
    small, share, spent = tickets(seed, train, epochs, case["rounds"], shared)
    if case["way"] != "tickets":
        data = some(images, case["calibration"], seed=seed)
        small, spent = fp.prune(full, data, keep=fp.Budget("params", share))[0], float(epochs)
        if case["way"] == WAYS[2]:
            shuffled = some(images, train, batch=100, seed=seed)
            small = fp.recover(small, shuffled, epochs=1, teacher=full, recipe=fp.Recipe(seed=seed))
            spent += fp.count_flops(small, images[0][:1]) / fp.count_flops(full, images[0][:1])
    tested, labels = cifar10("test", shared)
    test = tested[: case["test"]], labels[: case["test"]]
    return {
        "params_kept": round(fp.count_params(small) / fp.count_params(full), 4),
        "original": round(top1(full, test), 2),
        "top1": round(top1(small, test), 2),
        "epochs_spent": round(spent, 2),
    }


def page() -> str:
    """Accuracy and cost by way, as Markdown."""
    lines = []
    for way in WAYS:
        found = [row for row in runs.stored("lottery") if row["way"] == way]
        if found:
            fields = ("params_kept", "original", "top1", "epochs_spent")
            lines.append([way, *(pages.spread([row[field] for row in found]) for field in fields)])
    return pages.table(["way", "parameters kept", "original", "top-1", "epochs of training"], lines)
