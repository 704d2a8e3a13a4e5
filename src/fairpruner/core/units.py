"""Units: what a plan removes, and the slices of tensors that each of them owns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fairpruner.core.arrays import Ints, decode_runs, encode_runs
from fairpruner.core.fields import field, listed, text, whole
from fairpruner.core.sealed import Json
from fairpruner.errors import FairprunerError, unknown

Kind = Literal["channel", "hidden", "head", "expert", "block", "stream"]
Role = Literal["write", "read", "carry", "route", "add"]
StandIn = Literal["input", "zeros"]
KINDS: tuple[Kind, ...] = ("channel", "hidden", "head", "expert", "block", "stream")
DEFAULT_KINDS: tuple[Kind, ...] = ("channel", "hidden", "head", "expert")  # that `discover` looks for
ROLES: tuple[Role, ...] = ("write", "read", "carry", "route", "add")
STAND_IN_NAMES: tuple[StandIn, ...] = ("input", "zeros")
MOST_UNITS = 2**27  # of a space in a file; the largest models have a tenth
MOST_DIMS = 8  # of a tensor in a file
MOST_OUTPUTS = 64  # of a module that is replaced, and of its arguments


@dataclass(frozen=True, eq=False)
class Slice:
    """Which unit owns each index along one dimension of one tensor.

    `role` is what the tensor does with the unit: `write` computes it (a filter's row), `read` consumes it
    (the next layer's column), `carry` scales or shifts it (a bias, a norm's weight), `route` sends tokens to
    it (a router's row), `add` ends a residual block, which adds zero if this tensor is zero. For experts that
    are modules, `tensor` is the path of their `nn.ModuleList`, and dimension 0 counts the modules. A block
    owns whole tensors: all indices along dimension 0.
    """

    tensor: str
    dim: int
    owner: Ints  # [size of dim]: unit index, or -1 for indices of no unit of this space
    role: Role

    def to_json(self) -> Json:
        return {
            "tensor": self.tensor,
            "dim": self.dim,
            "role": self.role,
            "owner": encode_runs(self.owner),
        }

    @staticmethod
    def from_json(content: Any) -> Slice:
        role = field(content, "role")
        if role not in ROLES:
            raise unknown("role", role, ROLES)
        return Slice(
            text(field(content, "tensor"), "the tensor of a slice"),
            whole(field(content, "dim"), "the dim of a slice", at_most=MOST_DIMS),
            decode_runs(field(content, "owner")),
            role,
        )


@dataclass(frozen=True, eq=False)
class Count:
    """A whole-number attribute of a module (groups, heads, …) that shrinks when units are removed."""

    module: str
    attribute: str
    owner: Ints  # [value of the attribute]: the unit of each head, group, …

    def to_json(self) -> Json:
        return {"module": self.module, "attribute": self.attribute, "owner": encode_runs(self.owner)}

    @staticmethod
    def from_json(content: Any) -> Count:
        return Count(
            text(field(content, "module"), "the module of a count"),
            text(field(content, "attribute"), "the attribute of a count"),
            decode_runs(field(content, "owner")),
        )


@dataclass(frozen=True, eq=False)
class Replacement:
    """A module that `cut` replaces by one without weights when all of `units` are removed.

    The stand-in returns its `argument` (a position or a keyword), or zeros like it. If the module returned a
    tuple, `outputs` is its length, and all entries but the first are None; 0 means a plain tensor.
    """

    module: str
    units: tuple[int, ...]
    by: StandIn
    argument: int | str
    outputs: int = 0

    def to_json(self) -> Json:
        return {
            "module": self.module,
            "units": list(self.units),
            "by": self.by,
            "argument": self.argument,
            "outputs": self.outputs,
        }

    @staticmethod
    def from_json(content: Any) -> Replacement:
        by, argument = field(content, "by"), field(content, "argument")
        if by not in STAND_IN_NAMES:
            raise unknown("stand-in", by, STAND_IN_NAMES)
        if not isinstance(argument, str):
            argument = whole(argument, "the position of an argument", at_most=MOST_OUTPUTS)
        units = listed(field(content, "units"), "the units of a replaced module")
        return Replacement(
            text(field(content, "module"), "a replaced module"),
            tuple(whole(unit, "a unit of a replaced module", at_most=MOST_UNITS) for unit in units),
            by,
            argument,
            whole(field(content, "outputs"), "the outputs of a replaced module", at_most=MOST_OUTPUTS),
        )


@dataclass(frozen=True)
class Norm:
    """An RMSNorm of the residual stream."""

    module: str
    epsilon: str  # the attribute that holds its epsilon
    offset: int  # added to its weight: 1 if the module stores the weight minus one, else 0

    def to_json(self) -> Json:
        return {"module": self.module, "epsilon": self.epsilon, "offset": self.offset}

    @staticmethod
    def from_json(content: Any) -> Norm:
        return Norm(
            text(field(content, "module"), "the module of a norm"),
            text(field(content, "epsilon"), "the epsilon of a norm"),
            whole(field(content, "offset"), "the offset of a norm", at_most=1),
        )


@dataclass(frozen=True, eq=False)
class UnitSpace:
    """What can be removed in one place: J units and every tensor slice each of them owns.

    The paper calls this a prunable layer. `slices` are in the order in which the forward pass uses them.
    """

    name: str
    kind: Kind
    size: int  # J
    slices: tuple[Slice, ...]
    counts: tuple[Count, ...] = ()
    min_keep: int = 1
    # Units form this many consecutive blocks of equal length, and each block loses equally many: a router
    # that first chooses groups of experts needs groups of one size.
    groups: int = 1
    # The kept number is a multiple of this, unless all units are kept: some kernels accept no other sizes.
    multiple: int = 1
    replaced: tuple[Replacement, ...] = ()  # the modules of residual blocks
    norms: tuple[Norm, ...] = ()  # of the residual stream

    def __repr__(self) -> str:
        return f"UnitSpace(name={self.name!r}, kind={self.kind!r}, size={self.size})"

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
        for owner in self.owners():
            if owner.ndim != 1 or owner.size == 0 or owner.min() < -1 or owner.max() >= self.size:
                raise FairprunerError(
                    f"Space {self.name!r}: owners must be a vector of unit indices in [-1, {self.size})."
                )

        for part in self.replaced:
            if not part.units or not all(0 <= unit < self.size for unit in part.units):
                raise FairprunerError(
                    f"Space {self.name!r}: module {part.module!r} must be replaced with units in"
                    f" [0, {self.size}), found {part.units[:5]}."
                )

    def owners(self) -> Iterator[Ints]:
        """Every owner vector of the space, of slices and of counts."""
        yield from (part.owner for part in self.slices)
        yield from (part.owner for part in self.counts)

    def slices_of(self, role: Role) -> tuple[Slice, ...]:
        return tuple(s for s in self.slices if s.role == role)

    @property
    def observed(self) -> Slice:
        """The slice whose input the signals observe: the last one that reads all units."""
        complete = [s for s in self.slices_of("read") if np.unique(s.owner[s.owner >= 0]).size == self.size]
        if not complete:
            raise FairprunerError(
                f"Space {self.name!r} has no consumer that reads all of its {self.size} units."
            )
        return complete[-1]

    def to_json(self) -> Json:
        """The space as JSON values; owner vectors are written as runs."""
        return {
            "name": self.name,
            "kind": self.kind,
            "size": self.size,
            "min_keep": self.min_keep,
            "groups": self.groups,
            "multiple": self.multiple,
            "slices": [part.to_json() for part in self.slices],
            "counts": [part.to_json() for part in self.counts],
            **({"replaced": [part.to_json() for part in self.replaced]} if self.replaced else {}),
            **({"norms": [norm.to_json() for norm in self.norms]} if self.norms else {}),
        }

    @staticmethod
    def from_json(content: Any) -> UnitSpace:
        size = whole(field(content, "size"), "the size of a space", at_least=1, at_most=MOST_UNITS)
        return UnitSpace(
            name=text(field(content, "name"), "the name of a space"),
            kind=field(content, "kind"),
            size=size,
            min_keep=whole(field(content, "min_keep"), "min_keep", at_most=size),
            # Files from before there were experts have neither of these.
            groups=whole(content.get("groups", 1), "groups", at_most=size),
            multiple=whole(content.get("multiple", 1), "multiple", at_most=size),
            slices=tuple(Slice.from_json(part) for part in listed(field(content, "slices"), "slices")),
            counts=tuple(Count.from_json(part) for part in listed(field(content, "counts"), "counts")),
            replaced=tuple(map(Replacement.from_json, listed(content.get("replaced", []), "replaced"))),
            norms=tuple(map(Norm.from_json, listed(content.get("norms", []), "norms"))),
        )
