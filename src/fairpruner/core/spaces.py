"""What can be removed: units, the tensor slices they own, and the terms of what every plan costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from operator import index
from typing import Any, Literal, overload

import numpy as np

from fairpruner.core.arrays import Ints, decode_runs, encode_runs
from fairpruner.core.sealed import Json
from fairpruner.errors import FairprunerError, unknown

Kind = Literal["channel", "hidden", "head", "expert"]
Role = Literal["write", "read", "carry", "route"]
KINDS: tuple[Kind, ...] = ("channel", "hidden", "head", "expert")


@dataclass(frozen=True, eq=False)
class Slice:
    """Which unit owns each index along one dimension of one tensor.

    `role` says what the tensor does with the unit: `write` computes it (a filter's row), `read`
    consumes it (the next layer's column), `carry` goes along with it (a bias, a norm's weight),
    `route` chooses it (a router's row). Experts that are modules are owned through their `nn.ModuleList`:
    its path stands for the tensor, and dimension 0 counts the modules.
    """

    tensor: str
    dim: int
    owner: Ints  # [size of dim]: unit index, or -1 where no unit of this space lies
    role: Role


@dataclass(frozen=True, eq=False)
class Count:
    """A whole-number attribute of a module (groups, heads, …) that shrinks as units go."""

    module: str
    attribute: str
    owner: Ints  # [value of the attribute]: the unit that each counted thing belongs to


@dataclass(frozen=True, eq=False)
class UnitSpace:
    """What can be removed in one place: J units and every tensor slice each of them owns.

    The paper calls this a prunable layer. `slices` stand in the order the forward pass meets them.
    """

    name: str
    kind: Kind
    size: int  # J
    slices: tuple[Slice, ...]
    counts: tuple[Count, ...] = ()
    min_keep: int = 1
    groups: int = (
        1  # consecutive, equally long blocks of units that lose equally many, as a router's groups do
    )
    multiple: int = (
        # of which the kept number is one, unless all are kept: what the kernels of some models can
        # compute
        1
    )

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("kind", self.kind, KINDS)
        if self.groups < 1 or self.size % self.groups:
            raise FairprunerError(
                f"Space {self.name!r} has {self.size} units in {self.groups} groups: expected groups of equal"
                " length."
            )
        if self.multiple < 1 or self.size % self.multiple:
            raise FairprunerError(
                f"Space {self.name!r} has {self.size} units and keeps multiples of {self.multiple}: expected"
                " a divisor of its size."
            )
        if self.size < 1 or not 1 <= self.min_keep <= self.size:
            raise FairprunerError(
                f"Space {self.name!r} has {self.size} units and keeps at least {self.min_keep}: expected 1 <="
                " min_keep <= size."
            )
        for owner in [*(s.owner for s in self.slices), *(c.owner for c in self.counts)]:
            if owner.ndim != 1 or owner.size == 0 or owner.min() < -1 or owner.max() >= self.size:
                raise FairprunerError(
                    f"Space {self.name!r}: owners must be a vector of unit indices in [-1, {self.size})."
                )

    def slices_of(self, role: Role) -> tuple[Slice, ...]:
        return tuple(s for s in self.slices if s.role == role)

    @property
    def observed(self) -> Slice:
        """The read slice whose input tensor shows every unit as late as possible: what signals look at."""
        complete = [s for s in self.slices_of("read") if np.unique(s.owner[s.owner >= 0]).size == self.size]
        if not complete:
            raise FairprunerError(
                f"Space {self.name!r} has no consumer that reads all of its {self.size} units."
            )
        return complete[-1]


@dataclass(frozen=True, eq=False)
class Factor:
    """The length of one axis, and how many of its indices each unit owns."""

    size: int
    owned: Mapping[str, Ints]  # space name -> [J] index counts

    def to_json(self) -> Json:
        return {"size": self.size, "owned": {name: encode_runs(owned) for name, owned in self.owned.items()}}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Factor:
        return Factor(
            index(content["size"]), {name: decode_runs(runs) for name, runs in content["owned"].items()}
        )


@dataclass(frozen=True, eq=False)
class Term:
    """One summand of a cost: `coefficient` times the kept lengths of `factors` (positions in
    CostModel.factors).
    """

    coefficient: int
    factors: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class CostModel:
    """Params, FLOPs (MACs) and bytes of any plan, exactly: sums of products of kept axis lengths."""

    factors: tuple[Factor, ...]
    params: tuple[Term, ...]
    flops: tuple[Term, ...]
    bytes: tuple[
        Term, ...
    ] = ()  # of the parameters in their types; none in files from before they were counted


@dataclass(frozen=True, eq=False)
class Spaces:
    """All the spaces of one model, what was left out and why, and what every plan would cost."""

    items: tuple[UnitSpace, ...]
    left_out: Mapping[str, str]  # name -> reason
    costs: CostModel
    fingerprint: str  # of the model's tensor names and shapes

    def __post_init__(self) -> None:
        names = [space.name for space in self.items]
        if len(set(names)) != len(names):
            raise FairprunerError(
                f"Space names must differ, found {sorted(n for n in names if names.count(n) > 1)} more than"
                " once."
            )

    def __iter__(self) -> Iterator[UnitSpace]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, key: str) -> UnitSpace: ...
    @overload
    def __getitem__(self, key: int) -> UnitSpace: ...
    def __getitem__(self, key: str | int) -> UnitSpace:
        if isinstance(key, int):
            return self.items[key]
        for space in self.items:
            if space.name == key:
                return space
        if key in self.left_out:
            raise FairprunerError(f"Space {key!r} was left out: {self.left_out[key]}")
        raise unknown("space", key, self.names)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(space.name for space in self.items)

    def only(self, kinds: Sequence[str] | None = None, skip: Sequence[str] = ()) -> Spaces:
        """Some of the spaces; the others are left out, with the reason, and stay whole in every plan."""
        for kind in kinds or ():
            if kind not in KINDS:
                raise unknown("kind", kind, KINDS)
        patterns = (skip,) if isinstance(skip, str) else tuple(skip)
        for pattern in patterns:
            if not any(matches(name, (pattern,)) for name in (*self.names, *self.left_out)):
                raise unknown("space to skip", pattern, self.names)
        skipped = {s.name: "skipped by the caller" for s in self if matches(s.name, patterns)}
        unwanted = {
            s.name: f"of kind {s.kind}, not asked for"
            for s in self
            if kinds is not None and s.kind not in kinds
        }
        return self.without({**unwanted, **skipped})

    def without(self, left: Mapping[str, str]) -> Spaces:
        """The spaces but some, which are left out for the reasons given."""
        factors = tuple(
            Factor(f.size, {name: owned for name, owned in f.owned.items() if name not in left})
            for f in self.costs.factors
        )
        return replace(
            self,
            items=tuple(s for s in self if s.name not in left),
            left_out={**self.left_out, **left},
            costs=replace(self.costs, factors=factors),
        )

    def to_json(self) -> Json:
        """Spaces with all that they hold; owner vectors as runs."""
        return {
            "fingerprint": self.fingerprint,
            "left_out": dict(self.left_out),
            "items": [
                {
                    "name": space.name,
                    "kind": space.kind,
                    "size": space.size,
                    "min_keep": space.min_keep,
                    "groups": space.groups,
                    "multiple": space.multiple,
                    "slices": [
                        {"tensor": s.tensor, "dim": s.dim, "role": s.role, "owner": encode_runs(s.owner)}
                        for s in space.slices
                    ],
                    "counts": [
                        {"module": c.module, "attribute": c.attribute, "owner": encode_runs(c.owner)}
                        for c in space.counts
                    ],
                }
                for space in self
            ],
            "costs": {
                "factors": [factor.to_json() for factor in self.costs.factors],
                "params": [[t.coefficient, list(t.factors)] for t in self.costs.params],
                "flops": [[t.coefficient, list(t.factors)] for t in self.costs.flops],
                "bytes": [[t.coefficient, list(t.factors)] for t in self.costs.bytes],
            },
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Spaces:
        """What `to_json` was given."""
        items = tuple(
            UnitSpace(
                name=item["name"],
                kind=item["kind"],
                size=index(item["size"]),
                min_keep=index(item["min_keep"]),
                groups=index(
                    item.get("groups", 1)
                ),  # files from before there were experts have neither, nor bytes
                multiple=index(item.get("multiple", 1)),
                slices=tuple(
                    Slice(s["tensor"], index(s["dim"]), decode_runs(s["owner"]), s["role"])
                    for s in item["slices"]
                ),
                counts=tuple(
                    Count(c["module"], c["attribute"], decode_runs(c["owner"])) for c in item["counts"]
                ),
            )
            for item in content["items"]
        )
        costs = content["costs"]
        factors = tuple(Factor.from_json(f) for f in costs["factors"])
        model = CostModel(
            factors, _terms(costs["params"]), _terms(costs["flops"]), _terms(costs.get("bytes", ()))
        )
        return Spaces(items, dict(content["left_out"]), model, content["fingerprint"])


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a space's name equals, lies below, or fits one of the patterns."""
    return any(name == p or name.startswith(p + ".") or fnmatchcase(name, p) for p in patterns)


def _terms(rows: Sequence[Any]) -> tuple[Term, ...]:
    return tuple(Term(index(coefficient), tuple(map(index, factors))) for coefficient, factors in rows)
