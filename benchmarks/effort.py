"""What each step of the default search counts as, in forward passes, from the constants of its code."""

from __future__ import annotations

from fractions import Fraction

from harness import pages

from fairpruner.pipeline.search import choosing, screening
from fairpruner.pipeline.search.samples import SHARES


def page() -> str:
    """The steps and their passes as Markdown."""
    fitting = screening.FITTING
    judged = 3 * choosing.JUDGING  # before and after one method, and at the end
    solving, sequential = choosing.SOLVING, choosing.PASSES["sequential"]

    def repaired(shares: int) -> float:
        return fitting * (solving + (sequential - solving) * shares / SHARES) + judged

    part = Fraction(choosing.FEW, SHARES)
    steps = [
        ["discovery and scoring", f"{choosing.PREPARING}"],
        ["the sums", f"{screening.GATHERING:.1f}"],
        ["each candidate repaired from the sums", f"{screening.EACH:.1f}"],
        ["a `sequential` repair on all samples", f"{repaired(SHARES):.1f}"],
        [f"a `sequential` repair on {part} of the samples", f"{repaired(choosing.FEW):.1f}"],
        ["a repair by `experts`", f"{2 * fitting + judged:.1f}, and {fitting:.1f} for each block"],
        ["the targets of the gradient steps", f"{choosing.TARGETS:.1f}"],
        [
            "an epoch of gradient steps",
            f"{choosing.TUNING} passes of the cut model; each counts as the root of its share of FLOPs",
        ],
    ]
    return pages.table(["step", "passes"], steps)
