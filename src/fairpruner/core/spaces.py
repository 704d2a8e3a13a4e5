"""What can be removed: units, the tensor slices they own, and the terms of what every plan costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any, Literal, overload

import numpy as np

from fairpruner.core.arrays import Ints, decode_runs, encode_runs, runs_length
from fairpruner.core.fields import BIGGEST, field, listed, mapped, text, whole
from fairpruner.core.sealed import Json
from fairpruner.errors import FairprunerError, unknown

Kind = Literal["channel", "hidden", "head", "expert"]
Role = Literal["write", "read", "carry", "route"]
KINDS: tuple[Kind, ...] = ("channel", "hidden", "head", "expert")
ROLES: tuple[Role, ...] = ("write", "read", "carry", "route")
MOST = 2**27  # numbers in all the vectors of a file together, a gigabyte; the largest models have a tenth
DIMS = 8  # dimensions of a tensor


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
    def from_json(content: Any) -> Factor:
        size = whole(field(content, "size"), "the size of an axis", at_least=1)
        owned = mapped(field(content, "owned"), "owned")
        return Factor(size, {name: decode_runs(runs) for name, runs in owned.items()})


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
    examples: Json | None = None  # what kind of inputs it was traced with, see models/recorded.py
    from_file: bool = False  # read, not discovered: a plan of them is verified before it is applied

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
            "examples": self.examples,
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
        """What `to_json` was given; every field is checked, and what it would cost to hold."""
        items = listed(field(content, "items"), "items")
        costs = mapped(field(content, "costs"), "costs")
        factors = listed(field(costs, "factors"), "factors")
        _check_room(items, factors)
        model = CostModel(
            tuple(Factor.from_json(factor) for factor in factors),
            _terms(field(costs, "params"), len(factors)),
            _terms(field(costs, "flops"), len(factors)),
            _terms(costs.get("bytes", []), len(factors)),
        )
        spaces = Spaces(
            tuple(_space(item) for item in items),
            {
                n: text(r, f"the reason of {n!r}")
                for n, r in mapped(field(content, "left_out"), "left_out").items()
            },
            model,
            text(field(content, "fingerprint"), "fingerprint"),
            examples=content.get("examples"),
            from_file=True,
        )
        check_costs(spaces)
        return spaces


def _space(item: Any) -> UnitSpace:
    size = whole(field(item, "size"), "the size of a space", at_least=1, at_most=MOST)
    return UnitSpace(
        name=text(field(item, "name"), "the name of a space"),
        kind=field(item, "kind"),
        size=size,
        min_keep=whole(field(item, "min_keep"), "min_keep", at_most=size),
        # files from before there were experts have neither of these
        groups=whole(item.get("groups", 1), "groups", at_most=size),
        multiple=whole(item.get("multiple", 1), "multiple", at_most=size),
        slices=tuple(
            Slice(
                text(field(s, "tensor"), "the tensor of a slice"),
                whole(field(s, "dim"), "the dim of a slice", at_most=DIMS),
                decode_runs(field(s, "owner")),
                _role(field(s, "role")),
            )
            for s in listed(field(item, "slices"), "slices")
        ),
        counts=tuple(
            Count(
                text(field(c, "module"), "the module of a count"),
                text(field(c, "attribute"), "the attribute of a count"),
                decode_runs(field(c, "owner")),
            )
            for c in listed(field(item, "counts"), "counts")
        ),
    )


def _role(found: Any) -> Role:
    if found not in ROLES:
        raise unknown("role", found, ROLES)
    return found  # type: ignore[no-any-return]


def _check_room(items: Sequence[Any], factors: Sequence[Any]) -> None:
    """Refuse content whose vectors would be longer than those of any model; as runs they are short."""
    vectors = [
        field(part, "owner")
        for item in items
        for name in ("slices", "counts")
        for part in listed(field(item, name), name)
    ]
    vectors += [runs for factor in factors for runs in mapped(field(factor, "owned"), "owned").values()]
    units = sum(whole(field(item, "size"), "the size of a space", at_most=MOST) for item in items)
    total = units + sum(runs_length(listed(runs, "an owner vector")) for runs in vectors)
    if total > MOST:
        raise FairprunerError(f"Its vectors have {total:,} numbers, expected at most {MOST:,}.")


def _terms(rows: Any, factors: int) -> tuple[Term, ...]:
    terms = []
    for row in listed(rows, "the terms of a cost"):
        coefficient, axes = listed(row, "a term of a cost")
        positions = tuple(
            whole(axis, "the factor of a term", at_most=factors - 1) for axis in listed(axes, "the factors")
        )
        terms.append(Term(whole(coefficient, "the coefficient of a term"), positions))
    return tuple(terms)


def check_costs(spaces: Spaces) -> None:
    """Refuse costs that no model has: more of an axis owned than there is, or sums beyond 64 bits."""
    sizes = {space.name: space.size for space in spaces}
    for factor in spaces.costs.factors:
        for name, counts in factor.owned.items():
            if counts.size != sizes.get(name, counts.size) or counts.min() < 0:
                raise FairprunerError(f"A cost's axis has wrong numbers of indices of the units of {name!r}.")
        owned = sum(int(counts.sum()) for counts in factor.owned.values())
        if owned > factor.size:
            raise FairprunerError(f"A cost's axis of {factor.size} indices has {owned} that units own.")
    for terms in (spaces.costs.params, spaces.costs.flops, spaces.costs.bytes):
        total = sum(t.coefficient * prod(spaces.costs.factors[f].size for f in t.factors) for t in terms)
        if total > BIGGEST:
            raise FairprunerError(f"A cost adds up to more than {BIGGEST:,}.")


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a space's name equals, lies below, or fits one of the patterns."""
    return any(name == p or name.startswith(p + ".") or fnmatchcase(name, p) for p in patterns)
