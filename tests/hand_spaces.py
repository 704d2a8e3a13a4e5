"""Small hand-made spaces and scores: a chain of matrices, so that neighbouring spaces multiply in the
costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fairpruner.core.arrays import Floats, Ints
from fairpruner.core.cost_model import CostModel, Factor, Term
from fairpruner.core.scores import Scores
from fairpruner.core.spaces import Spaces
from fairpruner.core.units import Slice, UnitSpace

INPUTS, OUTPUTS = 3, 10


def hand_spaces(
    sizes: Sequence[int], *, min_keep: int = 1, owned: Mapping[str, Sequence[int]] | None = None
) -> Spaces:
    """Spaces "s0", "s1", … of these sizes: s_i is written by matrix w_i and read by w_(i+1); w_i is
    applied i + 1 times.

    `owned` gives the number of axis indices that each unit of a space owns, one for all by default.
    """
    counts: list[Ints] = [
        np.asarray((owned or {}).get(f"s{i}", np.ones(size)), dtype=np.int64) for i, size in enumerate(sizes)
    ]
    owners = [np.repeat(np.arange(size), count) for size, count in zip(sizes, counts, strict=True)]
    items = tuple(
        UnitSpace(
            f"s{i}",
            "hidden",
            size,
            (Slice(f"w{i}", 0, owner, "write"), Slice(f"w{i + 1}", 1, owner, "read")),
            min_keep=min_keep,
        )
        for i, (size, owner) in enumerate(zip(sizes, owners, strict=True))
    )
    hidden = tuple(
        Factor(owner.size, {f"s{i}": count})
        for i, (owner, count) in enumerate(zip(owners, counts, strict=True))
    )
    factors = (Factor(INPUTS, {}), *hidden, Factor(OUTPUTS, {}))  # the axes between the matrices
    matrices = range(len(sizes) + 1)
    params = tuple(Term(1, (i, i + 1)) for i in matrices)
    flops = tuple(Term(i + 1, (i, i + 1)) for i in matrices)
    return Spaces(items, {}, CostModel(factors, params, flops), fingerprint="hand-made")


def hand_scores(
    removal: Sequence[Sequence[float]], protection: Sequence[Sequence[float]], **of_spaces: object
) -> Scores:
    """Scores of the spaces "s0", "s1", …; `of_spaces` goes to `hand_spaces`."""
    spaces = hand_spaces([len(values) for values in removal], **of_spaces)  # type: ignore[arg-type]
    return Scores(spaces, {"u": _by_space(removal)}, {"r": _by_space(protection)}, samples=8)


def random_scores(
    sizes: Sequence[int], seed: int, *, noise: float = 1.0, levels: int | None = None, **of_spaces: object
) -> Scores:
    """Removal scores that follow the protection scores up to some noise; `levels` rounds both, for ties."""
    rng = np.random.default_rng(seed)
    protection = [rng.random(size) for size in sizes]
    removal = [(values + noise * rng.random(values.size)) / (1 + noise) for values in protection]
    if levels is not None:
        removal, protection = (
            [np.floor(values * levels) for values in signal] for signal in (removal, protection)
        )
    return hand_scores(removal, protection, **of_spaces)  # type: ignore[arg-type]


def _by_space(values: Sequence[Sequence[float]]) -> dict[str, Floats]:
    return {f"s{i}": np.asarray(vector, dtype=np.float64) for i, vector in enumerate(values)}
