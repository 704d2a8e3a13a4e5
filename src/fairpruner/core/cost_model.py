"""The terms of what every plan costs: sums of products of kept axis lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from math import prod
from typing import Any

from fairpruner.core.arrays import Ints, decode_runs, encode_runs
from fairpruner.core.budget import MORE_METRICS
from fairpruner.core.fields import BIGGEST, field, listed, mapped, whole
from fairpruner.core.sealed import Json
from fairpruner.errors import FairprunerError


@dataclass(frozen=True, eq=False)
class Factor:
    """The length of one axis, and how many of its indices each unit owns."""

    size: int
    owned: Mapping[str, Ints]  # space name -> [J] index counts

    def to_json(self) -> Json:
        return {"size": self.size, "owned": {name: encode_runs(owned) for name, owned in self.owned.items()}}

    @staticmethod
    def from_json(content: Any) -> Factor:
        size = whole(field(content, "size"), "the size of an axis", at_least=1)
        owned = mapped(field(content, "owned"), "owned")
        return Factor(size, {name: decode_runs(runs) for name, runs in owned.items()})


@dataclass(frozen=True, eq=False)
class Term:
    """One summand of a cost: `coefficient` times the kept lengths of `factors`.

    The factors are positions in `CostModel.factors`.
    """

    coefficient: int
    factors: tuple[int, ...]

    def to_json(self) -> list[Any]:
        return [self.coefficient, list(self.factors)]

    @staticmethod
    def from_json(content: Any, factors: int) -> Term:
        """A term of a cost model that has so many factors."""
        coefficient, positions = listed(content, "a term of a cost")
        return Term(
            whole(coefficient, "the coefficient of a term"),
            tuple(
                whole(position, "the factor of a term", at_most=factors - 1)
                for position in listed(positions, "the factors")
            ),
        )


@dataclass(frozen=True, eq=False)
class CostModel:
    """Params, FLOPs (MACs) and bytes of any plan, exactly."""

    factors: tuple[Factor, ...]
    params: tuple[Term, ...]
    flops: tuple[Term, ...]
    # The memory of the parameters; empty in files from before bytes were counted.
    bytes: tuple[Term, ...] = ()
    # Further metrics that only some models have: MORE_METRICS.
    more: Mapping[str, tuple[Term, ...]] = dataclass_field(default_factory=dict)

    def without(self, names: Mapping[str, Any]) -> CostModel:
        """The costs of plans that keep all units of the spaces with these names."""
        factors = tuple(
            Factor(f.size, {name: owned for name, owned in f.owned.items() if name not in names})
            for f in self.factors
        )
        return replace(self, factors=factors)

    def check(self, sizes: Mapping[str, int]) -> None:
        """Refuse costs that no model has: axes with more owned indices than length, or sums beyond 64 bits.

        `sizes` holds the number of units of each space.
        """
        for factor in self.factors:
            for name, counts in factor.owned.items():
                if counts.size != sizes.get(name, counts.size) or counts.min() < 0:
                    raise FairprunerError(
                        f"An axis of the costs has {counts.size} index counts for the units of {name!r},"
                        f" expected {sizes.get(name, counts.size)}, none of them negative."
                    )
            owned = sum(int(counts.sum()) for counts in factor.owned.values())
            if owned > factor.size:
                raise FairprunerError(
                    f"An axis of the costs has {factor.size} indices, and units own {owned} of them."
                )
        for terms in (self.params, self.flops, self.bytes, *self.more.values()):
            total = sum(t.coefficient * prod(self.factors[f].size for f in t.factors) for t in terms)
            if total > BIGGEST:
                raise FairprunerError(f"A cost adds up to more than {BIGGEST:,}.")

    def to_json(self) -> Json:
        return {
            "factors": [factor.to_json() for factor in self.factors],
            "params": [term.to_json() for term in self.params],
            "flops": [term.to_json() for term in self.flops],
            "bytes": [term.to_json() for term in self.bytes],
            **{metric: [term.to_json() for term in terms] for metric, terms in self.more.items()},
        }

    @staticmethod
    def from_json(content: Any) -> CostModel:
        costs = mapped(content, "costs")
        factors = tuple(Factor.from_json(factor) for factor in listed(field(costs, "factors"), "factors"))

        def terms(rows: Any) -> tuple[Term, ...]:
            return tuple(Term.from_json(row, len(factors)) for row in listed(rows, "the terms of a cost"))

        return CostModel(
            factors,
            terms(field(costs, "params")),
            terms(field(costs, "flops")),
            terms(costs.get("bytes", [])),
            {metric: terms(costs[metric]) for metric in MORE_METRICS if metric in costs},
        )
