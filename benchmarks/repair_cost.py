"""What repair costs: processor time in forward passes of the original over the same data, and peak memory.

*methods*: ResNet-56 with its real weights, 2,000 images, half of the FLOPs kept by `reconstruction` and
`global`, inner channels; top-1 is of all test images. *depth*: CIFAR ResNets of 20, 56 and 110 layers with
random weights, 2,000 images, every second inner channel removed. Peak memory is what the process held at
most during the repair, above what it held before (Linux).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from harness import pages, runs
from nets.cifar_models import CifarResNet
from nets.images import cifar10, some, top1
from nets.training import resnet
from torch import nn

import fairpruner as fp

METHODS = ("sequential", "least_squares", "least_squares+batchnorm", "mean", "sequential+tune")
DEPTHS = (20, 56, 110)
Row = dict[str, Any]


def cases(quick: bool) -> Iterator[Row]:
    images = 500 if quick else 2000
    for depth in DEPTHS[:1] if quick else DEPTHS:
        yield {"part": "depth", "model": f"ResNet-{depth}", "method": "sequential", "images": images}
    for method in METHODS[:1] if quick else METHODS:
        yield {"part": "methods", "model": "ResNet-56", "method": method, "images": images}


def measure(case: Row, shared: Path) -> Row:
    """The cost of one repair, and the accuracy after it where the weights are real."""
    data = some(cifar10("train10k", shared), case["images"])
    model, plan = (_trained if case["part"] == "methods" else _random)(
        int(case["model"].partition("-")[2]), shared
    )
    small, methods = fp.cut(model, plan), case["method"].split("+")
    cost, repaired = _measured(model, data, lambda: fp.repair(small, model, plan, data, method=methods))
    if case["part"] == "methods":
        cost["top1"] = round(top1(repaired, cifar10("test", shared)), 2)
    return cost


@cache
def _trained(depth: int, shared: Path) -> tuple[nn.Module, fp.Plan]:
    model, data = resnet(depth, shared), some(cifar10("train10k", shared), 2000)
    spaces = fp.discover(model, data[0][0][:1], skip=["conv1"])
    scores = fp.score(model, data, spaces=spaces, removal="reconstruction", protection="random")
    return model, fp.allocate(scores, keep=fp.Budget("flops", 0.5), rule="global")


def _random(depth: int, shared: Path) -> tuple[nn.Module, fp.Plan]:
    torch.manual_seed(0)
    model = CifarResNet(depth).eval()
    spaces = fp.discover(model, torch.zeros(1, 3, 32, 32), skip=["conv1"])
    return model, fp.Plan.removing(spaces, {space.name: range(0, space.size, 2) for space in spaces})


def _measured(model: nn.Module, data: list[Any], repair: Callable[[], nn.Module]) -> tuple[Row, nn.Module]:
    """The cost of a repair, and what it returns."""
    with torch.no_grad():
        model(data[0][0])
        start = time.process_time()
        for batch, _ in data:
            model(batch)
        one_pass = time.process_time() - start
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    held = _peak()
    start = time.process_time()
    result = repair()
    spent = time.process_time() - start
    cost = {"forward_seconds": one_pass, "forwards": spent / one_pass, "peak_mb": (_peak() - held) / 1024}
    return {name: round(value, 2) for name, value in cost.items()}, result


def _peak() -> int:
    """The kilobytes that this process held at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def page() -> str:
    """The results as Markdown."""
    rows = [
        [
            f"{r['model']}{', random weights' if r['part'] == 'depth' else ''}",
            r["method"],
            f"{r['forwards']:.2f}",
            f"{r['peak_mb']:.0f}",
            f"{r.get('top1', '')}",
        ]
        for r in runs.stored("repair_cost")
    ]
    return pages.table(["model", "method", "forward passes", "peak memory, MB", "top-1"], rows)
