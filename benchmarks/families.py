"""Nets of other families on CIFAR-10 at a matched budget: channels, hidden units and heads.

The nets are trained here for 8 epochs on 10,000 images and kept in the cache of the user. Ways: the default
of `fp.prune`; the best by hand; the paper's method; its signals with the rule `uniform`; removal by `taylor`
with the rule `global`; and Torch-Pruning 1.6.1, Taylor, global, where it can cut the net, with its batch
norms re-estimated. 2,000 calibration images, all 10,000 test images, no training after the cut.

`best by hand` repairs the plan of every signal and rule, with and without the residual stream, sequentially.
It takes the one that is best on the test images, which is more than a user can know.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cifar_peers import reestimated
from harness import pages, runs
from nets import training
from nets.images import cifar10, some, top1
from peers import PEERS, with_packages
from torch import Tensor, nn

import fairpruner as fp
from fairpruner.pipeline.search import make_candidates, useful_removals

BY_HAND, PEER = "best by hand", "Torch-Pruning, Taylor, global"
WAYS = ("default", BY_HAND, "paper", "wasserstein, uniform", "taylor, global", PEER)
# FLOPs kept; a DenseNet-40 takes ten times as long as the others, so it also has no best by hand
BUDGETS = {"MobileNet": (0.5, 0.7), "DeiT": (0.5, 0.7), "ConvNeXt": (0.5, 0.7), "DenseNet-40": (0.5,)}
Row = dict[str, Any]
Images = tuple[Tensor, Tensor]


def cases(quick: bool) -> Iterator[Row]:
    tried = {"calibration": 100, "test": 300} if quick else {"calibration": 2000, "test": 10_000}
    how = {"split": "train10k", "train": 300 if quick else 10_000, "epochs": 1 if quick else 8}
    for net, budgets in BUDGETS.items():
        for way in WAYS:
            for keep in budgets:
                few = net == "ConvNeXt" and way not in WAYS[:2] and keep == 0.5
                if few if quick else (net, way) != ("DenseNet-40", BY_HAND):
                    yield {"net": net, "way": way, "keep": keep, **how, **tried}


@cache
def original(net: str, split: str, count: int, epochs: int, shared: Path) -> nn.Module:
    return training.trained(net, split, count, epochs, shared)


def measure(case: Row, shared: Path) -> Row:
    model = original(case["net"], case["split"], case["train"], case["epochs"], shared)
    data = some(cifar10("train10k", shared), case["calibration"], batch=100)
    images, labels = cifar10("test", shared)
    test, example = (images[: case["test"]], labels[: case["test"]]), images[:1]
    budget, all_by_hand = fp.Budget("flops", case["keep"]), {}
    try:
        if case["way"] == "default":
            small = fp.prune(model, data, keep=budget)[0]
        elif case["way"] == BY_HAND:
            small, all_by_hand = best_by_hand(model, data, budget, test)
        elif case["way"] == "paper":
            small = fp.prune(model, data, keep=budget, preset="paper")[0]
        elif case["way"] == PEER:
            small = reestimated(by_torch_pruning(model, data, case["keep"]), data)
        else:
            signal, rule = case["way"].split(", ")
            scores = fp.score(model, data, removal=["wasserstein", "l1"], protection="taylor")
            scores = replace(scores, removals={"taylor": scores.protections["taylor"], **scores.removals})
            small = fp.cut(model, fp.allocate(scores.using(signal), keep=budget, rule=rule))
    except Exception as error:  # another library's failure is a result
        if not case["way"] == PEER:
            raise
        return {"note": f"{type(error).__name__}: {error}"[:200]}
    return {
        "baseline": round(top1(model, test), 2),
        "flops_kept": round(fp.count_flops(small, example) / fp.count_flops(model, example), 4),
        "top1": round(top1(small, test), 2),
        **({"all_by_hand": all_by_hand} if all_by_hand else {}),
    }


def best_by_hand(
    model: nn.Module, data: list[Images], budget: fp.Budget, test: Images
) -> tuple[nn.Module, dict[str, float]]:
    """The repaired cut that is best on the test images, and the accuracy of each that was tried."""
    spaces = fp.discover(model, data[0][0][:1])
    scores = fp.score(model, data, spaces=spaces, removal=useful_removals(spaces, classes=True))
    found: dict[str, tuple[float, nn.Module]] = {}
    for candidate in make_candidates(scores, budget, exact=True):
        small = fp.repair(fp.cut(model, candidate.plan), model, candidate.plan, data, method="sequential")
        found[candidate.name] = round(top1(small, test), 2), small
    best = max(found.values(), key=lambda one: one[0])
    return best[1], {name: accuracy for name, (accuracy, _) in found.items()}


def by_torch_pruning(model: nn.Module, data: list[Any], keep: float) -> nn.Module:
    """A copy, pruned in steps until no more than the budget is left."""
    with_packages(*PEERS)
    import torch_pruning as tp

    small, example = copy.deepcopy(model), data[0][0][:1]
    for x, y in data:
        F.cross_entropy(small(x), y).backward()
    with warnings.catch_warnings(action="ignore"):
        pruner = tp.pruner.BasePruner(
            small,
            example,
            importance=tp.importance.GroupTaylorImportance(),
            global_pruning=True,
            pruning_ratio=0.95,
            iterative_steps=50,
            ignored_layers=_left_alone(small),
        )
        while fp.count_flops(small, example) > keep * fp.count_flops(model, example):
            before = fp.count_params(small)
            pruner.step()
            if fp.count_params(small) == before:
                raise RuntimeError("no channel is left to remove before the budget is reached")
            with torch.no_grad():
                small(example)  # fails where the cut does not fit
    small.zero_grad()
    return small.eval()


def _left_alone(model: nn.Module) -> list[nn.Module]:
    """The layers whose outputs Torch-Pruning must keep: the classifier, and in a DeiT all but hidden units.

    The code of a DeiT fixes the widths of heads and stream, which the library does not change.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    if any(hasattr(module, "qkv") for module in model.modules()):
        return [layer for name, layer in layers.items() if not name.endswith("fc1")]
    return list(layers.values())[-1:]


def page() -> str:
    """Nets and budgets by ways, as Markdown."""
    stored, lines = runs.stored("families"), []
    for key in sorted({_line(row) for row in stored}):
        found = {row["way"]: row for row in stored if _line(row) == key}
        before = next((row["baseline"] for row in found.values() if "baseline" in row), 0.0)
        cells = (
            "" if way not in found else f"{found[way]['top1']:.2f}" if "top1" in found[way] else "fails"
            for way in WAYS
        )
        net, keep = key
        lines.append([net, f"{keep:g}", f"{before:.2f}", *cells])
    return pages.table(["net", "FLOPs kept", "original", *WAYS], lines)


def _line(row: Row) -> tuple[str, float]:
    """The line of the table that a row belongs to."""
    return row["net"], row["keep"]
