"""A warning if the data is too small to rank routed experts."""

from __future__ import annotations

import statistics
import warnings

from fairpruner.core.correlation import spearman
from fairpruner.core.scores import Scores
from fairpruner.errors import FairprunerWarning
from fairpruner.scoring.signals.base import Side

# Below these rank correlations between two halves of the data, the ranks of experts are noise. 60 experts
# reach them with about 50,000 tokens (benchmarks/routing.py).
STABLE: dict[Side, float] = {"removal": 0.9, "protection": 0.4}
MORE = "Give more tokens, of all kinds of text that matter; 100,000 are a good start."
CALLER = 4  # stacklevel of the code that called `score`, in `warn_of_noise`


def warn_of_noise(scores: Scores) -> None:
    """Warn if two halves of the data rank the experts too differently.

    Experts that are used rarely need many tokens.
    """
    if scores.samples == 1 and any(space.kind == "expert" for space in scores.spaces):
        warnings.warn(
            f"One sample cannot rank experts: no second half of the data can confirm the ranks. {MORE}",
            FairprunerWarning,
            stacklevel=CALLER,
        )
    for (side, expected), signal in zip(STABLE.items(), scores.active, strict=True):
        halves = scores.halves.get(signal, {})
        agreement = [
            spearman(*halves[space.name]) or 0.0
            for space in scores.spaces
            if space.kind == "expert" and space.name in halves
        ]
        if agreement and (found := statistics.median(agreement)) < expected:
            warnings.warn(
                f"The {scores.samples:,} samples are too few to rank experts for {side} by {signal!r}:"
                f" between two halves of them the ranks correlate by {found:.2f}, expected at least"
                f" {expected}. {MORE}",
                FairprunerWarning,
                stacklevel=CALLER,
            )
