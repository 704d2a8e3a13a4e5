"""Random networks at scale: cut equals mask, predicted equals counted, a saved model loads identically, the
original is unchanged, a repair does not move away from the original; all in float64. A second run goes on
where the first one ended.

    python benchmarks/random_networks.py          # up to network 20,000
    python benchmarks/random_networks.py 500      # up to network 500

Writes benchmarks/results/random_networks.json after every hundred networks. `wrong` counts networks that
failed; each is named with its seed.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from random_networks import check_network

RESULTS = Path(__file__).parent / "results" / "random_networks.json"
EVERY = 100  # networks between two writes


def empty() -> dict[str, object]:
    return {
        "command": "python benchmarks/random_networks.py",
        "networks": 0,
        "cut": 0,
        "cut, repair better": 0,
        "nothing to prune": 0,
        "wrong": 0,
        "wrong_seeds": {},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("until", nargs="?", type=int, default=20_000)
    until = parser.parse_args().until
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "LSTM with projections is not supported with oneDNN")
    counts = json.loads(RESULTS.read_text()) if RESULTS.exists() else empty()
    for seed in range(counts["networks"], until):
        try:
            outcome = check_network(seed)
        except Exception as error:  # every failure counts as wrong and is named
            outcome = "wrong"
            counts["wrong_seeds"][str(seed)] = f"{type(error).__name__}: {error}"[:300]
        counts[outcome] += 1
        counts["networks"] = seed + 1
        if (seed + 1) % EVERY == 0 or seed + 1 == until:
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(counts, indent=2) + "\n")
            print({key: value for key, value in counts.items() if isinstance(value, int)}, flush=True)


if __name__ == "__main__":
    main()
