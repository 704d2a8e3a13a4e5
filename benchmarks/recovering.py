"""Accuracy after a little training: ResNet-56 at 46.2 % of its FLOPs, the paper's row, by epochs.

    python benchmarks/recovering.py --shared ../shared --folder ../runs       # what is not there yet
    python benchmarks/recovering.py --table                                   # only the docs' table and plot

The default of `fp.prune` cuts, on 2,000 training images. Each run then trains this model on all 50,000
training images (crops and mirror images, batches of 128), distilled from the original, for so many epochs
and with so many seeds; the last weights are tested. A run that is stopped goes on from its checkpoint in
--folder. The paper has 93.64 after 300 epochs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import pages
import torch
from cifar_models import CifarResNet, cifar10, resnet, some, top1
from torch.utils.data import DataLoader, TensorDataset

import fairpruner as fp
from fairpruner.inputs.augmentation import Augmented

FIGURE = Path(__file__).parents[1] / "docs" / "images" / "recovering.svg"
KEEP, CALIBRATION, BATCH = 0.462, 2000, 128
Row = dict[str, Any]


def pruned(shared: Path, folder: Path) -> torch.nn.Module:
    """The smaller model before training, from the folder if it is there."""
    if not (folder / "pruned").exists():
        model = resnet(56, shared).to(memory_format=torch.channels_last)
        data = some(cifar10("train10k", shared), CALIBRATION)
        small, plan = fp.prune(model, data, keep=fp.Budget("flops", KEEP))
        fp.save(small, plan, folder / "pruned")
    return fp.load(folder / "pruned", build=lambda: CifarResNet(9))


def run(shared: Path, folder: Path, images: int, epochs: int, seed: int) -> Row:
    """One training run."""
    x, y = cifar10("train", shared) if images > 10_000 else cifar10("train10k", shared)
    small, test = pruned(shared, folder), cifar10("test", shared)
    before = top1(small, test)
    dataset = Augmented(TensorDataset(x[:images], y[:images]), ["crop", "flip"])
    loader = DataLoader(dataset, BATCH, shuffle=True, generator=torch.Generator())
    start = time.process_time()
    trained = fp.recover(
        small,
        loader,
        epochs=epochs,
        teacher=resnet(56, shared),
        recipe=fp.Recipe(seed=seed),
        folder=folder / f"{images}-{epochs}-{seed}",
    )
    return {
        "images": images,
        "epochs": epochs,
        "seed": seed,
        "top1": round(top1(trained, test), 2),
        "before": round(before, 2),
        "cpu_seconds": round(time.process_time() - start),
    }


def grouped(rows: list[Row]) -> list[tuple[int, int, list[float]]]:
    """Images, epochs and the accuracies of all seeds."""
    keys = sorted({(r["images"], r["epochs"]) for r in rows})
    return [(i, e, [r["top1"] for r in rows if (r["images"], r["epochs"]) == (i, e)]) for i, e in keys]


def page() -> str:
    """The results as Markdown."""
    lines = []
    for images, epochs, found in grouped(_rows()):
        deviation = f" ± {statistics.stdev(found):.2f}" if len(found) > 1 else ""
        lines.append([f"{images:,}", f"{epochs}", f"{statistics.mean(found):.2f}{deviation} ({len(found)})"])
    return pages.table(["training images", "epochs", "top-1 (seeds)"], lines)


def _rows() -> list[Row]:
    rows: list[Row] = pages.results("recovering").get("rows", [])
    return rows


def plot(rows: list[Row]) -> None:
    """Accuracy against epochs, one line for each number of training images."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(5, 3.2), layout="constrained")).subplots()
    for images in sorted({r["images"] for r in rows}):
        points = [(0, [r["before"] for r in rows if r["images"] == images])]
        points += [(epochs, found) for i, epochs, found in grouped(rows) if i == images]
        axes.plot(
            *zip(*((e, statistics.mean(f)) for e, f in points), strict=True), "o-", label=f"{images:,} images"
        )
    axes.set(xlabel="epochs", ylabel="top-1, %")
    axes.legend()
    figure.savefig(FIGURE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument(
        "--folder", type=Path, default=Path("../runs"), help="for the cut model and checkpoints"
    )
    parser.add_argument("--epochs", type=int, nargs="+", default=[5, 15])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--table", action="store_true", help="only make the table and the plot")
    options = parser.parse_args()
    rows = _rows()
    for seed in range(0 if options.table else options.seeds):
        for epochs in options.epochs:
            if any((r["images"], r["epochs"], r["seed"]) == (options.images, epochs, seed) for r in rows):
                continue
            rows.append(run(options.shared, options.folder, options.images, epochs, seed))
            print(rows[-1], flush=True)
            pages.store("recovering", {"rows": rows})
    if rows:
        plot(rows)
    pages.fill("recovering", page())


if __name__ == "__main__":
    main()
