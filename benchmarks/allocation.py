"""How long plans take: processor time of `allocate` and `sweep` on synthetic scores.

ResNet-50 has 54 spaces of 64 to 2,048 units here, each convolution one of its own. The large model is a
chain of 100 spaces of 10,000 units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
from harness import pages, runs

from fairpruner.allocation import allocate, sweep
from fairpruner.core.budget import Budget
from fairpruner.core.cost_model import CostModel, Factor, Term
from fairpruner.core.scores import Scores
from fairpruner.core.spaces import Spaces
from fairpruner.core.units import UnitSpace

RESNET50_STAGES = ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7))  # width, blocks, resolution
BUDGETS = np.linspace(0.05, 1.0, 100).tolist()
Row = dict[str, Any]


def resnet50_like() -> Scores:
    """Every convolution of ResNet-50 and a hidden classifier as a space of its own: 54 spaces of 64 to
    2048 units.
    """
    sizes, params, flops = [3], [], []

    def convolution(source: int, width: int, kernel: int, resolution: int) -> int:
        sizes.append(width)
        params.append(Term(kernel**2, (source, len(sizes) - 1)))
        flops.append(Term((kernel * resolution) ** 2, (source, len(sizes) - 1)))
        return len(sizes) - 1

    block_input = convolution(0, 64, 7, 112)
    for width, blocks, resolution in RESNET50_STAGES:
        convolution(block_input, 4 * width, 1, resolution)  # the stage's shortcut
        for _ in range(blocks):
            narrow = convolution(convolution(block_input, width, 1, resolution), width, 3, resolution)
            block_input = convolution(narrow, 4 * width, 1, resolution)
    convolution(block_input, 2048, 1, 1)
    return scores_of(sizes, params, flops)


def wide(spaces: int, units: int) -> Scores:
    """A chain of equally wide fully connected spaces."""
    terms = [Term(1, (i, i + 1)) for i in range(spaces)]
    return scores_of([3] + [units] * spaces, terms, terms)


def scores_of(sizes: list[int], params: list[Term], flops: list[Term]) -> Scores:
    """Random scores, removal half following protection, of all axes but the first."""
    rng = np.random.default_rng(0)
    names = {f"s{axis}": size for axis, size in enumerate(sizes) if axis}
    factors = (
        Factor(sizes[0], {}),
        *(Factor(size, {name: np.ones(size, dtype=np.int64)}) for name, size in names.items()),
    )
    items = tuple(UnitSpace(name, "channel", size, slices=()) for name, size in names.items())
    spaces = Spaces(items, {}, CostModel(factors, tuple(params), tuple(flops)), fingerprint="synthetic")
    protection = {name: rng.exponential(size=size) for name, size in names.items()}
    removal = {name: values + rng.exponential(size=values.size) for name, values in protection.items()}
    return Scores(spaces, {"synthetic": removal}, {"synthetic": protection}, samples=1)


RUNS: dict[tuple[str, str], Callable[[Scores], object]] = {
    **{
        ("ResNet-50", f"100 FLOPs budgets, rule {rule}"): partial(
            sweep, metric="flops", amounts=BUDGETS, rule=rule
        )
        for rule in ("tod", "uniform", "global")
    },
    ("ResNet-50", "100 exact budgets of units, rule tod"): partial(
        sweep, metric="units", amounts=BUDGETS, exact=True
    ),
    ("100 x 10,000 units", "tolerance 0.1"): partial(allocate, alpha=0.1),
    ("100 x 10,000 units", "half of the parameters"): partial(allocate, keep=Budget("params", 0.5)),
}


def cases(quick: bool) -> Iterator[Row]:
    """A quick run leaves out the large model."""
    for model, what in RUNS:
        if not quick or model == "ResNet-50":
            yield {"model": model, "what": what}


def measure(case: Row, shared: Path) -> Row:
    """Processor seconds of one call."""
    scores = resnet50_like() if case["model"] == "ResNet-50" else wide(100, 10_000)
    start = process_time()
    RUNS[case["model"], case["what"]](scores)
    return {"seconds": round(process_time() - start, 3)}


def page() -> str:
    """Seconds of each call as Markdown."""
    lines = [[row["model"], row["what"], f"{row['seconds']:.3g}"] for row in runs.stored("allocation")]
    return pages.table(["model", "plans", "processor seconds"], lines)
