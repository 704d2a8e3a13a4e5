"""The paper's latency table for ResNet-50, and the predicted and measured latency of three models.

    python benchmarks/latency.py --score                            # one calibration pass over 64 images
    python benchmarks/latency.py --time resnet50                    # each about 4 minutes on two cores
    python benchmarks/latency.py --time resnet50 --channels-last
    python benchmarks/latency.py --time mobilenet_v2
    python benchmarks/latency.py --time deit_small
    python benchmarks/latency.py --table                            # the tables of docs/measure.md

ResNet-50 has real weights and is cut to the paper's 47.2 % of its FLOPs: once with any widths, and once
with the multiples that its latency table prefers. These two models and the original run in turn. The other
models have random weights, which do not change the time. All models are also cut to several latency
budgets, in the same run as the measurement of their table. Threads are bound to their cores. Writes
benchmarks/results/latency.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "OMP_PROC_BIND", "true"
)  # before torch starts its threads, so that they do not move between cores

import numpy as np
import pages
import torch
from safetensors.torch import load_file
from torch import nn
from torchvision_shim import torchvision

import fairpruner as fp
from fairpruner.inputs.sources import load_model
from fairpruner.measuring.runtimes import prepared
from fairpruner.measuring.timing import batched, interleaved, machine
from fairpruner.measuring.values import Spread

RESULTS = Path(__file__).parent / "results" / "latency.json"
WORK = Path(tempfile.gettempdir()) / "fairpruner-latency"  # scores wait here for the timing
KEEP, PAPER = 0.472, {1: 1.34, 4: 1.41, 8: 1.37}
IMAGES, SIDE, REPEATS = 64, 224, 20
BUDGETS = ((0.8, "auto"), (0.7, 1), (0.6, "auto"), (0.6, 1))  # of latency, with widths in these multiples


def resnet50(shared: Path) -> nn.Module:
    """The weights' own ResNet-50: strides on the first convolution of a block, and their epsilon."""
    model = torchvision.models.resnet50()
    for stage in (model.layer2, model.layer3, model.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    weights = {
        name: tensor.float()
        for name, tensor in load_file(shared / "weights" / "imagenet_resnet50_fp16.safetensors").items()
    }
    model.load_state_dict(weights, strict=False)
    return model.eval()


def random_weights(source: str) -> nn.Module:
    torch.manual_seed(0)
    return load_model(source).eval()


MODELS: dict[str, Callable[[Path], nn.Module]] = {
    "resnet50": resnet50,
    "mobilenet_v2": lambda shared: random_weights("torchvision:mobilenet_v2"),
    "deit_small": lambda shared: random_weights("timm:deit_small_patch16_224"),
}
BATCHES: dict[str, tuple[int, ...]] = {"resnet50": (1, 4, 8), "mobilenet_v2": (1,), "deit_small": (1,)}


def score(shared: Path) -> None:
    sys.path.insert(0, str(shared / "data"))
    from load import imagenet_sample  # type: ignore[import-not-found]

    pixels, labels, _ = imagenet_sample()
    chosen = np.arange(0, 1000, 1000 // IMAGES)[:IMAGES]
    edge = (256 - SIDE) // 2
    x = torch.from_numpy(pixels[chosen][:, edge:-edge, edge:-edge]).permute(
        0, 3, 1, 2
    ).float() - torch.tensor([123.68, 116.779, 103.939]).view(3, 1, 1)
    data = list(zip(x.split(16), torch.from_numpy(labels[chosen]).split(16), strict=True))
    WORK.mkdir(exist_ok=True)
    for name, build in MODELS.items():
        model = build(shared)
        scores = fp.score(model, data, spaces=fp.discover(model, x[:1]), removal="l1", protection="taylor")
        scores.save(WORK / f"{name}.safetensors")
        print(name, len(scores.spaces), "spaces", flush=True)


def times_of(models: Mapping[str, nn.Module], example: torch.Tensor) -> dict[str, np.ndarray]:
    """Milliseconds of each model, taken in turn, [REPEATS]."""
    with torch.no_grad():
        times = interleaved(
            [prepared("eager", model.eval(), example, torch.get_num_threads()) for model in models.values()],
            REPEATS,
        )
    return dict(zip(models, times, strict=True))


def measure(name: str, shared: Path, layout: torch.memory_format) -> dict[str, Any]:
    model, scores = (
        MODELS[name](shared).to(memory_format=layout),
        fp.Scores.load(WORK / f"{name}.safetensors"),
    )  # type: ignore[call-overload]
    sample = torch.rand(1, 3, SIDE, SIDE).to(memory_format=layout)
    results: dict[str, Any] = {"speed-up": [], "prediction": []}
    for batch in BATCHES[name]:
        table = fp.latency_table(
            model, sample, scores.spaces, batch_size=batch, repeats=10 if batch == 1 else 5
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
        times = times_of({"original": model} | cut, batched(sample, batch))
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
    results = pages.results("latency")
    lines = [
        "| memory format | batch | widths | original ms | pruned ms | times faster | ideal | paper |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, layout in (("resnet50", "default"), ("resnet50 channels_last", "channels_last")):
        for row in results.get(name, {}).get("speed-up", ()):
            spreads = (
                f"{s['median']:.3g} ({s['low']:.3g}–{s['high']:.3g})"
                for s in (row["original_ms"], row["pruned_ms"], row["faster"])
            )
            widths = (
                "as they come"
                if row["plan"].endswith(" 1")
                else f"multiples of {row['multiple']}, by the table"
            )
            lines.append(
                f"| {layout} | {row['batch']} | {widths} | {' | '.join(spreads)} | {row['ideal']:.2f} |"
                f" {row['paper']} |"
            )
    lines += [
        "",
        "| model | batch | plan | predicted ms | measured ms | miss | miss of the share |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        for row in found["prediction"]:
            times = f"{row['predicted_ms']:.1f} | {row['measured_ms']:.1f}"
            lines.append(
                f"| {name} | {row['batch']} | {row['plan']} | {times} | {row['miss']:+.1%} |"
                f" {row['miss_of_share']:+.1%} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder with data and weights")
    parser.add_argument(
        "--channels-last", action="store_true", help="time in this memory format, all models alike"
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--score", action="store_true", help="score all three models")
    action.add_argument("--time", choices=MODELS, help="make a latency table, cut and measure one of them")
    action.add_argument("--table", action="store_true", help="print the tables of the results that are there")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    if options.score:
        score(options.shared)
    elif options.time:
        about = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": f"{machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        }
        layout = torch.channels_last if options.channels_last else torch.contiguous_format
        results[options.time + " channels_last" * options.channels_last] = about | measure(
            options.time, options.shared, layout
        )
        RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if results:
        pages.fill("latency", page())


if __name__ == "__main__":
    main()
