"""Random networks at scale: cut equals mask, predicted equals counted, a saved model loads identically, the
original is unchanged, a repair does not move away from the original; all in float64.

A row counts a range of seeds: from `first` on, so many `networks`. `wrong` counts networks that failed, and
`wrong_seeds` names each. The first row is older than the others, and wide.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import pages, runs

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
OLD, UNTIL, EVERY = 20_000, 30_000, 1_000  # networks of the first row, of all rows, and of each later row
OUTCOMES = {
    "cut": "cut",
    "cut, repair better": "cut, and brought nearer to the original by the repair",
    "nothing to prune": "nothing to prune",
    "wrong": "wrong",
}
Row = dict[str, Any]


def cases(quick: bool) -> Iterator[Row]:
    if quick:
        yield {"first": 0, "networks": 50}
    else:
        yield {"first": 0, "networks": OLD}
        yield from ({"first": first, "networks": EVERY} for first in range(OLD, UNTIL, EVERY))


def measure(case: Row, shared: Path) -> Row:
    from random_networks import check_network

    warnings.filterwarnings("ignore", "LSTM with projections is not supported with oneDNN")
    counts, wrong = dict.fromkeys(OUTCOMES, 0), {}
    for seed in range(case["first"], case["first"] + case["networks"]):
        try:
            outcome = check_network(seed)
        except Exception as error:  # every failure counts as wrong and is named
            outcome = "wrong"
            wrong[str(seed)] = f"{type(error).__name__}: {error}"[:300]
        counts[outcome] += 1
    return {**counts, "wrong_seeds": wrong}


def page() -> str:
    """The sums of all rows as one table."""
    stored = runs.stored("many_networks")
    names = {"networks": "networks", **OUTCOMES}
    lines = [(text, f"{sum(row[key] for row in stored):,}") for key, text in names.items()]
    return pages.table(["outcome", "count"], lines)
