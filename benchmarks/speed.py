"""Real speed: latency, memory and energy of smaller models on three runtimes, beside the ideal.

    OMP_NUM_THREADS=2 python -m benchmarks speed --shared ../shared     # on an idle machine

ResNet-50 (real weights), MobileNetV2 and DeiT-S are scored and cut as in benchmarks/latency.py. Original and
smaller model run in turn, at batch 1 and 8, in torch, ONNX Runtime and OpenVINO. The ideal is 1 / the share
of FLOPs that is kept. Energy is estimated by CodeCarbon, which on a machine without power counters assumes
that a processor draws constant power.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import latency
import torch
from harness import pages, runs

import fairpruner as fp

RUNTIMES = ("eager", "onnxruntime", "openvino")
Row = dict[str, Any]


def cases(quick: bool) -> Iterator[Row]:
    for model in ("mobilenet_v2",) if quick else ("resnet50", "mobilenet_v2", "deit_small"):
        for keep in (0.5,) if quick else (0.472, 0.7):
            for batch in (1,) if quick else (1, 8):
                yield {"model": model, "keep": keep, "batch": batch, "repeats": 3 if quick else 30}


def measure(case: Row, shared: Path) -> Row:
    model, scores = latency.scored(case["model"], shared)
    plan = fp.allocate(scores, keep=fp.Budget("flops", case["keep"]), multiple_of=16)
    found = fp.measure(
        fp.cut(model, plan),
        torch.rand(1, 3, latency.SIDE, latency.SIDE),
        against=model,
        batch_sizes=[case["batch"]],
        runtimes=RUNTIMES,
        repeats=case["repeats"],
        energy="DEU",
    )
    quantities = {
        quantity.name: {"model": quantity.model, "against": quantity.against, "note": quantity.note}
        for quantity in found.quantities
    }
    return {
        "flops_kept": round(plan.share("flops"), 4),
        "faster": {
            timing.runtime: vars(timing.speedup) if timing.speedup else timing.note
            for timing in found.timings
        },
        "quantities": quantities,
    }


def page() -> str:
    """Speed-ups beside the ideal, as Markdown."""
    lines = []
    for row in runs.stored("speed"):
        ideal = 1 / row["flops_kept"]
        speeds = (
            f"{found['median']:.2f} ({found['median'] / ideal:.2f})" if isinstance(found, dict) else "fails"
            for found in (row["faster"].get(runtime, "") for runtime in RUNTIMES)
        )
        saved = (
            f"{found['against'] / found['model']:.2f}" if found["model"] else ""
            for found in (row["quantities"][name] for name in ("model memory", "energy"))
        )
        lines.append(
            [row["model"], f"{row['batch']}", f"{row['flops_kept']:.3f}", f"{ideal:.2f}", *speeds, *saved]
        )
    head = ["model", "batch", "FLOPs kept", "ideal", "torch", "ONNX Runtime", "OpenVINO", "memory", "energy"]
    return pages.table(head, lines)
