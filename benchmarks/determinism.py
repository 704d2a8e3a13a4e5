"""What stays the same when scoring is repeated: the same run again, loader workers, threads, processes, and
other orders of batches and samples.

    python benchmarks/determinism.py --shared ../shared     about 10 minutes on one core
    python benchmarks/determinism.py --table                only write the table into docs/signals.md

ResNet-20 with trained weights and 1,500 CIFAR-10 images, 150 of each class. Every run is compared with the
first one. Besides, the error of the summaries that `wasserstein` keeps of random numbers, drawn or sorted.
Writes benchmarks/results/determinism.json after each run, and skips what it already holds.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pages
import torch
from cifar_models import cifar10, resnet
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import fairpruner as fp
from fairpruner.scoring.signals.quantiles import ClassQuantiles
from fairpruner.scoring.signals.wasserstein import diameter, quantile_points

RESULTS = Path(__file__).parent / "results" / "determinism.json"
SIGNALS = {
    "removal": ["wasserstein", "activation", "reconstruction", "l1"],
    "protection": ["taylor", "taylor2"],
}
NAMES = [name for names in SIGNALS.values() for name in names]
IMAGES, BATCH = 1500, 100
KEPT, COUNTS, ORDERS = (16, 64, 256), (300, 1000, 5000), ("drawn", "sorted")

RUNS = {
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--process", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table:
        pages.fill("determinism", page())
        return
    torch.set_num_threads(1)
    if options.process:  # one of two processes, started below
        scored(options.shared, in_batches(*images(options.shared))).save(
            f"{options.process}.{os.environ['RANK']}"
        )
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if "summaries" not in results:
        results["summaries"] = summary_errors()
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    first = scored(options.shared, in_batches(*images(options.shared)))
    for run in RUNS:
        if run not in results:
            results[run] = compare(first, other(run, options.shared))
            print(run, results[run], flush=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    pages.fill("determinism", page())


def images(shared: Path) -> tuple[Tensor, Tensor]:
    """The first 150 images of every class, in the order of the data set."""
    inputs, labels = cifar10("train10k", shared)
    own = (
        torch.cat([(labels == label).nonzero().flatten()[: IMAGES // 10] for label in range(10)])
        .sort()
        .values
    )
    # Contiguous, as a loader yields them: convolutions round differently for other memory formats.
    return inputs[own].contiguous(), labels[own]


def in_batches(inputs: Tensor, labels: Tensor, size: int = BATCH) -> list[tuple[Tensor, Tensor]]:
    return list(zip(inputs.split(size), labels.split(size), strict=True))


def scored(shared: Path, data: Iterable[Any]) -> fp.Scores:
    model = resnet(20, shared)
    return fp.score(model, data, spaces=fp.discover(model, torch.zeros(1, 3, 32, 32)), **SIGNALS)


def other(run: str, shared: Path) -> fp.Scores:
    """The scores of a run that differs from the first in one way."""
    inputs, labels = images(shared)
    if run == "processes":
        return in_two_processes(shared)
    if run == "workers":
        return scored(shared, DataLoader(TensorDataset(inputs, labels), batch_size=BATCH, num_workers=2))
    if run == "batch_order":
        batches = in_batches(inputs, labels)
        return scored(shared, [batches[i] for i in np.random.default_rng(0).permutation(len(batches))])
    order = {
        "sample_order": torch.randperm(IMAGES, generator=torch.Generator().manual_seed(0)),
        "by_class": labels.argsort(stable=True),
        "by_brightness": inputs.mean((1, 2, 3)).argsort(stable=True),
    }.get(run, torch.arange(IMAGES))
    torch.set_num_threads(2 if run == "threads" else 1)
    try:
        return scored(shared, in_batches(inputs[order], labels[order], 60 if run == "batch_size" else BATCH))
    finally:
        torch.set_num_threads(1)


def in_two_processes(shared: Path) -> fp.Scores:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--shared", str(shared), "--process", f"{folder}/scores"]
        environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        jobs = [subprocess.Popen(command, env={**environment, "RANK": str(rank)}) for rank in (0, 1)]
        if any(job.wait() for job in jobs):
            raise SystemExit("One of the two processes failed.")
        return fp.Scores.load(f"{folder}/scores.0")


def compare(first: fp.Scores, second: fp.Scores) -> dict[str, Any]:
    """For each signal the largest difference of a score, as a share of the largest score of its space (0 if
    all bits are equal), and the lowest rank correlation of a space.
    """
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


def summary_errors() -> dict[str, float]:
    """The largest relative error of the W1 distance of two summarised classes, over 20 pairs that differ by
    shift, spread or shape: "M, samples, order" -> error.
    """
    found: dict[str, float] = {}
    for kept in KEPT:
        for count in COUNTS:
            for order in ORDERS:
                found[f"{kept}, {count}, {order}"] = max(
                    _error(kept, count, order, draw) for draw in range(20)
                )
    return found


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
    results = pages.results("determinism")
    lines = ["| compared with the first run | " + " | ".join(NAMES) + " |", "|---|" + "---|" * len(NAMES)]
    for run, text in RUNS.items():
        if run in results:
            cells = [_cell(**results[run][name]) for name in NAMES]
            lines.append(f"| {text} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| samples of a class | " + " | ".join(f"M = {m}, {o}" for m in KEPT for o in ORDERS) + " |",
    ]
    lines.append("|---|" + "---|" * len(KEPT) * len(ORDERS))
    for count in COUNTS:
        cells = [f"{results['summaries'][f'{m}, {count}, {o}']:.1%}" for m in KEPT for o in ORDERS]
        lines.append(f"| {count:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(difference: float, rank_correlation: float) -> str:
    return "equal" if difference == 0 else f"{difference:.1g} ({rank_correlation:.3f})"


if __name__ == "__main__":
    main()
