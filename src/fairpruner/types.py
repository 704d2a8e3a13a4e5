"""The values that pass between the stages: frozen, and checked when they are built."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from .errors import FairprunerError, unknown

Kind = Literal["channel", "hidden", "head", "expert"]
Role = Literal["write", "read", "carry", "route"]
Metric = Literal["units", "params", "flops", "bytes", "experts", "latency", "latency_ms"]

KINDS: tuple[Kind, ...] = ("channel", "hidden", "head", "expert")
METRICS: tuple[Metric, ...] = ("units", "params", "flops")  # of every plan
BUDGETS: tuple[Metric, ...] = (*METRICS, "bytes", "experts", "latency", "latency_ms")

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


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
    groups: int = 1  # consecutive, equally long blocks of units that lose equally many, as a router's groups do
    multiple: int = 1  # of which the kept number is one, unless all are kept: what the kernels of some models can compute

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("kind", self.kind, KINDS)
        if self.groups < 1 or self.size % self.groups:
            raise FairprunerError(f"Space {self.name!r} has {self.size} units in {self.groups} groups: expected groups of equal length.")
        if self.multiple < 1 or self.size % self.multiple:
            raise FairprunerError(f"Space {self.name!r} has {self.size} units and keeps multiples of {self.multiple}: expected a divisor of its size.")
        if self.size < 1 or not 1 <= self.min_keep <= self.size:
            raise FairprunerError(f"Space {self.name!r} has {self.size} units and keeps at least {self.min_keep}: expected 1 <= min_keep <= size.")
        for owner in [*(s.owner for s in self.slices), *(c.owner for c in self.counts)]:
            if owner.ndim != 1 or owner.size == 0 or owner.min() < -1 or owner.max() >= self.size:
                raise FairprunerError(f"Space {self.name!r}: owners must be a vector of unit indices in [-1, {self.size}).")

    def slices_of(self, role: Role) -> tuple[Slice, ...]:
        return tuple(s for s in self.slices if s.role == role)

    @property
    def observed(self) -> Slice:
        """The read slice whose input tensor shows every unit as late as possible: what signals look at."""
        complete = [s for s in self.slices_of("read") if np.unique(s.owner[s.owner >= 0]).size == self.size]
        if not complete:
            raise FairprunerError(f"Space {self.name!r} has no consumer that reads all of its {self.size} units.")
        return complete[-1]


@dataclass(frozen=True, eq=False)
class Factor:
    """The length of one axis, and how many of its indices each unit owns."""

    size: int
    owned: Mapping[str, Ints]  # space name -> [J] index counts


@dataclass(frozen=True, eq=False)
class Term:
    """One summand of a cost: `coefficient` times the kept lengths of `factors` (positions in CostModel.factors)."""

    coefficient: int
    factors: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class CostModel:
    """Params, FLOPs (MACs) and bytes of any plan, exactly: sums of products of kept axis lengths."""

    factors: tuple[Factor, ...]
    params: tuple[Term, ...]
    flops: tuple[Term, ...]
    bytes: tuple[Term, ...] = ()  # of the parameters in their types; none in files from before they were counted


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
            raise FairprunerError(f"Space names must differ, found {sorted(n for n in names if names.count(n) > 1)} more than once.")

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
        unwanted = {s.name: f"of kind {s.kind}, not asked for" for s in self if kinds is not None and s.kind not in kinds}
        return self.without({**unwanted, **skipped})

    def without(self, left: Mapping[str, str]) -> Spaces:
        """The spaces but some, which are left out for the reasons given."""
        factors = tuple(Factor(f.size, {name: owned for name, owned in f.owned.items() if name not in left}) for f in self.costs.factors)
        return replace(self, items=tuple(s for s in self if s.name not in left), left_out={**self.left_out, **left}, costs=replace(self.costs, factors=factors))


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a space's name equals, lies below, or fits one of the patterns."""
    return any(name == p or name.startswith(p + ".") or fnmatchcase(name, p) for p in patterns)


@dataclass(frozen=True, eq=False)
class Scores:
    """Removal and protection numbers for every unit, and all that `allocate` needs besides.

    The first signal of each mapping is the active one; `using` puts another in front.
    """

    spaces: Spaces
    removals: Mapping[str, Mapping[str, Floats]]  # signal -> space -> [J], small = remove first
    protections: Mapping[str, Mapping[str, Floats]]  # signal -> space -> [J], large = protect
    samples: int
    halves: Mapping[str, Mapping[str, Floats]] = field(default_factory=dict)  # signal -> space -> [2, J], from disjoint halves of the data
    settings: Mapping[str, Any] = field(default_factory=dict)  # how they were made: seed, projections, …

    def __post_init__(self) -> None:
        if not self.removals or not self.protections:
            raise FairprunerError("Scores need at least one removal and one protection signal.")
        for signal, by_space in (*self.removals.items(), *self.protections.items()):
            if set(by_space) != set(self.spaces.names):
                raise FairprunerError(f"Signal {signal!r} scores the spaces {sorted(by_space)}, expected {sorted(self.spaces.names)}.")
            for space in self.spaces:
                check_scores(by_space[space.name], space, signal)

    @property
    def removal(self) -> Mapping[str, Floats]:
        return next(iter(self.removals.values()))

    @property
    def protection(self) -> Mapping[str, Floats]:
        return next(iter(self.protections.values()))

    @property
    def active(self) -> tuple[str, str]:
        """The names of the active removal and protection signals."""
        return next(iter(self.removals)), next(iter(self.protections))

    def using(self, removal: str | None = None, protection: str | None = None) -> Scores:
        """The same scores with other signals active."""
        return replace(self, removals=_first(self.removals, removal), protections=_first(self.protections, protection))

    def only(self, kinds: Sequence[str] | None = None, skip: Sequence[str] = ()) -> Scores:
        """The scores of some spaces: plans made from them leave the others whole."""
        spaces = self.spaces.only(kinds, skip)

        def narrowed(signals: Mapping[str, Mapping[str, Floats]]) -> dict[str, dict[str, Floats]]:
            return {signal: {name: values for name, values in by_space.items() if name in spaces.names} for signal, by_space in signals.items()}

        return replace(self, spaces=spaces, removals=narrowed(self.removals), protections=narrowed(self.protections), halves=narrowed(self.halves))

    def save(self, path: str | Path) -> None:
        from .files.storage import save_scores

        save_scores(self, path)

    @staticmethod
    def load(path: str | Path) -> Scores:
        from .files.storage import load_scores

        return load_scores(path)


def check_scores(values: Floats, space: UnitSpace, signal: str) -> None:
    """Refuse a score vector of the wrong type or length, or one with NaN or infinity in it."""
    if values.dtype != np.float64 or values.shape != (space.size,):
        raise FairprunerError(f"Signal {signal!r} gave {values.dtype}{list(values.shape)} for space {space.name!r}, expected float64[{space.size}].")
    bad = int((~np.isfinite(values)).sum())
    if bad:
        raise FairprunerError(
            f"Signal {signal!r} gave {bad} of {space.size} values that are not finite for space {space.name!r}: look for NaN or infinity in the model's activations, weights or loss."
        )


def _first(signals: Mapping[str, Mapping[str, Floats]], name: str | None) -> Mapping[str, Mapping[str, Floats]]:
    if name is None:
        return signals
    if name not in signals:
        raise unknown("signal", name, signals)
    return {name: signals[name], **signals}


@dataclass(frozen=True, eq=False)
class ConflictCurve:
    """Overlap of the m first units to remove with the m first to protect, for m = 0..J (the paper's ToD times m)."""

    overlaps: Ints  # [J + 1]

    def __post_init__(self) -> None:
        o, size = self.overlaps, self.overlaps.size - 1
        m = np.arange(size + 1)
        steps = np.diff(o)
        if size < 1 or o[0] != 0 or o[-1] != size or steps.min() < 0 or steps.max() > 2 or (o > m).any() or (o < 2 * m - size).any():
            raise FairprunerError("A conflict curve starts at 0, ends at J, rises by 0, 1 or 2 and lies between max(0, 2m - J) and m.")

    @property
    def tod(self) -> Floats:
        """ToD(m) = overlap / max(m, 1), [J + 1]; distinct fractions stay distinct in float64 up to J = 2**26."""
        return self.overlaps / np.maximum(np.arange(self.overlaps.size), 1)

    def depth(self, alpha: float) -> int:
        """The largest m with ToD(m) <= alpha (the paper's m-hat)."""
        return int(np.flatnonzero(self.tod <= check_alpha(alpha))[-1])


def check_alpha(alpha: float) -> float:
    """Alpha as a float in [0, 1)."""
    if isinstance(alpha, (bool, str)) or not hasattr(alpha, "__float__"):
        raise FairprunerError(f"Alpha must be a number in [0, 1), found {alpha!r}.")
    value = float(alpha)
    if not 0 <= value < 1:
        raise FairprunerError(f"Alpha is {value:g}, expected a tolerance in [0, 1): 0 allows no conflict, 0.1 one unit in ten.")
    return value


@dataclass(frozen=True)
class Budget:
    """How much of a metric is kept: a float is a share of the original, an int a count; latency is a share, latency_ms milliseconds.

    >>> Budget("flops", 0.5).target(125_000_000)
    62500000.0
    """

    metric: Metric
    amount: float | int

    def __post_init__(self) -> None:
        if self.metric not in BUDGETS:
            raise unknown("metric", self.metric, BUDGETS)
        amount = self.amount
        if isinstance(amount, (bool, np.bool_)) or not isinstance(amount, (int, float, np.integer, np.floating)):
            raise FairprunerError(f"Budget {self.metric} keep={amount!r} is a {type(amount).__name__}, expected a float share or an int count.")
        if self.metric == "latency_ms":
            if not 0 < amount < math.inf:
                raise FairprunerError(f"Budget latency_ms keep={amount:g} is no time, expected milliseconds above 0.")
            return
        if self.metric == "latency" and not (isinstance(amount, (float, np.floating)) and 0 < amount <= 1):
            raise FairprunerError(f"Budget latency keep={amount:g} is not a share in (0, 1]; for milliseconds, write latency_ms.")
        if isinstance(amount, (float, np.floating)) and not (0 < amount <= 1):
            raise FairprunerError(
                f"Budget {self.metric} keep={amount:g} is not a share in (0, 1]; write an int (for example {max(1, math.ceil(amount)) if math.isfinite(amount) else 1}) to keep a count."
            )
        if isinstance(amount, (int, np.integer)) and amount < 1:
            raise FairprunerError(f"Budget {self.metric} keep={amount} keeps nothing, expected a count of at least 1.")

    @property
    def is_share(self) -> bool:
        return self.metric != "latency_ms" and isinstance(self.amount, (float, np.floating))

    @property
    def counted_in(self) -> Metric:
        """The metric that the target is an amount of."""
        return "latency_ms" if self.metric == "latency" else self.metric

    def target(self, original: float) -> float:
        """The amount to keep of `original`, as a count or in milliseconds."""
        if self.is_share:
            return float(self.amount) * original
        if self.amount > original:
            raise FairprunerError(f"Budget {self.metric} keep={self.amount} is more than the model has ({original:.15g}).")
        return float(self.amount)


@dataclass(frozen=True, eq=False)
class Plan:
    """Which units go, from every space, and what the smaller model will cost: enough for `cut`, with no scores."""

    spaces: Spaces
    removed: Mapping[str, tuple[int, ...]]  # space -> unit indices, in removal order
    alpha: float | None  # None: not made by the ToD rule
    rule: str
    exact: bool  # the last few units were chosen to hit a count, so ToD <= alpha may not hold
    predicted: Mapping[str, float]  # metric -> kept count, or milliseconds
    original: Mapping[str, float]

    def __post_init__(self) -> None:
        if set(self.removed) != set(self.spaces.names):
            raise FairprunerError(f"The plan removes from the spaces {sorted(self.removed)}, expected {sorted(self.spaces.names)}.")
        for space in self.spaces:
            units = self.removed[space.name]
            if len(set(units)) != len(units) or any(not 0 <= u < space.size for u in units):
                raise FairprunerError(f"The plan's units of space {space.name!r} must be distinct and in [0, {space.size}), found {units}.")
            if space.size - len(units) < space.min_keep:
                raise FairprunerError(f"The plan keeps {space.size - len(units)} units of space {space.name!r}, expected at least {space.min_keep}.")
            lost = np.bincount(np.array(units, dtype=np.int64) * space.groups // space.size, minlength=space.groups)
            if (lost != lost[0]).any():
                raise FairprunerError(f"The plan removes {lost.tolist()} units from the groups of space {space.name!r}, expected equally many from each.")

    @property
    def depths(self) -> dict[str, int]:
        return {name: len(units) for name, units in self.removed.items()}

    def share(self, metric: str) -> float:
        """The kept share of a metric."""
        return self.predicted[metric] / (self.original[metric] or 1)

    @staticmethod
    def removing(spaces: Spaces, removed: Mapping[str, Sequence[int]]) -> Plan:
        """A plan that removes just these units, chosen by the caller; spaces not named stay whole."""
        from .costs import predict

        strange = [name for name in removed if name not in spaces.names]
        if strange:
            spaces[strange[0]]
        units = {name: tuple(int(u) for u in removed.get(name, ())) for name in spaces.names}
        return Plan(spaces, units, None, "given", False, predict(spaces, units), predict(spaces, {}))

    def save(self, path: str | Path) -> None:
        from .files.storage import save_plan

        save_plan(self, path)

    @staticmethod
    def load(path: str | Path) -> Plan:
        from .files.storage import load_plan

        return load_plan(path)
