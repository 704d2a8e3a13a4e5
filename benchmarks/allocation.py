"""How long allocation takes on synthetic scores: python benchmarks/allocation.py"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter

import numpy as np

from fairpruner.allocation import allocate, sweep
from fairpruner.core.budget import Budget
from fairpruner.core.cost_model import CostModel, Factor, Term
from fairpruner.core.scores import Scores
from fairpruner.core.spaces import Spaces
from fairpruner.core.units import UnitSpace

RESNET50_STAGES = ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7))  # width, blocks, resolution


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


def report(what: str, limit: float, run: Callable[[], object]) -> None:
    start = perf_counter()
    run()
    print(f"{what:60} {perf_counter() - start:6.3f} s (limit {limit:g} s)")


def main() -> None:
    resnet, budgets = resnet50_like(), np.linspace(0.05, 1.0, 100).tolist()
    print(f"ResNet-50-like: {len(resnet.spaces)} spaces, {sum(space.size for space in resnet.spaces)} units")
    for rule in ("tod", "uniform", "global"):
        report(f"100 FLOPs budgets, rule {rule}", 1, partial(sweep, resnet, "flops", budgets, rule=rule))
    report("100 exact units budgets, rule tod", 1, lambda: sweep(resnet, "units", budgets, exact=True))
    large = wide(100, 10_000)
    report("100 spaces of 10,000 units, tolerance 0.1", 2, lambda: allocate(large, alpha=0.1))
    report(
        "100 spaces of 10,000 units, half of the params",
        2,
        lambda: allocate(large, keep=Budget("params", 0.5)),
    )


if __name__ == "__main__":
    main()
