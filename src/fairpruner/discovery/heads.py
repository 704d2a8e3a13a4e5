"""Attributes that say how many heads an attention module has, or how wide they are together.

They are found by value and by place: whole numbers on the modules that hold the projections of the heads, or
one above, that fit the number of units or the width of a projection. A first guess is made of those that the
code of the module mentions. Where a cut with it fails, other choices are tried.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from torch import nn

from fairpruner.core.arrays import Ints
from fairpruner.core.spaces import Count, UnitSpace
from fairpruner.models.attention import STAND_INS
from fairpruner.models.code_names import names_in_code
from fairpruner.models.narrow_heads import HEADS_WIDTH

TRIALS = 12  # choices of attributes that are tried before heads are left out
SIZES = ("dim", "size", "width", "channels")  # words in the name of an attribute that is no number of heads


@dataclass(frozen=True)
class Candidate:
    """An attribute that may count heads or their width, and whether the first guess says so."""

    count: Count
    guessed: bool


def head_counts(space: UnitSpace, model: nn.Module) -> tuple[Count, ...]:
    """The counts that most likely shrink with a space of heads."""
    return tuple(candidate.count for candidate in _candidates(space, model) if candidate.guessed)


def other_choices(space: UnitSpace, model: nn.Module) -> Iterator[UnitSpace]:
    """The space with other attributes than the first guess: the nearest choices first, then with code that
    takes the width of the heads from the width of its input.
    """
    places = list(dict.fromkeys(_place(candidate.count) for candidate in _candidates(space, model)))
    flips = [
        frozenset(flipped) for changes in range(len(places) + 1) for flipped in combinations(places, changes)
    ][:TRIALS]
    for flipped in flips[1:]:
        yield _with(space, model, flipped)
    narrow = _narrowed(space)
    for flipped in flips if narrow else ():
        chosen = _with(space, model, flipped)
        yield replace(chosen, counts=(*chosen.counts, *narrow))


def _with(space: UnitSpace, model: nn.Module, flipped: Collection[tuple[str, str]]) -> UnitSpace:
    """The space with the first guess changed at some places."""
    candidates = _candidates(space, model)
    others = tuple(count for count in space.counts if not any(_same(count, c.count) for c in candidates))
    chosen = tuple(c.count for c in candidates if c.guessed != (_place(c.count) in flipped))
    return replace(space, counts=others + chosen)


def chosen_alike(chosen: UnitSpace, space: UnitSpace, model: nn.Module) -> UnitSpace:
    """The space with the attributes that were chosen for a space at a corresponding place."""
    places = {_place(count) for count in chosen.counts}
    flipped = {_place(c.count) for c in _candidates(space, model) if c.guessed != (_place(c.count) in places)}
    alike = _with(space, model, flipped)
    narrow = _narrowed(space) if any(c.attribute == HEADS_WIDTH for c in chosen.counts) else ()
    return replace(alike, counts=(*alike.counts, *narrow))


def _place(count: Count) -> tuple[str, str]:
    """Where a count stands in its block: the last name of its module, unless that is a number."""
    name = count.module.rpartition(".")[2]
    return ("" if name.isdigit() else name), count.attribute


def _same(a: Count, b: Count) -> bool:
    return (a.module, a.attribute) == (b.module, b.attribute)


def _candidates(space: UnitSpace, model: nn.Module) -> list[Candidate]:
    found: list[Candidate] = []
    for path in dict.fromkeys(_nearby(space)):
        module = model.get_submodule(path)
        if type(module) in STAND_INS or type(module) in STAND_INS.values():
            owner = _shares(space.size, int(vars(module)["num_heads"]))
            found += [Candidate(Count(path, "num_heads", owner), True)] if owner is not None else []
            continue
        mentioned = names_in_code(type(module))
        for attribute, value in _whole_numbers(module):
            name = attribute.rpartition(".")[2]
            used = mentioned is None or set(attribute.split(".")) <= mentioned
            if not used and ("head" not in name or "." in attribute):
                continue
            a_size = any(word in name for word in SIZES)
            if (owner := _widths(space, value)) is not None:
                found.append(Candidate(Count(path, attribute, owner), a_size))
            elif (owner := _shares(space.size, value)) is not None:
                guessed = not a_size and ("head" in name or value == space.size)
                found.append(Candidate(Count(path, attribute, owner), guessed))
    return found


def _whole_numbers(module: nn.Module) -> Iterator[tuple[str, int]]:
    """The whole numbers that a module holds, and those of its configuration."""
    for name, value in vars(module).items():
        if type(value) is int:
            yield name, value
    config = vars(module).get("config")
    if config is not None and not isinstance(config, (dict, nn.Module)) and hasattr(config, "__dict__"):
        yield from ((f"config.{name}", value) for name, value in vars(config).items() if type(value) is int)


def _nearby(space: UnitSpace) -> Iterator[str]:
    for part in space.slices:
        holder = part.tensor.rpartition(".")[0]
        yield holder
        yield holder.rpartition(".")[0]


def _shares(units: int, value: int) -> Ints | None:
    """Heads dealt out evenly to the units."""
    return np.repeat(np.arange(units), value // units) if value > 0 and value % units == 0 else None


def _widths(space: UnitSpace, value: int) -> Ints | None:
    """The owners of a projection of this size, or of the first part of one that fuses several."""
    if value <= space.size:
        return None
    whole = [part.owner for part in space.slices if part.owner.size % value == 0 and (part.owner >= 0).all()]
    owner = min(whole, key=len)[:value] if whole else None
    return owner if owner is not None and np.unique(owner).size == space.size else None


def _narrowed(space: UnitSpace) -> tuple[Count, ...]:
    """The width of all heads as a count of the module that holds their projections."""
    holders = [part.tensor.split(".")[:-1] for part in space.slices]
    common = holders[0]
    for holder in holders[1:]:
        length = next((n for n, (a, b) in enumerate(zip(common, holder, strict=False)) if a != b), None)
        common = common[: min(len(common), len(holder)) if length is None else length]
    reading = [part.owner for part in space.slices_of("read") if (part.owner >= 0).all()]
    path = ".".join(common)
    return () if not reading or not path else (Count(path, HEADS_WIDTH, reading[-1]),)
