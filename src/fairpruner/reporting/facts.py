"""The facts of a report: the value from which the terminal table, the JSON and the page are made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fairpruner.allocation.diagnostics import Diagnosis
from fairpruner.core.arrays import Floats
from fairpruner.core.cost_model import Term
from fairpruner.core.latency import LatencyTable
from fairpruner.core.plan import Plan
from fairpruner.core.scores import Scores
from fairpruner.core.spaces import Spaces
from fairpruner.errors import FairprunerError
from fairpruner.reporting.numbers import NumbersByModel, check_numbers

OUTSIDE = "(outside all spaces)"


@dataclass(frozen=True)
class SpaceFacts:
    """One space before and after the plan.

    A cost that depends on several spaces is divided evenly between them, so that columns add up to the total.
    """

    space: str
    kind: str
    size: int  # J
    kept: int
    params: tuple[float, float]  # before, after
    flops: tuple[float, float]


@dataclass(frozen=True, eq=False)
class ReportContent:
    """The facts of a report: a plan, its effect on each space, its diagnosis, and measured numbers."""

    title: str
    plan: Plan
    scores: Scores | None = None  # None: the page shows this plan only, and no other can be chosen
    diagnosis: Diagnosis | None = None
    measured: NumbersByModel = field(default_factory=dict)
    latency: LatencyTable | None = None  # the page uses it to predict the milliseconds of any plan

    def __post_init__(self) -> None:
        if (self.scores is None) != (self.diagnosis is None):
            raise FairprunerError(
                "A report needs both scores and their diagnosis, or neither; found only one of them."
            )
        check_numbers(self.measured)

    @property
    def before(self) -> Mapping[str, float]:
        """Metric -> amount of the original model."""
        return self.plan.original

    @property
    def after(self) -> Mapping[str, float]:
        """Metric -> predicted amount of the smaller model."""
        return self.plan.predicted

    @cached_property
    def spaces(self) -> tuple[SpaceFacts, ...]:
        """One row per space, and a last row for the costs outside all spaces."""
        spaces, kept = self.plan.spaces, self.plan.kept

        def before_and_after(terms: Sequence[Term]) -> list[tuple[float, float]]:
            costs = (costs_by_space(spaces, terms, removed) for removed in ({}, self.plan.removed))
            return list(zip(*(cost.tolist() for cost in costs), strict=True))

        # One entry for each space, and a last one for what is outside.
        *params, params_outside = before_and_after(spaces.costs.params)
        *flops, flops_outside = before_and_after(spaces.costs.flops)
        rows = [
            SpaceFacts(space.name, space.kind, space.size, kept[space.name], *costs)
            for space, *costs in zip(spaces, params, flops, strict=True)
        ]
        return (*rows, SpaceFacts(OUTSIDE, "", 0, 0, params_outside, flops_outside))

    @property
    def signals(self) -> Mapping[str, Any]:
        """The samples and the signals that the scores were made with; empty without scores."""
        if self.scores is None:
            return {}
        removal, protection = self.scores.active
        return {"samples": self.scores.samples, "removal": removal, "protection": protection}

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
            "tried": [trial.to_json() for trial in self.plan.tried],
            "left_out": dict(self.plan.spaces.left_out),
            "signals": dict(self.signals),
            "diagnosis": None if self.diagnosis is None else self.diagnosis.to_json(),
        }


def costs_by_space(spaces: Spaces, terms: Sequence[Term], removed: Mapping[str, Sequence[int]]) -> Floats:
    """A cost divided between the spaces, [S + 1]; the last entry is the part outside all spaces.

    A term of the cost is a product of axis lengths. It is divided evenly between its axes. The part of an
    axis is divided between spaces in proportion to the indices that each keeps on this axis.
    """
    position = {name: s for s, name in enumerate(spaces.names)}
    # [F, S + 1] kept indices of each axis, by space
    shares = np.zeros((len(spaces.costs.factors), len(spaces) + 1))
    for f, factor in enumerate(spaces.costs.factors):
        for name, owned in factor.owned.items():
            shares[f, position[name]] = np.delete(owned, list(removed.get(name, ()))).sum()
        shares[f, -1] = factor.size - sum(int(owned.sum()) for owned in factor.owned.values())
    lengths = shares.sum(axis=1)
    total = np.zeros(len(spaces) + 1)
    for term in terms:
        axes = list(term.factors)
        cost = term.coefficient * math.prod(lengths[axes].tolist())
        if not cost:
            continue  # of a removed block, whose factor is 0
        if axes:
            total += cost * (shares[axes] / lengths[axes, None]).mean(axis=0)
        else:
            total[-1] += cost
    return total
