"""What stays the same when scoring is repeated: the same run again, loader workers, threads, processes, and
other orders of batches and samples.

ResNet-20 with trained weights and 1,500 CIFAR-10 images, 150 of each class. Every run is compared with the
first one: for each signal the largest difference of a score, as a share of the largest score of its space (0
if all bits are equal), and the lowest rank correlation of a space. Besides, for M `kept` samples, the error
of the summaries that `wasserstein` keeps of random numbers, drawn or sorted: the largest relative error of
the W1 distance of two summarised classes, over 20 pairs that differ by shift, spread or shape.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import pages, runs
from nets.images import cifar10
from nets.training import resnet
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import fairpruner as fp
from fairpruner.scoring.signals.quantiles import ClassQuantiles
from fairpruner.scoring.signals.wasserstein import diameter, quantile_points

HERE = Path(__file__).parent
SIGNALS = {
    "removal": ["wasserstein", "activation", "reconstruction", "l1"],
    "protection": ["taylor", "taylor2"],
}
NAMES = [name for names in SIGNALS.values() for name in names]
BATCH = 100
KEPT, COUNTS, ORDERS = (16, 64, 256), (300, 1000, 5000), ("drawn", "sorted")
CHANGES = {
    "again": "the same run again",
    "sample_order": "the samples in another order",
    "workers": "two loader workers instead of a list",
    "batch_order": "the batches in another order",
    "by_brightness": "the samples sorted by mean brightness",
    "batch_size": "batches of 60 instead of 100",
    "processes": "two processes instead of one",
    "threads": "two threads instead of one",
    "by_class": "the samples sorted by class",
}
Row = dict[str, Any]


def cases(quick: bool) -> Iterator[Row]:
    """Runs that differ from the first in one way, then summaries of random numbers."""
    for change in ("again", "workers", "processes") if quick else CHANGES:
        yield {"part": "scores", "change": change, "images": 300 if quick else 1500}
    for kept in KEPT[:1] if quick else KEPT:
        for samples in COUNTS[:1] if quick else COUNTS:
            for order in ORDERS:
                yield {"part": "summaries", "kept": kept, "samples": samples, "order": order}


def measure(case: Row, shared: Path) -> Row:
    if case["part"] == "summaries":
        errors = (_error(case["kept"], case["samples"], case["order"], draw) for draw in range(20))
        return {"error": max(errors)}
    return compare(usual(case["images"], shared), changed(case["change"], case["images"], shared))


@cache
def images(count: int, shared: Path) -> tuple[Tensor, Tensor]:
    """The first images of every class, equally many, in the order of the data set."""
    inputs, labels = cifar10("train10k", shared)
    classes = [(labels == label).nonzero().flatten()[: count // 10] for label in range(10)]
    own = torch.cat(classes).sort().values
    # Contiguous, as a loader yields them: convolutions round differently for other memory formats.
    return inputs[own].contiguous(), labels[own]


def in_batches(inputs: Tensor, labels: Tensor, size: int = BATCH) -> list[tuple[Tensor, Tensor]]:
    return list(zip(inputs.split(size), labels.split(size), strict=True))


def scored(shared: Path, data: Iterable[Any], threads: int = 1) -> fp.Scores:
    torch.set_num_threads(threads)
    model = resnet(20, shared)
    return fp.score(model, data, spaces=fp.discover(model, torch.zeros(1, 3, 32, 32)), **SIGNALS)


@cache
def usual(count: int, shared: Path) -> fp.Scores:
    """The scores that all others are compared with."""
    return scored(shared, in_batches(*images(count, shared)))


def changed(change: str, count: int, shared: Path) -> fp.Scores:
    """The scores of a run that differs from the first in one way."""
    inputs, labels = images(count, shared)
    if change == "processes":
        return in_two_processes(count, shared)
    if change == "workers":
        return scored(shared, DataLoader(TensorDataset(inputs, labels), batch_size=BATCH, num_workers=2))
    if change == "batch_order":
        batches = in_batches(inputs, labels)
        return scored(shared, [batches[i] for i in np.random.default_rng(0).permutation(len(batches))])
    order = {
        "sample_order": torch.randperm(count, generator=torch.Generator().manual_seed(0)),
        "by_class": labels.argsort(stable=True),
        "by_brightness": inputs.mean((1, 2, 3)).argsort(stable=True),
    }.get(change, torch.arange(count))
    data = in_batches(inputs[order], labels[order], 60 if change == "batch_size" else BATCH)
    return scored(shared, data, threads=2 if change == "threads" else 1)


def in_two_processes(count: int, shared: Path) -> fp.Scores:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = f"import sys; sys.path.insert(0, {str(HERE)!r}); import determinism; determinism.save_scores"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", f"{script}{count, str(shared), folder}"]
        environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        jobs = [subprocess.Popen(command, env={**environment, "RANK": str(rank)}) for rank in (0, 1)]
        if any(job.wait() for job in jobs):
            raise SystemExit("One of the two processes failed.")
        return fp.Scores.load(f"{folder}/scores.0")


def save_scores(count: int, shared: str, folder: str) -> None:
    """What one of two processes does."""
    usual(count, Path(shared)).save(f"{folder}/scores.{os.environ['RANK']}")


def compare(first: fp.Scores, second: fp.Scores) -> Row:
    """For each signal the largest difference and the lowest rank correlation."""
    found = {}
    for side, names in SIGNALS.items():
        for name in names:
            pairs = [_of(scores, side, name) for scores in (first, second)]
            shares, ranks = [], []
            for space in first.spaces.names:
                a, b = (pair[space] for pair in pairs)
                shares.append(0.0 if np.array_equal(a, b) else float(np.abs(a - b).max() / np.abs(a).max()))
                ranks.append(float(np.corrcoef(a.argsort().argsort(), b.argsort().argsort())[0, 1]))
            found[name] = {"difference": max(shares), "rank_correlation": min(ranks)}
    return found


def _of(scores: fp.Scores, side: str, name: str) -> Any:
    chosen = scores.using(**{side: name})
    return getattr(chosen, side)


def _error(kept: int, count: int, order: str, draw: int) -> float:
    rng = np.random.default_rng(draw)
    others = (rng.normal(0.5, 1, count), rng.normal(0, 2, count), rng.exponential(size=count))
    pair = [rng.normal(size=count), others[draw % 3]]
    exact = float(np.abs(np.sort(pair[0]) - np.sort(pair[1])).mean())
    steps = []
    for values in pair:
        one = ClassQuantiles(1, kept, torch.empty(0, dtype=torch.float64))
        ordered = np.sort(values) if order == "sorted" else values
        one.extend(torch.from_numpy(ordered)[:, None], torch.arange(count))
        steps.append(one.steps(slice(0, 1)).whole)
    return abs(float(diameter(quantile_points(steps, 1))) / exact - 1)


def page() -> str:
    """Both tables as Markdown."""
    stored = runs.stored("determinism")
    compared = {row["change"]: row for row in stored if row["part"] == "scores"}
    lines = [
        [text, *(_cell(**compared[change][name]) for name in NAMES)]
        for change, text in CHANGES.items()
        if change in compared
    ]
    errors = {
        (row["samples"], row["kept"], row["order"]): f"{row['error']:.1%}"
        for row in stored
        if row["part"] == "summaries"
    }
    columns = [(kept, order) for kept in KEPT for order in ORDERS]
    cells = [[f"{n:,}", *(errors.get((n, *column), "") for column in columns)] for n in COUNTS]
    tables = (
        pages.table(["compared with the first run", *NAMES], lines),
        pages.table(["samples of a class", *(f"M = {kept}, {order}" for kept, order in columns)], cells),
    )
    return "\n\n".join(tables)


def _cell(difference: float, rank_correlation: float) -> str:
    return "equal" if difference == 0 else f"{difference:.1g} ({rank_correlation:.3f})"
