"""Accuracy of pruned CIFAR-10 ResNets without training, for each removal signal and rule, plain and repaired.

Real weights, 2,000 calibration images of the training set, all 10,000 test images. Only the channels inside
blocks are pruned; the residual stream keeps its width. Times are processor times, as multiples of one forward
pass of the original over the calibration images.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import pages, runs
from nets.images import cifar10, some, top1
from nets.training import resnet

import fairpruner as fp

SIGNALS = ("wasserstein", "l1", "fpgm", "reconstruction", "random")
RULES = ("uniform", "tod", "global")
BOTH = ("plain", "sequential")
METHODS = ("plain", "mean", "least_squares", "least_squares+batchnorm", "sequential")
BUDGETS = (
    ("tod", "wasserstein"),
    ("global", "reconstruction"),
)  # the paper's choice, and what does best after repair
CALIBRATION = 2000


class Run(NamedTuple):
    """One row of the results."""

    depth: int
    keep: float
    rule: str
    signal: str
    repair: str


def _all_runs() -> Iterator[Run]:
    """Everything to measure, the most telling first; what comes twice is measured once."""
    yield from (Run(56, 0.5, "tod", "wasserstein", repair) for repair in METHODS)
    yield from (
        Run(56, 0.5, rule, signal, repair)
        for rule, signal in (("tod", "l1"), ("global", "reconstruction"), ("tod", "reconstruction"))
        for repair in BOTH
    )
    yield from (
        Run(56, keep, rule, signal, repair)
        for keep in (0.7, 0.3)
        for rule, signal in BUDGETS
        for repair in BOTH
    )
    yield from (
        Run(20, keep, rule, signal, repair)
        for keep in (0.5, 0.7, 0.3)
        for rule, signal in BUDGETS
        for repair in BOTH
    )
    yield from (
        Run(56, 0.5, rule, signal, repair)
        for rule in ("tod", "uniform")
        for signal in SIGNALS
        for repair in BOTH
    )
    yield from (
        Run(56, 0.5, "tod", signal, repair) for signal in ("l1", "reconstruction") for repair in METHODS
    )


def cases(quick: bool) -> Iterator[dict[str, Any]]:
    if quick:
        chosen = [Run(20, 0.5, "tod", "l1", repair) for repair in BOTH]
        yield from ({**run._asdict(), "calibration": 200} for run in chosen)
    else:
        yield from (run._asdict() for run in dict.fromkeys(_all_runs()))


def measure(case: dict[str, Any], shared: Path) -> dict[str, Any]:
    bench = _bench(case["depth"], case.get("calibration", CALIBRATION), shared)
    return bench.measure(Run(*(case[field] for field in Run._fields)))


@cache
def _bench(depth: int, calibration: int, shared: Path) -> Bench:
    return Bench(depth, calibration, shared)


class Bench:
    """One model, scored once, ready to be pruned in every way."""

    def __init__(self, depth: int, calibration: int, shared: Path) -> None:
        self.model, self.test = resnet(depth, shared), cifar10("test", shared)
        self.data = some(cifar10("train10k", shared), calibration)
        self.forward = _seconds(lambda: [self.model(x) for x, _ in self.data])
        spaces = fp.discover(self.model, self.data[0][0][:1], skip=["conv1"])
        self.scores = fp.score(self.model, self.data, spaces=spaces, removal=SIGNALS)
        self.top1 = top1(self.model, self.test)

    def measure(self, run: Run) -> dict[str, Any]:
        plan = fp.allocate(self.scores.using(run.signal), keep=fp.Budget("flops", run.keep), rule=run.rule)
        small = fp.cut(self.model, plan)
        seconds = 0.0
        if run.repair != "plain":
            start = time.process_time()
            small = fp.repair(small, self.model, plan, self.data, method=run.repair.split("+"))
            seconds = time.process_time() - start
        return {
            "top1": round(top1(small, self.test), 2),
            "baseline": round(self.top1, 2),
            "flops_kept": round(plan.share("flops"), 4),
            "forwards": round(seconds / self.forward, 2),
        }


def _seconds(action: Any) -> float:
    """CPU seconds of the second of two calls."""
    with torch.no_grad():
        action()
        start = time.process_time()
        action()
        return time.process_time() - start


def page() -> str:
    """The results as Markdown."""
    rows = runs.stored("cifar_resnet56")
    found = {Run(*(row[field] for field in Run._fields)): row for row in rows}
    baseline = {row["depth"]: row["baseline"] for row in rows}

    def cell(run: Run) -> str:
        return f"{found[run]['top1']:.2f}" if run in found else ""

    methods = [
        [
            repair,
            *(cell(Run(56, 0.5, "tod", s, repair)) for s in ("wasserstein", "l1", "reconstruction")),
        ]
        for repair in METHODS
    ]
    signals = [
        [signal, *(cell(Run(56, 0.5, rule, signal, repair)) for repair in BOTH for rule in RULES)]
        for signal in SIGNALS
    ]
    budgets = [
        [
            f"ResNet-{depth} ({baseline.get(depth, 0):.2f})",
            f"{keep:g}",
            *(cell(Run(depth, keep, rule, s, r)) for rule, s in BUDGETS for r in BOTH),
        ]
        for depth in (56, 20)
        for keep in (0.7, 0.5, 0.3)
    ]
    gains = {
        signal: found[after]["top1"] - found[before]["top1"]
        for signal in SIGNALS
        for before, after in [[Run(56, 0.5, rule, signal, "sequential") for rule in ("uniform", "tod")]]
        if {before, after} <= found.keys()
    }
    compared = ", ".join(f"{gain:+.2f} with `{signal}`" for signal, gain in gains.items())
    return "\n\n".join(
        (
            pages.table(["repair", "wasserstein", "l1", "reconstruction"], methods),
            pages.table(
                ["removal signal", *(f"{repair}, {rule}" for repair in BOTH for rule in RULES)], signals
            ),
            pages.table(
                [
                    "model (top-1 before)",
                    "FLOPs kept",
                    "wasserstein, ToD, plain",
                    "repaired",
                    "reconstruction, global, plain",
                    "repaired",
                ],
                budgets,
            ),
            f"After `sequential` repair, ToD minus uniform on ResNet-56: {compared}.",
        )
    )
