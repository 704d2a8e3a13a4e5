"""ResNet-56 on CIFAR-10 (the paper's Table 1) without training: Torch-Pruning 1.6.1 beside fairpruner.

python benchmarks/cifar_peers.py --shared ../shared     # goes on where it stopped
python benchmarks/cifar_peers.py --table                # only the table of docs/benchmarks.md

Every library sees the same 2,000 training images per draw; top-1 is of all 10,000 test images. Torch-Pruning
has no FLOPs budget, so its pruning ratio is searched until `fp.count_flops` is nearest to the budget. Each of
its criteria runs globally and with one ratio for all layers, on the channels inside the blocks: with those of
the residual stream, the model that it cuts does not run. Hessian takes the mean squared gradient over all
images: Torch-Pruning's own sum keeps only the last one. Each cut is measured as it is, and again after its
batch norms are re-estimated on the calibration images. The rows of fairpruner are those of
benchmarks/default.py.

Installs Torch-Pruning into benchmarks/.peers. Results: benchmarks/results/cifar_peers.json.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pages
import torch
import torch.nn.functional as F
from cifar_models import cifar10, resnet, some, top1
from torch import Tensor, nn

import fairpruner as fp

HERE = Path(__file__).parent
PACKAGES = HERE / ".peers"
CALIBRATION, DRAWS, BUDGETS = 2000, 3, (0.5, 0.3)
CRITERIA = {
    "magnitude": 1,
    "Taylor": DRAWS,
    "Hessian": DRAWS,
}  # and how many draws of images make a difference
OURS = {
    "default": "`fp.prune`, nothing else said",
    "by hand": "reconstruction, global, sequential repair",
    "paper": "the paper's method",
}
Row = dict[str, Any]
Gradients = dict[str, dict[str, Tensor]]  # criterion -> parameter -> gradient


def gradients(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> Gradients:
    """The mean gradient of the loss, and the mean of its square over single images."""
    first = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    second = copy.deepcopy(first)
    images = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    for x, y in zip(images[0].split(1), images[1].split(1), strict=True):
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for name, p in model.named_parameters():
            first[name] += p.grad / len(images[1])
            second[name] += p.grad**2 / len(images[1])
    model.zero_grad()
    return {"Taylor": first, "Hessian": second}


def pruned(model: nn.Module, found: Gradients, ratio: float, row: Row) -> nn.Module:
    """A copy of the model, pruned by Torch-Pruning."""
    import torch_pruning as tp

    small = copy.deepcopy(model)
    parameters = dict(small.named_parameters())
    for name, gradient in found.get(row["criterion"], {}).items():
        parameters[name].grad = gradient.clone()
    importance = {
        "magnitude": lambda: tp.importance.GroupMagnitudeImportance(p=2),
        "Taylor": tp.importance.GroupTaylorImportance,
        "Hessian": tp.importance.GroupHessianImportance,
    }[row["criterion"]]()
    if row["criterion"] == "Hessian":
        importance._accu_grad = {parameters[name]: g.clone() for name, g in found["Hessian"].items()}
        importance._counter = dict.fromkeys(importance._accu_grad, 1)
    stream = [m for path, m in small.named_modules() if path == "conv1" or path.endswith("conv2")]
    pruner = tp.pruner.BasePruner(
        small,
        torch.randn(1, 3, 32, 32),
        importance=importance,
        global_pruning=row["scope"] == "global",
        pruning_ratio=ratio,
        ignored_layers=[small.linear, *stream],
    )
    pruner.step()
    small.zero_grad()
    return small.eval()


def nearest(model: nn.Module, found: Gradients, keep: float, row: Row) -> nn.Module:
    """The copy whose FLOPs are nearest to the budget, by bisection of the pruning ratio."""
    example = torch.randn(1, 3, 32, 32)
    target = keep * fp.count_flops(model, example)
    low, high, best = 0.0, 1.0, (float("inf"), model)
    for _ in range(10):
        ratio = (low + high) / 2
        small = pruned(model, found, ratio, row)
        flops = fp.count_flops(small, example)
        best = min(best, (abs(flops - target), small), key=lambda pair: pair[0])
        low, high = (ratio, high) if flops > target else (low, ratio)
    return best[1]


def reestimated(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> nn.Module:
    """A copy whose batch norms have the statistics of the calibration images."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None
    with torch.no_grad():
        model.train()
        for x, _ in data:
            model(x)
    return model.eval()


def rows(shared: Path, done: list[Row]) -> Iterator[Row]:
    """One row for each draw, budget, criterion, scope and set of channels."""
    model, test = resnet(56, shared), cifar10("test", shared)
    images = cifar10("train10k", shared)

    @cache
    def calibration(draw: int) -> tuple[list[tuple[Tensor, Tensor]], Gradients]:
        data = some(images, CALIBRATION, seed=draw)
        return data, gradients(model, data)

    for draw in range(DRAWS):
        for keep in BUDGETS:
            for criterion, draws in CRITERIA.items():
                for scope in ("global", "local"):
                    row = {"draw": draw, "keep": keep, "criterion": criterion, "scope": scope}
                    if draw >= draws or any(row.items() <= old.items() for old in done):
                        continue
                    data, found = calibration(draw)
                    small = nearest(model, found, keep, row)
                    example = torch.randn(1, 3, 32, 32)
                    share = fp.count_flops(small, example) / fp.count_flops(model, example)
                    yield {
                        **row,
                        "flops_kept": round(share, 4),
                        "top1": round(top1(small, test), 2),
                        "reestimated": round(top1(reestimated(small, data), test), 2),
                    }


def _mean(values: list[float]) -> str:
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread} ({len(values)})"


def page() -> str:
    """Both libraries by budget, as Markdown."""
    peers, ours = pages.results("cifar_peers")["rows"], pages.results("default")["rows"]
    lines = []
    for keep in BUDGETS:
        for way, name in OURS.items():
            wanted = {"part": "default", "depth": 56, "keep": keep, "way": way}
            accuracy = _mean([r["top1"] for r in ours if wanted.items() <= r.items()])
            lines.append(
                [f"{keep:g}", "fairpruner", name, *((accuracy, "") if way == "paper" else ("", accuracy))]
            )
        for criterion in CRITERIA:
            for scope in ("global", "local"):
                wanted = {"keep": keep, "criterion": criterion, "scope": scope}
                chosen = [r for r in peers if wanted.items() <= r.items()]
                accuracies = (_mean([r[what] for r in chosen]) for what in ("top1", "reestimated"))
                lines.append([f"{keep:g}", "Torch-Pruning", f"{criterion}, {scope}", *accuracies])
    head = ["FLOPs kept", "library", "way", "the cut", "repaired, or batch norms re-estimated"]
    shown = [line for line in lines if any(line[3:])]
    return pages.table(head, shown)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--table", action="store_true", help="only print the table")
    options = parser.parse_args()
    if not options.table:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # of torch.jit and Torch-Pruning
        if not PACKAGES.exists():
            install = ["install", "--quiet", "--no-deps", "--target", str(PACKAGES), "torch-pruning==1.6.1"]
            subprocess.run([sys.executable, "-m", "pip", *install], check=True)
        sys.path.insert(0, str(PACKAGES))
        done = pages.results("cifar_peers").get("rows", [])
        for row in rows(options.shared, done):
            done.append(row)
            print(row, flush=True)
            command = "python benchmarks/cifar_peers.py"
            pages.store("cifar_peers", {"command": command, "threads": 1, "rows": done})
    pages.fill("cifar_peers", page())


if __name__ == "__main__":
    main()
