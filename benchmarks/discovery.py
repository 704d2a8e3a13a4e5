"""How long discovery takes, its check included: as a multiple of one forward pass over the same example,
and over the depth of a chain of linear maps, which should grow linearly.

    python benchmarks/discovery.py            # ResNet-50 at 224 px and others, and the chains
    python benchmarks/discovery.py resnet50   # just one model, and the chains

Writes benchmarks/results/discovery.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torchvision_shim import torchvision

import fairpruner as fp

MODELS = ("resnet50", "vgg16_bn", "mobilenet_v2", "densenet121", "convnext_tiny")
REPEATS = 5
DEPTHS = (250, 1000, 2000)


def seconds(action: object) -> float:
    start = time.perf_counter()
    action()  # type: ignore[operator]
    return time.perf_counter() - start


def measure(name: str) -> dict[str, object]:
    """Median times of forward and discovery, interleaved, and their ratio."""
    model = getattr(torchvision.models, name)().eval()
    example = torch.randn(1, 3, 224, 224)
    forwards, discoveries = [], []
    with torch.no_grad():
        model(example)
        for _ in range(REPEATS):
            forwards += [seconds(lambda: model(example)) for _ in range(3)]
            discoveries.append(seconds(lambda: fp.discover(model, example)))
    forward, discovery = statistics.median(forwards), statistics.median(discoveries)
    spaces = fp.discover(model, example)
    return {
        "model": name,
        "forward_s": forward,
        "discovery_s": discovery,
        "forwards": discovery / forward,
        "spaces": len(spaces),
        "units": sum(s.size for s in spaces),
    }


def chain(depth: int) -> dict[str, object]:
    """Processor seconds that discovery takes for a chain of small linear maps."""
    model = torch.nn.Sequential(*(m for _ in range(depth) for m in (torch.nn.Linear(8, 8), torch.nn.ReLU())))
    start = time.process_time()
    fp.discover(model, torch.randn(1, 8))
    spent = time.process_time() - start
    return {"depth": depth, "processor_s": spent, "processor_ms_per_map": 1000 * spent / depth}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=MODELS)
    rows = [measure(name) for name in parser.parse_args().models]
    for row in rows:
        print(
            f"{row['model']:16} {row['forwards']:6.1f} forward passes ({row['discovery_s']:.2f} s),"
            f" {row['spaces']} spaces, {row['units']} units"
        )
    chain(10)  # loads what discovery needs
    chains = [chain(depth) for depth in DEPTHS]
    for row in chains:
        print(
            f"chain of {row['depth']:5} maps {row['processor_s']:6.1f} s of one processor,"
            f" {row['processor_ms_per_map']:.1f} ms for each"
        )
    results = Path(__file__).parent / "results" / "discovery.json"
    results.parent.mkdir(exist_ok=True)
    results.write_text(
        json.dumps(
            {
                "command": " ".join(["python benchmarks/discovery.py", *sys.argv[1:]]),
                "threads": torch.get_num_threads(),
                "rows": rows,
                "chains": chains,
            },
            indent=2,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
