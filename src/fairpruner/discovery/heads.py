"""The attributes of an attention module that hold the number of its heads, or the width of all heads.

They are found by value and by place: whole numbers on the modules that hold the projections of the heads, or
one level above, that equal the number of heads or the width of a projection. The first guess takes those that
the code of the module mentions. If a cut with this guess fails, other choices are tried, also of numbers that
only the functions around the module read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from torch import nn

from fairpruner.core.arrays import Ints
from fairpruner.core.units import Count, UnitSpace
from fairpruner.models.attention import FEWER_HEADS
from fairpruner.models.code_names import names_in_code, names_in_functions
from fairpruner.models.narrow_heads import HEADS_WIDTHS, KEPT_HEADS, arguments_of

TRIALS = 8  # choices of attributes that are tried before heads are left out
LONGEST_TUPLE = 4  # of sizes that a module holds
SIZES = ("dim", "size", "width", "channels")  # words in names of attributes that are not a number of heads


Place = tuple[str, str, bool]


@dataclass(frozen=True)
class SizeCandidate:
    """An attribute that may count heads or their width, and whether the first guess takes it."""

    count: Count
    guessed: bool


# Numbers that count no heads, though they may equal their number: where a layer stands, how far it looks.
NO_HEADS = re.compile("layer_(idx|index|id|number)$|window|position|length|kernel|stride")


def head_counts(space: UnitSpace, model: nn.Module) -> tuple[Count, ...]:
    """The first guess: the attributes that shrink with a space of heads."""
    return tuple(candidate.count for candidate in _candidates(space, model) if candidate.guessed)


def other_choices(space: UnitSpace, model: nn.Module) -> Iterator[UnitSpace]:
    """The space with other choices of attributes, those nearest to the first guess first.

    Each choice is also tried with a class whose code may take the width of the heads from its input.
    """
    places = list(dict.fromkeys(_place(space, candidate.count) for candidate in _free(space, model)))
    flips = [set(f) for changes in range(len(places) + 1) for f in combinations(places, changes)]
    for flipped in flips[:TRIALS]:
        chosen = _with(space, model, flipped)
        if len(chosen.counts) != len(space.counts) or flipped:
            yield chosen
        for narrow in _narrowed(space):
            yield replace(chosen, counts=(*chosen.counts, *narrow))
    for given in _given_for_heads(space, model):
        yield replace(space, counts=(*space.counts, given))


def chosen_alike(chosen: UnitSpace, space: UnitSpace, model: nn.Module) -> UnitSpace:
    """The space with the attributes that were chosen for a space at a corresponding place."""
    places = {_place(chosen, count) for count in chosen.counts}
    flipped = {
        _place(space, c.count) for c in _free(space, model) if c.guessed != (_place(space, c.count) in places)
    }
    same = _with(space, model, flipped)
    attributes = {count.attribute for count in chosen.counts}
    narrow = (count for counts in _narrowed(space) for count in counts)
    further = (c for c in (*narrow, *_given_for_heads(space, model)) if c.attribute in attributes)
    return replace(same, counts=(*same.counts, *further))


def _with(space: UnitSpace, model: nn.Module, flipped: Collection[Place]) -> UnitSpace:
    """The space with the first guess changed at some places."""
    free = _free(space, model)
    fixed = tuple(count for count in space.counts if not any(_same(count, c.count) for c in free))
    return replace(
        space, counts=fixed + tuple(c.count for c in free if c.guessed != (_place(space, c.count) in flipped))
    )


def _free(space: UnitSpace, model: nn.Module) -> list[SizeCandidate]:
    """The candidates that a choice may change: not what tracing found to be a count."""
    found = _candidates(space, model)
    traced = [c for c in space.counts if not any(_same(c, other.count) and other.guessed for other in found)]
    return [c for c in found if not any(_same(c.count, count) for count in traced)]


def _place(space: UnitSpace, count: Count) -> Place:
    """The place of a count in its block: the last name of its module without numbers, and whether units are
    written there.
    """
    name = re.sub(r"\d+", "", count.module.rpartition(".")[2])
    return name, count.attribute, _writes(space, count.module)


def _writes(space: UnitSpace, path: str) -> bool:
    return any(f"{part.tensor}.".startswith(f"{path}.") for part in space.slices_of("write"))


def _same(a: Count, b: Count) -> bool:
    return (a.module, a.attribute) == (b.module, b.attribute)


def _candidates(space: UnitSpace, model: nn.Module) -> list[SizeCandidate]:
    """Every attribute near a space that may count its heads or their width."""
    found: list[SizeCandidate] = []
    for path in dict.fromkeys(_nearby(space)):
        module = model.get_submodule(path)
        if type(module) in FEWER_HEADS or type(module) in FEWER_HEADS.values():
            owner = _heads(space, int(vars(module)["num_heads"]))
            found += [SizeCandidate(Count(path, "num_heads", owner), True)] if owner is not None else []
            continue
        if type(module).__module__.startswith("torch.nn."):
            continue  # sizes such as the kernel of a convolution count no heads
        mentioned, around = names_in_code(type(module)), names_in_functions(type(module))
        for attribute, value in _whole_numbers(module):
            named_after_heads = "head" in attribute and "." not in attribute  # a dot: from a configuration
            used = mentioned is None or set(attribute.partition("[")[0].split(".")) <= mentioned
            candidate = _candidate(space, path, attribute, value)
            if candidate is not None and (used or named_after_heads):
                found.append(candidate)
            elif candidate is not None and attribute in around:
                found.append(replace(candidate, guessed=False))
    return found


def _candidate(space: UnitSpace, path: str, attribute: str, value: int) -> SizeCandidate | None:
    """The attribute of a module as a candidate, if its value is a width of heads or a number of heads."""
    name = attribute.rpartition(".")[2]
    named_as_size = any(word in name for word in SIZES)
    owner = _widths(space, value)
    if owner is not None:
        return SizeCandidate(Count(path, attribute, owner), named_as_size)
    owner = _heads(space, value)
    if owner is None or (space.kind != "head" and value != space.size):
        return None
    counts_heads = "head" in name or value == space.size
    guessed = counts_heads and not named_as_size and _counts_here(space, path, attribute)
    return SizeCandidate(Count(path, attribute, owner), guessed)


def _counts_here(space: UnitSpace, path: str, attribute: str) -> bool:
    """Whether a number is most likely one of heads: heads are written here, or it is an entry of the shape of
    a table with a column for each head.
    """
    held = any(part.tensor.rpartition(".")[0] == path for part in space.slices)
    return _writes(space, path) or (held and "[" in attribute)


def _whole_numbers(module: nn.Module) -> Iterator[tuple[str, int]]:
    """The whole numbers that a module holds, alone or in short tuples, and those of its configuration."""
    for name, value in vars(module).items():
        if NO_HEADS.search(name):
            continue
        if type(value) is int:
            yield name, value
        elif type(value) in (tuple, list) and len(value) <= LONGEST_TUPLE and not KEPT_HEADS.fullmatch(name):
            yield from ((f"{name}[{n}]", entry) for n, entry in enumerate(value) if type(entry) is int)
    config = vars(module).get("config")
    if config is not None and not isinstance(config, (dict, nn.Module)) and hasattr(config, "__dict__"):
        numbers = ((name, value) for name, value in vars(config).items() if type(value) is int)
        yield from ((f"config.{name}", value) for name, value in numbers if not NO_HEADS.search(name))


def _nearby(space: UnitSpace) -> Iterator[str]:
    """The modules that hold slices of a space, up to two around each, and the one around all of them."""
    for part in space.slices:
        holder = part.tensor.rpartition(".")[0]
        above = holder.rpartition(".")[0]
        yield from (holder, above)
        yield from [above.rpartition(".")[0]] if "." in above else []
    yield from [around] if (around := _around(space)) else []


def _around(space: UnitSpace) -> str:
    """The path of the innermost module that holds all slices of a space."""
    return common_path([part.tensor.rpartition(".")[0] for part in space.slices])


def common_path(paths: Sequence[str]) -> str:
    """The path of the innermost module around all modules at these paths.

    >>> common_path(["a.b.c", "a.b.d"]), common_path(["a", "b"])
    ('a.b', '')
    """
    common = paths[0].split(".")
    for path in paths[1:]:
        same = [a == b for a, b in zip(common, path.split("."), strict=False)]
        common = common[: same.index(False) if False in same else len(same)]
    return ".".join(common)


def _heads(space: UnitSpace, value: int) -> Ints | None:
    """The unit of each of `value` heads; -1 for heads of other spaces. None if no tensor has so many.

    A head is mostly a run of equal owners along a dimension of a tensor. Every unit has the same number of
    heads.
    """
    for part in space.slices if value > 0 else ():
        runs = part.owner.reshape(value, -1) if part.owner.size % value == 0 else None  # [heads, width]
        if runs is not None and (runs == runs[:, :1]).all():
            heads = np.bincount(runs[runs[:, 0] >= 0, 0], minlength=space.size)
            if (heads == heads[0]).all():
                return runs[:, 0]
    whole = all((part.owner >= 0).all() for part in space.slices)
    if value == space.size or (whole and value > 0 and value % space.size == 0):
        return np.repeat(np.arange(space.size), value // space.size)  # the heads lie between each other
    return None


def _widths(space: UnitSpace, value: int) -> Ints | None:
    """The owners of a projection of this size, or of the first part of one that fuses several."""
    if value <= space.size:
        return None
    projections = [part for part in space.slices if part.role != "carry"]
    owners = [part.owner for part in projections if part.owner.size % value == 0]
    whole = [owner for owner in owners if owner.size == value or (owner >= 0).all()]
    owner = min(whole, key=len)[:value] if whole else None
    return owner if owner is not None and np.unique(owner[owner >= 0]).size == space.size else None


def _narrowed(space: UnitSpace) -> list[tuple[Count, ...]]:
    """The width of all heads as a count of the module that holds their projections.

    Where heads of several modules are tied, each of these gets a count. There is one choice for each
    dimension of the input from which the code may take this width.
    """
    reading = {part.tensor: part.owner for part in space.slices_of("read")}
    if space.kind != "head" or not reading:
        return []
    around = _around(space)
    places = {around: max(reading.values(), key=len)} if around else {}
    if not around:
        above = ((tensor.rpartition(".")[0].rpartition(".")[0], owner) for tensor, owner in reading.items())
        places = {path: owner for path, owner in above if path}
    return [
        tuple(Count(path, attribute, owner) for path, owner in places.items())
        for attribute in (HEADS_WIDTHS if places else ())
    ]


def _given_for_heads(space: UnitSpace, model: nn.Module) -> Iterator[Count]:
    """The heads of an argument of the module around a space, for each argument and dimension that may have
    numbers for every head. The first argument is what the heads read.
    """
    path = _around(space)
    if space.kind != "head" or not path:
        return
    owners = [count.owner for count in space.counts if "head" in count.attribute]
    owner = max(owners, key=len, default=np.arange(space.size))
    for name in arguments_of(type(model.get_submodule(path)))[1:]:
        yield from (Count(path, f"kept_heads_of_{name}_{dim}", owner) for dim in (0, 1))
