"""What a report knows: one value, from which the terminal table, the JSON and the page are all made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fairpruner.allocation.diagnostics import Diagnosis
from fairpruner.core.arrays import Floats
from fairpruner.core.latency import LatencyTable
from fairpruner.core.plan import Plan
from fairpruner.core.scores import Scores
from fairpruner.core.spaces import Spaces, Term
from fairpruner.errors import FairprunerError
from fairpruner.reporting.measured import Measured, check_measured

if TYPE_CHECKING:
    from rich.console import RenderableType

OUTSIDE = "(outside all spaces)"


@dataclass(frozen=True)
class SpaceFacts:
    """One space before and after; what costs lie between several spaces is shared out evenly, so columns
    add up.
    """

    space: str
    kind: str
    size: int  # J
    kept: int
    params: tuple[float, float]  # before, after
    flops: tuple[float, float]


@dataclass(frozen=True, eq=False)
class Report:
    """A plan, what it does to each space, what its scores say about it, and what was measured; printing
    it with rich shows tables.
    """

    title: str
    plan: Plan
    scores: Scores | None = None  # without them there is nothing to choose from
    diagnosis: Diagnosis | None = None
    measured: Measured = field(default_factory=dict)
    latency: LatencyTable | None = None  # from which the page predicts the milliseconds of any plan

    def __post_init__(self) -> None:
        if (self.scores is None) != (self.diagnosis is None):
            raise FairprunerError(
                "A report holds the scores and the diagnosis that was made of them, or neither."
            )
        check_measured(self.measured)

    @property
    def before(self) -> Mapping[str, float]:
        return self.plan.original

    @property
    def after(self) -> Mapping[str, float]:
        return self.plan.predicted

    @cached_property
    def spaces(self) -> tuple[SpaceFacts, ...]:
        """Every space, and last a row without units for what lies outside them all."""
        spaces, depths = self.plan.spaces, self.plan.depths
        before = {
            metric: costs_by_space(spaces, getattr(spaces.costs, metric), {})
            for metric in ("params", "flops")
        }
        after = {
            metric: costs_by_space(spaces, getattr(spaces.costs, metric), self.plan.removed)
            for metric in ("params", "flops")
        }
        columns = {
            metric: list(zip(before[metric].tolist(), after[metric].tolist(), strict=True))
            for metric in before
        }
        rows = [
            SpaceFacts(s.name, s.kind, s.size, s.size - depths[s.name], params, flops)
            for s, params, flops in zip(spaces, columns["params"], columns["flops"], strict=False)
        ]
        return (*rows, SpaceFacts(OUTSIDE, "", 0, 0, columns["params"][-1], columns["flops"][-1]))

    @property
    def signals(self) -> Mapping[str, Any]:
        """How the scores were made: samples, removal and protection signal; empty without scores."""
        return (
            {}
            if self.scores is None
            else {
                "samples": self.scores.samples,
                **dict(zip(("removal", "protection"), self.scores.active, strict=True)),
            }
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for `json.dumps`."""
        return {
            "format": "fairpruner report",
            "version": 1,
            "title": self.title,
            "rule": self.plan.rule,
            "alpha": self.plan.alpha,
            "exact": self.plan.exact,
            "original": dict(self.before),
            "predicted": dict(self.after),
            "share": {metric: self.plan.share(metric) for metric in self.after},
            "measured": {model: dict(numbers) for model, numbers in self.measured.items()},
            "spaces": [asdict(row) for row in self.spaces],
            "left_out": dict(self.plan.spaces.left_out),
            "signals": dict(self.signals),
            "diagnosis": None if self.diagnosis is None else self.diagnosis.to_json(),
        }

    def __rich__(self) -> RenderableType:
        from fairpruner.reporting.table import render

        return render(self)

    def save_html(self, path: str | Path) -> None:
        """Write the interactive page: one file that needs no network."""
        from fairpruner.reporting.page import write

        write(self, path)


def costs_by_space(spaces: Spaces, terms: Sequence[Term], removed: Mapping[str, Sequence[int]]) -> Floats:
    """A cost shared out over the spaces, and what lies outside them last, [S + 1].

    A term goes evenly to its axes, and an axis to its spaces by the indices they keep.
    """
    position = {name: s for s, name in enumerate(spaces.names)}
    shares = np.zeros(
        (len(spaces.costs.factors), len(spaces) + 1)
    )  # [F, S + 1] kept indices of each axis by space
    for f, factor in enumerate(spaces.costs.factors):
        for name, owned in factor.owned.items():
            shares[f, position[name]] = np.delete(owned, list(removed.get(name, ()))).sum()
        shares[f, -1] = factor.size - sum(int(owned.sum()) for owned in factor.owned.values())
    lengths = shares.sum(axis=1)
    total = np.zeros(len(spaces) + 1)
    for term in terms:
        cost = term.coefficient * math.prod(lengths[list(term.factors)].tolist())
        total += (
            cost * (shares[list(term.factors)] / lengths[list(term.factors), None]).mean(axis=0)
            if term.factors
            else cost * np.eye(len(total))[-1]
        )
    return total
