"""The time of the greedy order of `reconstruction` by the number of units in a space.

    python benchmarks/reconstruction.py                       1,536, 4,096 and 8,192 units, about 5 minutes
    python benchmarks/reconstruction.py --units 11008         a layer of Llama-2-7B, about 5 GB of memory

One thread, random covariances of which 20 directions carry half of the variance. Prints CPU seconds and the
share that one inverse of the same matrix takes, and writes benchmarks/results/reconstruction.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fairpruner.scoring.signals.reconstruction import greedy_errors

RESULTS = Path(__file__).parent / "results" / "reconstruction.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--units", type=int, nargs="+", default=[1536, 4096, 8192])
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for units in options.units:
        results[str(units)] = measured(units)
        print(units, results[str(units)], flush=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def measured(units: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(units)
    shared = torch.randn(units, 20, generator=generator, dtype=torch.float64) / 20**0.5
    covariance = shared @ shared.T
    covariance.diagonal().add_(torch.rand(units, generator=generator, dtype=torch.float64))
    weights = torch.randn(units, 512, generator=generator)
    gram = (weights @ weights.T).double()
    inverse = _seconds(lambda: torch.linalg.inv(covariance))
    greedy = _seconds(lambda: greedy_errors(covariance, gram, units))
    return {"seconds": round(greedy, 2), "inverses": round(greedy / inverse, 2)}


def _seconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


if __name__ == "__main__":
    main()
