"""All the spaces of one model: what can be removed, what was left out, and what every plan would cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, overload

from fairpruner.core.arrays import runs_length
from fairpruner.core.cost_model import CostModel
from fairpruner.core.fields import field, listed, mapped, text, whole
from fairpruner.core.sealed import Json
from fairpruner.core.units import KINDS, MOST_UNITS, Slice, UnitSpace
from fairpruner.errors import FairprunerError, unknown
from fairpruner.terminal.text import text_table

MOST_NUMBERS = 2**27  # in all the vectors of a file together, a gigabyte


@dataclass(frozen=True, eq=False)
class Spaces:
    """All the spaces of one model, what was left out and why, and what every plan would cost."""

    items: tuple[UnitSpace, ...]
    left_out: Mapping[str, str]  # name -> reason
    costs: CostModel
    fingerprint: str  # of the model's tensor names and shapes
    examples: Json | None = None  # what kind of inputs it was traced with, see models/recorded.py
    from_file: bool = False  # read, not discovered; `cut` verifies plans of such spaces first

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

    def __repr__(self) -> str:
        table = text_table(("space", "kind", "units"), [(s.name, s.kind, f"{s.size:,}") for s in self])
        left = f"\nleft out: {len(self.left_out)}, with reasons in `left_out`" if self.left_out else ""
        units = sum(space.size for space in self)
        return f"Spaces: {len(self)} with {units:,} units\n{table}{left}"

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

    @cached_property
    def enclosing(self) -> Mapping[str, tuple[str, int]]:
        """Space -> (space of blocks, unit) of the residual block that holds all of its tensors."""
        found: dict[str, tuple[str, int]] = {}
        for blocks in (space for space in self if space.kind == "block"):
            holder = {part.tensor: int(part.owner[0]) for part in blocks.slices}
            for space in self:
                parts = [part for part in space.slices if not _is_list(part, holder)]
                units = {holder.get(part.tensor, -1) for part in parts}
                if space.kind != "block" and len(units) == 1 and -1 not in units:
                    found[space.name] = (blocks.name, units.pop())
        return found

    def only(self, kinds: Sequence[str] | None = None, skip: Sequence[str] = ()) -> Spaces:
        """Some of the spaces; the others are left out with a reason, and every plan keeps all their units."""
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
        """The spaces without those in `left`, which maps their names to reasons."""
        return replace(
            self,
            items=tuple(s for s in self if s.name not in left),
            left_out={**self.left_out, **left},
            costs=self.costs.without(left),
        )

    def to_json(self) -> Json:
        """The spaces as JSON values."""
        return {
            "fingerprint": self.fingerprint,
            "left_out": dict(self.left_out),
            "examples": self.examples,
            "items": [space.to_json() for space in self],
            "costs": self.costs.to_json(),
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Spaces:
        """The spaces that gave this `to_json`; every field and the total length of all vectors is checked."""
        _check_room(content)
        reasons = mapped(field(content, "left_out"), "left_out")
        spaces = Spaces(
            tuple(UnitSpace.from_json(item) for item in listed(field(content, "items"), "items")),
            {name: text(reason, f"the reason of {name!r}") for name, reason in reasons.items()},
            CostModel.from_json(field(content, "costs")),
            text(field(content, "fingerprint"), "fingerprint"),
            examples=content.get("examples"),
            from_file=True,
        )
        spaces.costs.check({space.name: space.size for space in spaces})
        return spaces


def _is_list(part: Slice, known: Mapping[str, int]) -> bool:
    """Whether a slice names a list of experts instead of a tensor."""
    return part.tensor not in known and any(name.startswith(f"{part.tensor}.") for name in known)


def _check_room(content: Mapping[str, Any]) -> None:
    """Refuse content whose vectors would be longer than any model's; a short file may hold long vectors."""
    items = listed(field(content, "items"), "items")
    factors = listed(field(mapped(field(content, "costs"), "costs"), "factors"), "factors")
    vectors = [
        field(part, "owner")
        for item in items
        for name in ("slices", "counts")
        for part in listed(field(item, name), name)
    ]
    vectors += [runs for factor in factors for runs in mapped(field(factor, "owned"), "owned").values()]
    units = sum(whole(field(item, "size"), "the size of a space", at_most=MOST_UNITS) for item in items)
    total = units + sum(runs_length(listed(runs, "an owner vector")) for runs in vectors)
    if total > MOST_NUMBERS:
        raise FairprunerError(f"Its vectors have {total:,} numbers, expected at most {MOST_NUMBERS:,}.")


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a space's name equals a pattern, lies below it as a path, or matches its wildcards."""
    return any(name == p or name.startswith(p + ".") or fnmatchcase(name, p) for p in patterns)
