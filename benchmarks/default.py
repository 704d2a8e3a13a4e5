"""What `fp.prune` finds when only a budget is given, beside the best combination picked by hand.

*default*: CIFAR-10 ResNets, five draws of 2,000 training images, all 10,000 test images. `paper` is the
paper's method. `by hand` removes by `reconstruction` with the rule `global`, removes no units of the residual
stream, and repairs sequentially: the best combination of docs/repair.md.

*protection*: ResNet-20 at half of its FLOPs, sequential repair. ToD with each protection signal beside the
rules `uniform` and `global`, three draws, judged by the KL divergence of the logits on 2,000 other training
images. Protection: `taylor` (first order, the paper's), `taylor2` (second order, sample by sample),
`deletion` (measured damage, on 64 images), `reconstruction` (what the others cannot replace).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from harness import pages, runs
from nets.images import cifar10, some, top1
from nets.training import resnet
from torch import Tensor, nn

import fairpruner as fp
from fairpruner.pipeline.search.judging import Judge

BUDGETS = (0.5, 0.3, 0.7)
CALIBRATION = 2000  # images
WAYS = ("paper", "by hand", "default")
PROTECTIONS = ("taylor", "taylor2", "deletion", "random")
# Removal signal, rule, protection signal. `reconstruction` protects what the other units cannot replace; as
# the protection of itself it would make ToD the rule `uniform`.
RULES = (
    *(("reconstruction", "tod", protection) for protection in PROTECTIONS),
    ("reconstruction", "uniform", ""),
    ("reconstruction", "global", ""),
    *(("l1", "tod", protection) for protection in ("taylor", "taylor2", "reconstruction")),
    ("l1", "uniform", ""),
)
Row = dict[str, Any]
Batches = list[tuple[Tensor, Tensor]]


def by_way(model: nn.Module, data: Batches, keep: fp.Budget, way: str) -> tuple[nn.Module, fp.Plan]:
    """The smaller model, and its plan."""
    if way == "paper":
        return fp.prune(model, data, keep=keep, preset="paper")
    if way == "default":
        return fp.prune(model, data, keep=keep)
    spaces = fp.discover(model, data[0][0][:1], skip=["conv1"])
    plan = fp.allocate(
        fp.score(model, data, spaces=spaces, removal="reconstruction"), keep=keep, rule="global"
    )
    return fp.repair(fp.cut(model, plan), model, plan, data, method="sequential"), plan


def cases(quick: bool) -> Iterator[Row]:
    calibration = {"calibration": 200} if quick else {}  # images; 2,000 unless a case has another number
    for draw in range(1 if quick else 5):
        for keep in BUDGETS[:1] if quick else BUDGETS:
            for depth in (20,) if quick else (20, 56):
                for way in reversed(WAYS):
                    fields = {"depth": depth, "keep": keep, "draw": draw, "way": way}
                    yield {"part": "default", **fields, **calibration}
    for draw in range(0 if quick else 3):
        for removal, rule, protection in RULES:
            fields = {"removal": removal, "rule": rule, "protection": protection}
            yield {"part": "protection", "draw": draw, **fields}


def measure(case: Row, shared: Path) -> Row:
    return _by_default(case, shared) if case["part"] == "default" else _with_protection(case, shared)


def _by_default(case: Row, shared: Path) -> Row:
    """Accuracy of one way, and its cost in forward passes over the calibration images."""
    model, test = _original(case["depth"], shared), cifar10("test", shared)
    data = some(cifar10("train10k", shared), case.get("calibration", CALIBRATION), seed=case["draw"])
    forward = _seconds(lambda: [model(x) for x, _ in data])
    start = time.process_time()
    small, plan = by_way(model, data, fp.Budget("flops", case["keep"]), case["way"])
    seconds = time.process_time() - start
    return {
        "top1": round(top1(small, test), 2),
        "baseline": _baseline(case["depth"], shared),
        "flops_kept": round(plan.share("flops"), 4),
        "forwards": round(seconds / forward, 1),
        "tried": [trial.to_json() for trial in plan.tried],
    }


@cache
def _original(depth: int, shared: Path) -> nn.Module:
    """The model, in the memory layout that is fastest on a CPU."""
    return resnet(depth, shared).to(memory_format=torch.channels_last)


@cache
def _baseline(depth: int, shared: Path) -> float:
    return round(top1(_original(depth, shared), cifar10("test", shared)), 2)


def _with_protection(case: Row, shared: Path) -> Row:
    """The distance to the original's logits after the cut of one rule and its repair."""
    model, scores, data, others = _scored(case["draw"], shared)
    using = scores.using(case["removal"], case["protection"] or None)
    plan = fp.allocate(using, keep=fp.Budget("flops", 0.5), rule=case["rule"], exact=True)
    small = fp.repair(fp.cut(model, plan), model, plan, data, method="sequential")
    found = Judge(model, others, task="classification").distance(small)
    return {"divergence": round(found, 4), "flops_kept": round(plan.share("flops"), 4)}


@cache
def _scored(draw: int, shared: Path) -> tuple[nn.Module, fp.Scores, Batches, Batches]:
    """ResNet-20 with all signals of one draw, its calibration images, and as many others."""
    model = resnet(20, shared)
    batches = some(cifar10("train10k", shared), 2 * CALIBRATION, seed=draw)
    data, others = batches[: len(batches) // 2], batches[len(batches) // 2 :]
    spaces = fp.discover(model, data[0][0][:1], skip=["conv1"])
    few_images = [(x[:64], y[:64]) for x, y in data[:1]]  # a forward pass for each unit
    few = fp.score(model, few_images, spaces=spaces, removal="l1", protection="deletion")
    scores = fp.score(
        model,
        data,
        spaces=spaces,
        removal=["reconstruction", "l1"],
        protection=[p for p in PROTECTIONS if p != "deletion"],
    )
    more = {"deletion": few.protection, "reconstruction": scores.removals["reconstruction"]}
    return model, replace(scores, protections={**scores.protections, **more}), data, others


def _seconds(action: Callable[[], Any]) -> float:
    """CPU seconds of a call."""
    with torch.no_grad():
        start = time.process_time()
        action()
        return time.process_time() - start


def page() -> str:
    """The results as Markdown."""
    rows = runs.stored("default")

    def spread(field: str, **wanted: Any) -> str:
        found = [row[field] for row in rows if wanted.items() <= row.items()]
        digits = {"divergence": 4, "forwards": 1}.get(field, 2)
        return pages.spread(found, digits) if len(found) != 1 else f"{found[0]:.{digits}f} (1)"

    accuracy = [
        [
            f"ResNet-{depth}",
            f"{keep:g}",
            *(spread("top1", part="default", depth=depth, keep=keep, way=w) for w in WAYS),
            spread("forwards", part="default", depth=depth, keep=keep, way="default"),
        ]
        for depth in (20, 56)
        for keep in sorted(BUDGETS, reverse=True)
    ]
    protection = [
        [
            removal,
            rule,
            of,
            spread("divergence", part="protection", removal=removal, rule=rule, protection=of),
        ]
        for removal, rule, of in RULES
    ]
    measured = (
        (
            ["model", "FLOPs kept", *WAYS, "passes of the default"],
            [line for line in accuracy if any(line[2:])],
        ),
        (["removal", "rule", "protection", "divergence"], [line for line in protection if line[3]]),
    )
    return "\n\n".join(pages.table(head, body) for head, body in measured if body)
