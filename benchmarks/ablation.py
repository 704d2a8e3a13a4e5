"""The paper's ablation: VGG-16-BN and AlexNet on CIFAR-10, by tolerance, signal and rule.

The nets are trained here on all 50,000 images, AlexNet for 20 epochs and VGG-16-BN for 5, with products in
bfloat16. They are kept in the cache of the user. At each tolerance, `wasserstein + ToD` and `random + ToD`
make a plan; the `uniform` ways get the share of parameters that `wasserstein + ToD` keeps. `taylor` removes
by the paper's protection score. Random removal has 20 seeds. Top-1 is measured after the cut and after
sequential repair (random: of the first three seeds), with 2,000 calibration and all 10,000 test images.
VGG-16-BN has the first 2,000 of these and fewer repairs: it takes seven times as long as AlexNet.

network-pruner 2.16, the package of the paper's authors, gets the same tolerances and 256 images: it needs 69
times as long to score them as fairpruner. Instead of a repair, its batch norms are re-estimated.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from cifar_peers import reestimated
from harness import pages, runs
from nets import training
from nets.images import cifar10, some, top1
from peers import network_pruner_cut, network_pruner_scores
from torch import nn

import fairpruner as fp

EPOCHS = {"AlexNet": 20, "VGG-16-BN": 5}  # about twenty minutes on one core
TESTED = {"AlexNet": 10_000, "VGG-16-BN": 2000}
TOLERANCES = (0.1, 0.2, 0.05, 0.3, 0.01, 0.15, 0.25, 0.005)
PEER = "network-pruner 2.16"
WAYS = (
    "wasserstein + ToD",
    "wasserstein, uniform",
    "taylor, uniform",
    "random + ToD",
    "random, uniform",
    PEER,
)
SEEDS = 20  # of random removal
REPAIRED = {"AlexNet": (3, TOLERANCES), "VGG-16-BN": (1, TOLERANCES[:4])}  # seeds, tolerances
PEER_IMAGES = 256
WHAT = {"params_kept": "parameters kept", "top1": "the cut", "repaired": "repaired"}  # lines of a tolerance
Row = dict[str, Any]


def cases(quick: bool) -> Iterator[Row]:
    """Seeds last, so that the curves are there early."""
    size = (
        {"split": "train10k", "train": 500, "calibration": 250}
        if quick
        else {"split": "train", "train": 50_000, "calibration": 2000}
    )
    for seed in range(1 if quick else SEEDS):
        for net in ("AlexNet",) if quick else EPOCHS:
            epochs, test = (1, 500) if quick else (EPOCHS[net], TESTED[net])
            for alpha in TOLERANCES[: 1 if quick else None]:
                for way in WAYS:
                    if seed == 0 or way.startswith("random"):
                        how = {"net": net, "epochs": epochs, "alpha": alpha, "way": way, "seed": seed}
                        yield {**how, **size, "test": test}


@cache
def bench(net: str, size: tuple[Any, ...], shared: Path) -> tuple[nn.Module, list[Any], fp.Scores, Any]:
    """The trained net, its calibration data, its scores, and the test images."""
    split, count, epochs, calibration, test = size
    model = training.trained(net, split, count, epochs, shared)
    data = some(cifar10("train10k", shared), calibration)
    scores = fp.score(model, data, removal=["wasserstein", "l1"], protection="taylor")
    images, labels = cifar10("test", shared)
    return model, data, scores, (images[:test], labels[:test])


def measure(case: Row, shared: Path) -> Row:
    size = tuple(case[name] for name in ("split", "train", "epochs", "calibration", "test"))
    if case["way"] == PEER:
        return by_network_pruner(case, size, shared)
    model, data, scores, test = bench(case["net"], size, shared)
    signal = case["way"].split(",")[0].split(" ")[0]
    if signal == "random":
        few = [(data[0][0][:10], data[0][1][:10])]  # random scores do not depend on the images
        drawn = fp.score(model, few, spaces=scores.spaces, removal="random", seed=case["seed"])
        scores = replace(scores, removals={**drawn.removals, **scores.removals})
    elif signal == "taylor":
        scores = replace(scores, removals={"taylor": scores.protections["taylor"], **scores.removals})
    if case["way"].endswith("uniform"):
        share = fp.allocate(scores.using("wasserstein"), alpha=case["alpha"]).share("params")
        plan = fp.allocate(scores.using(signal), keep=fp.Budget("params", share), rule="uniform")
    else:
        plan = fp.allocate(scores.using(signal), alpha=case["alpha"])
    small = fp.cut(model, plan)
    found = {"params_kept": round(plan.share("params"), 4), "top1": round(top1(small, test), 2)}
    seeds, tolerances = REPAIRED[case["net"]]
    if case["seed"] < seeds and case["alpha"] in tolerances:
        found["repaired"] = round(top1(fp.repair(small, model, plan, data, method="sequential"), test), 2)
    return found


def by_network_pruner(case: Row, size: tuple[Any, ...], shared: Path) -> Row:
    """The cut of the package of the paper's authors, and the same with its batch norms re-estimated."""
    model, data, _, test = bench(case["net"], size, shared)
    try:
        found = network_pruner_scored(case["net"], size, shared)
        small = network_pruner_cut(copy.deepcopy(model), found, case["alpha"], data[0][0][:1])
    except Exception as error:  # another library's failure is a result
        return {"note": f"{type(error).__name__}: {error}"[:200]}
    share = fp.count_params(small) / fp.count_params(model)
    normed = any(isinstance(module, nn.BatchNorm2d) for module in small.modules())
    better = {"repaired": round(top1(reestimated(small, data), test), 2)} if normed else {}
    return {"params_kept": round(share, 4), "top1": round(top1(small, test), 2), **better}


@cache
def network_pruner_scored(net: str, size: tuple[Any, ...], shared: Path) -> Any:
    """Its scores, which serve all tolerances."""
    model, data, *_ = bench(net, size, shared)
    x, y = (torch.cat(parts)[:PEER_IMAGES] for parts in zip(*data, strict=True))
    return network_pruner_scores(copy.deepcopy(model), x, y)


def page() -> str:
    """Accuracy and size by tolerance as Markdown, one table for each net."""
    stored, parts = runs.stored("ablation"), []
    for net in dict.fromkeys(row["net"] for row in stored):
        measured = {row["way"] for row in stored if row["net"] == net}
        ways = [way for way in WAYS if way in measured]
        lines = []
        for alpha in sorted(TOLERANCES):
            for what, title in WHAT.items():
                of_way = {
                    way: [
                        row[what]
                        for row in stored
                        if (row["net"], row["alpha"], row["way"]) == (net, alpha, way) and what in row
                    ]
                    for way in ways
                }
                if any(of_way.values()):
                    lines.append([f"{alpha:g}", title, *(pages.spread(values) for values in of_way.values())])
        parts.append(pages.table([f"{net}, tolerance", "", *ways], lines))
    what = "Curves: top-1 by the share of parameters removed, one for each way; random with its spread shaded"
    return "\n\n".join([*parts, pages.picture("ablation", what)] if parts else [pages.table([], [])])


def plot() -> Any:
    """Accuracy by the share of parameters removed; shaded from the worst to the best seed."""
    from matplotlib.figure import Figure

    stored = runs.stored("ablation")
    nets = list(dict.fromkeys(row["net"] for row in stored))
    figure = Figure(figsize=(4.5 * len(nets), 3.6), layout="constrained")
    for axes, net in zip(figure.subplots(1, len(nets), squeeze=False)[0], nets, strict=True):
        for number, way in enumerate(WAYS):
            color = f"C{number}"  # the same in both panels
            rows = [row for row in stored if (row["net"], row["way"]) == (net, way) and "top1" in row]
            if not rows:
                continue
            of_alpha = [[row for row in rows if row["alpha"] == alpha] for alpha in sorted(TOLERANCES)]
            of_alpha = [group for group in of_alpha if group]
            removed = [100 * (1 - mean(row["params_kept"] for row in group)) for group in of_alpha]
            top = [[row["top1"] for row in group] for group in of_alpha]
            axes.plot(removed, [mean(values) for values in top], "o-", color=color, markersize=3, label=way)
            lowest, highest = [min(values) for values in top], [max(values) for values in top]
            axes.fill_between(removed, lowest, highest, color=color, alpha=0.2)
        axes.set(title=net, xlabel="parameters removed, %", ylabel="top-1 after the cut, %")
    axes.legend(fontsize="small")
    return figure
