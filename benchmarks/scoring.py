"""The cost of scoring, as a multiple of a plain forward and backward pass over the same images and batches.

    python benchmarks/scoring.py --shared ../shared             # time and memory, about 10 minutes on two cores
    python benchmarks/scoring.py --shared ../shared --peer      # also network-pruner 2.16, in its own venv

VGG16-BN at 32 x 32, 10 classes, real CIFAR-10 images, all spaces, Wasserstein (32 projections) and Taylor signals.
Prints a table and writes benchmarks/results/scoring.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision_shim import torchvision

from fairpruner.discovery import discover
from fairpruner.scoring.score import score

RESULTS = Path(__file__).parent / "results" / "scoring.json"
BATCH = 128
ROUNDS = 3
PEER_IMAGES = 256
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

PEER = """
import sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
from Network_Pruner import FAIR_Pruner
net, inputs, labels, batch, results = torch.load(sys.argv[1], weights_only=False)
start = time.perf_counter()
FAIR_Pruner.get_metrics(net, DataLoader(TensorDataset(inputs, labels), batch_size=batch), device=torch.device("cpu"), results_save_path=results)
print("seconds", time.perf_counter() - start)
"""


class Images:
    """The same number of images of each class, normalised batch by batch; can be read many times."""

    def __init__(self, shared: Path, count: int) -> None:
        sys.path.insert(0, str(shared / "data"))
        from load import cifar10  # type: ignore[import-not-found]

        pixels, labels = cifar10("train10k")
        # Rank of each image within its class, so that a prefix holds equally many of each.
        rank = np.zeros(len(labels), dtype=np.int64)
        for label in range(10):
            rank[labels == label] = np.arange((labels == label).sum())
        chosen = np.argsort(rank, kind="stable")[:count]
        self._pixels, self._labels = pixels[chosen], torch.from_numpy(labels[chosen].astype(np.int64))

    def __len__(self) -> int:
        return -(-len(self._labels) // BATCH)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, DEVIATION))
        for start in range(0, len(self._labels), BATCH):
            pixels = torch.from_numpy(self._pixels[start : start + BATCH]).permute(0, 3, 1, 2).contiguous()
            yield (pixels / 255 - mean) / deviation, self._labels[start : start + BATCH]


def vgg16_bn() -> nn.Module:
    """VGG16-BN with one linear map on its 512 features; what the weights are makes no difference to the
    time.
    """
    torch.manual_seed(0)
    return nn.Sequential(
        *torchvision.models.vgg16_bn(weights=None).features, nn.Flatten(), nn.Linear(512, 10)
    ).eval()


def plain(net: nn.Module, images: Images) -> None:
    for inputs, labels in images:
        F.cross_entropy(net(inputs), labels).backward()
        net.zero_grad(set_to_none=True)


def seconds(run: Callable[[], object]) -> tuple[float, float]:
    """By the clock, and of processor time, which other work on the machine disturbs less."""
    start = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start[0], time.process_time() - start[1]


def measure_time(shared: Path) -> dict[str, tuple[float, float]]:
    """Median seconds of both over ROUNDS interleaved rounds, after one of each to warm up."""
    net, images = vgg16_bn(), Images(shared, 1000)
    spaces = discover(net, next(iter(images))[0][:1])
    runs: dict[str, Callable[[], object]] = {
        "plain": lambda: plain(net, images),
        "score": lambda: score(net, images, spaces=spaces),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(ROUNDS + 1):
        for name, run in runs.items():
            times[name].append(seconds(run))
    return {name: medians(values[1:]) for name, values in times.items()}


def medians(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    clock, processor = zip(*times, strict=True)
    return statistics.median(clock), statistics.median(processor)


def peak_bytes(shared: Path, what: str, count: int) -> int:
    """The peak memory of a fresh process that only does this."""
    command = [sys.executable, __file__, "--shared", str(shared), "--peak", what, "--images", str(count)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def run_for_peak(shared: Path, what: str, count: int) -> None:
    net, images = vgg16_bn(), Images(shared, count)
    spaces = discover(net, next(iter(images))[0][:1])
    if what == "plain":
        plain(net, images)
    else:
        score(net, images, spaces=spaces)
    # Not ru_maxrss: that begins with what the parent held when it forked.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(int(status["VmHWM"].split()[0]) * 1024)


def measure_peer(shared: Path, home: Path) -> dict[str, float]:
    """Seconds of network-pruner's metrics and of our scores on the same 256 images."""
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True)
        for package in ("torch==2.13.0", "network-pruner==2.16"):
            subprocess.run([python, "-m", "pip", "install", "--quiet", package], check=True)
    net, images = vgg16_bn(), Images(shared, PEER_IMAGES)
    inputs, labels = (torch.cat(parts) for parts in zip(*images, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.pt"
        torch.save((net, inputs, labels, BATCH, str(Path(folder) / "results.pkl")), path)
        output = subprocess.run([python, "-c", PEER, path], check=True, capture_output=True, text=True).stdout
    peer = float(output.rpartition("seconds")[2])
    spaces = discover(net, inputs[:1])
    score(net, images, spaces=spaces)
    ours, _ = medians([seconds(lambda: score(net, images, spaces=spaces)) for _ in range(ROUNDS)])
    return {"network-pruner": peer, "fairpruner": ours, "times faster": peer / ours}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", type=Path, required=True, help="folder with data/load.py")
    parser.add_argument("--peer", action="store_true", help="run network-pruner 2.16 too")
    parser.add_argument(
        "--peer-home", type=Path, default=Path(__file__).parent / ".venv", help="its venv, made if missing"
    )
    parser.add_argument("--peak", choices=["plain", "score"], help=argparse.SUPPRESS)
    parser.add_argument("--images", type=int, default=1000, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        run_for_peak(options.shared, options.peak, options.images)
        return

    time_of = measure_time(options.shared)
    peaks = {
        (what, count): peak_bytes(options.shared, what, count)
        for what in ("plain", "score")
        for count in (1000, 10_000)
    }
    above = {count: (peaks["score", count] - peaks["plain", count]) / 1e6 for count in (1000, 10_000)}
    results: dict[str, object] = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": (
            f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch"
            f" {torch.__version__}"
        ),
        "load of the machine": os.getloadavg()[0],
        "seconds for 1,000 images": {name: clock for name, (clock, _) in time_of.items()},
        "score / plain": time_of["score"][0] / time_of["plain"][0],
        "score / plain in processor time": time_of["score"][1] / time_of["plain"][1],
        "peak MB": {f"{what}, {count} images": peak / 1e6 for (what, count), peak in peaks.items()},
        "peak MB above plain": {"1,000 images": above[1000], "10,000 images": above[10_000]},
        "peak at 10,000 / at 1,000 images": {
            what: peaks[what, 10_000] / peaks[what, 1000] for what in ("plain", "score")
        },
    }
    if options.peer:
        results["seconds for 256 images"] = measure_peer(options.shared, options.peer_home)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
