"""The time of the greedy order of `reconstruction` by the number of units in a space.

Random covariances of which 20 directions carry half of the variance. 11,008 units, a layer of Llama-2-7B,
take about 5 GB of memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from harness import pages, runs

from fairpruner.scoring.signals.reconstruction import greedy_errors

Row = dict[str, Any]


def cases(quick: bool) -> Iterator[Row]:
    for units in (512,) if quick else (1536, 4096, 8192, 11_008):
        yield {"units": units}


def measure(case: Row, shared: Path) -> Row:
    """Processor seconds of the greedy order, and how many inverses of the same matrix take as long."""
    units = case["units"]
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


def page() -> str:
    """Seconds by units as Markdown."""
    stored = sorted(runs.stored("reconstruction"), key=lambda row: row["units"])
    lines = [[f"{row['units']:,}", f"{row['seconds']:.1f}", f"{row['inverses']:.1f}"] for row in stored]
    return pages.table(["units of the space", "processor seconds", "inverses of the same matrix"], lines)
