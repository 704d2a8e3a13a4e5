"""The paper's latency table for ResNet-50, and the predicted and measured latency of three models.

    OMP_NUM_THREADS=2 python -m benchmarks latency --shared ../shared    # on an idle machine, 20 minutes

ResNet-50 has real weights and is cut to the paper's 47.2 % of its FLOPs: once with any widths, and once
with the multiples that its latency table prefers. These two models and the original run in turn. The other
models have random weights, which do not change the time. All models are also cut to several latency
budgets, in the same run as the measurement of their table. Threads are bound to their cores.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "OMP_PROC_BIND", "true"
)  # before torch starts its threads, so that they do not move between cores

import numpy as np
import torch
from harness import pages, runs
from nets.imagenet_models import pixels_of, resnet50
from nets.images import imagenet_sample
from torch import nn

import fairpruner as fp
from fairpruner.inputs.sources import load_model
from fairpruner.measuring.runtimes import prepared
from fairpruner.measuring.timing import batched, interleaved
from fairpruner.measuring.values import Spread

KEEP, PAPER = 0.472, {1: 1.34, 4: 1.41, 8: 1.37}
IMAGES, SIDE, REPEATS = 64, 224, 20
Row = dict[str, Any]
BUDGETS = ((0.8, "auto"), (0.7, 1), (0.6, "auto"), (0.6, 1))  # of latency, with widths in these multiples


def random_weights(source: str) -> nn.Module:
    torch.manual_seed(0)
    return load_model(source).eval()


MODELS: dict[str, Callable[[Path], nn.Module]] = {
    "resnet50": resnet50,
    "mobilenet_v2": lambda shared: random_weights("torchvision:mobilenet_v2"),
    "deit_small": lambda shared: random_weights("timm:deit_small_patch16_224"),
}
FORMATS = (
    "resnet50 default",
    "resnet50 channels_last",
    "mobilenet_v2 default",
    "deit_small default",
)
BATCHES: dict[str, tuple[int, ...]] = {"resnet50": (1, 4, 8), "mobilenet_v2": (1,), "deit_small": (1,)}


def cases(quick: bool) -> Iterator[Row]:
    """Models by memory formats."""
    formats = ("mobilenet_v2 default",) if quick else FORMATS
    for name, layout in map(str.split, formats):
        yield {"model": name, "format": layout, "repeats": 3 if quick else REPEATS}


@cache
def scored(name: str, shared: Path) -> tuple[nn.Module, fp.Scores]:
    """A model and its scores, from one calibration pass over 64 images."""
    images, labels = imagenet_sample(shared)
    chosen = torch.arange(0, 1000, 1000 // IMAGES)[:IMAGES]
    edge = (256 - SIDE) // 2
    x = pixels_of(images[chosen, :, edge:-edge, edge:-edge])
    data = list(zip(x.split(16), labels[chosen].split(16), strict=True))
    model = MODELS[name](shared)
    return model, fp.score(model, data, spaces=fp.discover(model, x[:1]), removal="l1", protection="taylor")


def times_of(models: Mapping[str, nn.Module], example: torch.Tensor, repeats: int) -> dict[str, np.ndarray]:
    """Milliseconds of each model, taken in turn, [repeats]."""
    with torch.no_grad():
        times = interleaved(
            [prepared("eager", model.eval(), example, torch.get_num_threads()) for model in models.values()],
            repeats,
        )
    return dict(zip(models, times, strict=True))


def measure(case: Row, shared: Path) -> Row:
    """Latency tables, plans and measured times at every batch size."""
    name, repeats = case["model"], case["repeats"]
    layout = torch.channels_last if case["format"] == "channels_last" else torch.contiguous_format
    model, scores = scored(name, shared)
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    sample = torch.rand(1, 3, SIDE, SIDE).to(memory_format=layout)
    results: dict[str, Any] = {"speed-up": [], "prediction": []}
    for batch in BATCHES[name]:
        table = fp.latency_table(
            model, sample, scores.spaces, batch_size=batch, repeats=min(repeats, 10 if batch == 1 else 5)
        )
        plans = {
            f"latency={share}, multiples of {multiple}": plan_for(
                scores, fp.Budget("latency", share), multiple, table
            )
            for share, multiple in BUDGETS
        }
        if name == "resnet50":
            flops = {
                f"flops={KEEP}, multiples of {multiple}": plan_for(
                    scores, fp.Budget("flops", KEEP), multiple, table
                )
                for multiple in (1, "auto")
            }
            plans = flops | (plans if batch == 1 else {})
        cut = {what: fp.cut(model, plan).to(memory_format=layout) for what, plan in plans.items()}  # type: ignore[call-overload]
        times = times_of({"original": model} | cut, batched(sample, batch), repeats)
        for what, plan in plans.items():
            predicted, measured = plan.predicted["latency_ms"], Spread.of(times[what])
            faster = Spread.of(times["original"] / times[what])
            row = {
                "batch": batch,
                "plan": what,
                "multiple": table.multiple,
                "flops_kept": round(plan.share("flops"), 4),
            }
            misses = {
                "miss": predicted / measured.median - 1,
                "miss_of_share": plan.share("latency_ms") * faster.median - 1,
            }
            results["prediction"].append(
                row | {"predicted_ms": predicted, "measured_ms": measured.median} | misses
            )
            if what.startswith("flops"):
                original = Spread.of(times["original"])
                ideal = 1 / plan.share("flops")
                results["speed-up"].append(
                    row
                    | {
                        "original_ms": vars(original),
                        "pruned_ms": vars(measured),
                        "faster": vars(faster),
                        "ideal": ideal,
                        "paper": PAPER[batch],
                    }
                )
            print(json.dumps(results["prediction"][-1]), str(faster), flush=True)
        results.setdefault("misses of the table's own trials", {})[str(batch)] = np.round(
            table.misses, 3
        ).tolist()
    return results


def plan_for(scores: fp.Scores, budget: fp.Budget, multiple: Any, table: Any) -> fp.Plan:
    return fp.allocate(scores, keep=budget, multiple_of=multiple, latency=table)


def page() -> str:
    """Both tables as Markdown."""
    stored, lines, predictions = runs.stored("latency"), [], []
    for found in stored:
        for row in found["speed-up"]:
            spreads = (
                f"{s['median']:.3g} ({s['low']:.3g}–{s['high']:.3g})"
                for s in (row["original_ms"], row["pruned_ms"], row["faster"])
            )
            widths = (
                "as they come"
                if row["plan"].endswith(" 1")
                else f"multiples of {row['multiple']}, by the table"
            )
            known = f"{row['ideal']:.2f}", f"{row['paper']}"
            lines.append([found["format"], f"{row['batch']}", widths, *spreads, *known])
        predictions += [
            [
                found["model"] + " channels_last" * (found["format"] != "default"),
                f"{row['batch']}",
                row["plan"],
                f"{row['predicted_ms']:.1f}",
                f"{row['measured_ms']:.1f}",
                f"{row['miss']:+.1%}",
                f"{row['miss_of_share']:+.1%}",
            ]
            for row in found["prediction"]
        ]
    head = ["memory format", "batch", "widths", "original ms", "pruned ms", "times faster", "ideal", "paper"]
    below = ["model", "batch", "plan", "predicted ms", "measured ms", "miss", "miss of the share"]
    return f"{pages.table(head, lines)}\n\n{pages.table(below, predictions)}"
