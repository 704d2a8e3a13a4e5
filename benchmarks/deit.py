"""The cost of scoring DeiT-S, as a multiple of a plain forward and backward pass over the same images.

    python benchmarks/deit.py --shared ../shared      # about 6 minutes on two idle cores

timm's deit_small_patch16_224 at 224 px, 256 images of the ImageNet sample in 8 classes, heads and hidden
units, Wasserstein (32 projections) and Taylor signals. The weights are random, which does not change the
time. Prints the ratio of wall times and of CPU times (other work on the machine hardly changes the latter),
and writes benchmarks/results/deit.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torchvision_shim  # noqa: F401 (timm imports torchvision)
from torch import Tensor, nn
from torch.nn import functional as F

import fairpruner as fp
from fairpruner.inputs.sources import load_model

RESULTS = Path(__file__).parent / "results" / "deit.json"
IMAGES, CLASSES, BATCH, SIDE = 256, 8, 32, 224


def images(shared: Path) -> list[tuple[Tensor, Tensor]]:
    """Batches of real images, the centre of each, normalised; one image of a class is all there is, so
    neighbours share one.
    """
    sys.path.insert(0, str(shared / "data"))
    from load import imagenet_sample  # type: ignore[import-not-found]

    pixels, _, _ = imagenet_sample()
    edge = (pixels.shape[1] - SIDE) // 2
    inputs = (
        torch.from_numpy(pixels[:IMAGES, edge : edge + SIDE, edge : edge + SIDE]).permute(0, 3, 1, 2).float()
        / 127.5
        - 1
    )
    labels = torch.arange(IMAGES) % CLASSES
    return list(zip(inputs.split(BATCH), labels.split(BATCH), strict=True))


def plain(net: nn.Module, data: Sequence[tuple[Tensor, Tensor]]) -> None:
    for inputs, labels in data:
        F.cross_entropy(net(inputs), labels).backward()
        net.zero_grad(set_to_none=True)


def seconds(run: Callable[[], object]) -> tuple[float, float]:
    """By the clock, and of CPU time."""
    clock, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - clock, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder with data/load.py")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    data, net = images(options.shared), load_model("timm:deit_small_patch16_224").eval()
    spaces = fp.discover(net, data[0][0][:1])
    plain(net, data[:1])  # to warm up
    rounds = [
        (seconds(lambda: plain(net, data)), seconds(lambda: fp.score(net, data, spaces=spaces)))
        for _ in range(options.rounds)
    ]
    (clock_plain, cpu_plain), (clock_score, cpu_score) = (
        [statistics.median(times) for times in zip(*of_run, strict=True)]
        for of_run in zip(*rounds, strict=True)
    )
    results = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": (
            f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch"
            f" {torch.__version__}"
        ),
        "images": IMAGES,
        "units": {kind: sum(s.size for s in spaces if s.kind == kind) for kind in ("head", "hidden")},
        "rounds": options.rounds,
        "load of the machine": os.getloadavg()[1],
        "seconds": {"plain": round(clock_plain, 1), "score": round(clock_score, 1)},
        "CPU seconds": {"plain": round(cpu_plain, 1), "score": round(cpu_score, 1)},
        "score / plain": round(clock_score / clock_plain, 3),
        "score / plain in CPU time": round(cpu_score / cpu_plain, 3),
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
