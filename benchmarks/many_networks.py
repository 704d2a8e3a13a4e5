"""Random networks at scale: cut equals mask, predicted equals counted, a saved model loads identically, the
original is unchanged, a repair does not move away from the original; all in float64. A second run goes on
where the first one ended.

    python -m benchmarks many_networks          # up to network 20,000
    python -m benchmarks many_networks 500      # up to network 500

Writes benchmarks/results/many_networks.json after every hundred networks. `wrong` counts networks that
failed; each is named with its seed.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path

import pages
import torch

RESULTS = Path(__file__).parent / "results" / "many_networks.json"
EVERY = 100  # networks between two writes


def empty() -> dict[str, object]:
    return {
        "command": "python -m benchmarks many_networks",
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
    parser.add_argument("--table", action="store_true", help="only write the table of the documents")
    options = parser.parse_args()
    if options.table:
        pages.fill("many_networks", page())
        return
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from random_networks import check_network

    until = options.until
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
    pages.fill("many_networks", page())


def page() -> str:
    """The counts as one table."""
    counts = pages.results("many_networks")
    names = {
        "networks": "networks",
        "cut": "cut",
        "cut, repair better": "cut, and brought nearer to the original by the repair",
        "nothing to prune": "nothing to prune",
        "wrong": "wrong",
    }
    return pages.table(["outcome", "count"], [(text, f"{counts[key]:,}") for key, text in names.items()])


if __name__ == "__main__":
    main()
