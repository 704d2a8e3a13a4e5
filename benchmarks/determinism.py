"""What stays the same when scoring is repeated: the same run again, loader workers, threads, processes, and
other orders of batches and samples.

    python benchmarks/determinism.py --shared ../shared     about 10 minutes on one core
    python benchmarks/determinism.py --table                only write the table into docs/signals.md

ResNet-20 with trained weights and 2,000 CIFAR-10 images, 200 of each class. Every run is compared with the
first one. Writes benchmarks/results/determinism.json after each run, and skips what it already holds.
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
import torch
from cifar_models import cifar10, resnet
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import fairpruner as fp

RESULTS = Path(__file__).parent / "results" / "determinism.json"
PAGE = Path(__file__).parents[1] / "docs" / "signals.md"
START, END = "<!-- made by: python benchmarks/determinism.py --table -->", "<!-- end of determinism -->"
SIGNALS = {
    "removal": ["wasserstein", "activation", "reconstruction", "l1"],
    "protection": ["taylor", "taylor2"],
}
NAMES = [name for names in SIGNALS.values() for name in names]
IMAGES, BATCH = 2000, 100

RUNS = {
    "again": "the same run again",
    "workers": "two loader workers instead of none",
    "threads": "two threads instead of one",
    "batch_size": "batches of 60 instead of 100",
    "batch_order": "the batches in another order",
    "sample_order": "the samples in another order",
    "by_class": "the samples sorted by class",
    "by_brightness": "the samples sorted by mean brightness",
    "processes": "two processes instead of one",
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
        write_table(json.loads(RESULTS.read_text()))
        return
    torch.set_num_threads(1)
    if options.process:  # one of two processes, started below
        scored(options.shared, in_batches(*images(options.shared))).save(
            f"{options.process}.{os.environ['RANK']}"
        )
        return
    first = scored(options.shared, in_batches(*images(options.shared)))
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for run in RUNS:
        if run not in results:
            results[run] = compare(first, other(run, options.shared))
            print(run, results[run], flush=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write_table(results)


def images(shared: Path) -> tuple[Tensor, Tensor]:
    """The first 200 images of every class, in the order of the data set."""
    inputs, labels = cifar10("train10k", shared)
    own = (
        torch.cat([(labels == label).nonzero().flatten()[: IMAGES // 10] for label in range(10)])
        .sort()
        .values
    )
    return inputs[own], labels[own]


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


def write_table(results: dict[str, Any]) -> None:
    lines = ["| compared with the first run | " + " | ".join(NAMES) + " |", "|---|" + "---|" * len(NAMES)]
    for run, text in RUNS.items():
        if run in results:
            cells = [_cell(**results[run][name]) for name in NAMES]
            lines.append(f"| {text} | " + " | ".join(cells) + " |")
    table = "\n".join(lines)
    print(table)
    page = PAGE.read_text()
    before, rest = page.split(START)
    PAGE.write_text(f"{before}{START}\n\n{table}\n\n{END}{rest.split(END)[1]}")


def _cell(difference: float, rank_correlation: float) -> str:
    return "equal" if difference == 0 else f"{difference:.1g} ({rank_correlation:.3f})"


if __name__ == "__main__":
    main()
