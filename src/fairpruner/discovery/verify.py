"""The check of every space: on the examples, the masked model and the cut model give the same output.

All spaces are checked together. If that fails, the module in which it fails shows which spaces are at fault.
These are set aside, together with the spaces of the same form in other blocks. Later they are tried again,
one form at a time. So a fault that is repeated in fifty blocks costs only a few forward passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fairpruner.core.units import UnitSpace
from fairpruner.discovery.check import Check, Failure, outputs
from fairpruner.discovery.couple import couple
from fairpruner.discovery.failing import first_line
from fairpruner.discovery.heads import chosen_alike, other_choices
from fairpruner.discovery.nearby import check_nearby
from fairpruner.discovery.padding import with_padding
from fairpruner.discovery.separate import check_separate
from fairpruner.discovery.watching import Visits
from fairpruner.models.torch_private import tree_map_only

FAILURES = 3  # so often spaces of one form are tried again before the rest of the form is left out


def verify(
    model: nn.Module, examples: Sequence[Any], spaces: Sequence[UnitSpace]
) -> tuple[list[UnitSpace], dict[str, str]]:
    """The spaces whose cut is correct, and name -> reason for the others.

    Some spaces only become correct with other attributes, or coupled with another space.
    """
    check = Check(model, with_padding(model, examples), spaces)
    check_separate(check)
    sound, aside = _set_aside(check, spaces)
    joined = couple([*(s for s in aside if s.kind not in ("expert", "block")), *_siblings(sound, aside)])
    right = [s for form in _by_form([space for space, _ in joined]) for s in _right(check, form, {})]
    names = {space.name for space in right}
    absorbed = {name for space, parts in joined if space.name in names for name in parts}
    sound = [space for space in sound if space.name not in absorbed]
    failed: dict[str, str] = {}
    for form in _by_form([space for space in aside if space.name not in absorbed]):
        right += _right(check, form, failed)
    if right:
        sound += _right_together(check, sound, right, failed)
    places = {space.name: place for place, space in enumerate(spaces)}
    return sorted(sound, key=lambda space: places[space.name]), failed


def _set_aside(check: Check, spaces: Sequence[UnitSpace]) -> tuple[list[UnitSpace], list[UnitSpace]]:
    """Spaces that are correct together, and the spaces of the forms at fault."""
    sound, aside = list(spaces), set[object]()
    while sound and (failure := check.failure(sound)):
        blamed = _blamed(failure, sound) or [_first_failing(check, [], sound, failure)[0]]
        aside |= {_form(space) for space in blamed}
        sound = [space for space in sound if _form(space) not in aside]
    return sound, [space for space in spaces if _form(space) in aside]


def _siblings(sound: Sequence[UnitSpace], aside: Sequence[UnitSpace]) -> list[UnitSpace]:
    """The sound spaces that own parts of a producer of which other parts fail alone."""
    written = {(part.tensor, part.dim) for space in aside for part in space.slices_of("write")}
    return [s for s in sound if any((part.tensor, part.dim) in written for part in s.slices_of("write"))]


def _by_form(spaces: Sequence[UnitSpace]) -> Iterator[list[UnitSpace]]:
    forms: dict[object, list[UnitSpace]] = {}
    for space in spaces:
        forms.setdefault(_form(space), []).append(space)
    yield from forms.values()


def _right(check: Check, spaces: list[UnitSpace], failed: dict[str, str]) -> list[UnitSpace]:
    """The correct ones of some spaces of one form, if need be with other attributes that count their units.

    The others are added to `failed`. The first space is tried in the module around it, if that is small; the
    whole model is checked later.
    """
    first = spaces[0]
    choices = list(other_choices(first, check.model))
    near = check_nearby(check, [first, *choices])
    if near.failure([first] if near is not check else spaces, rounds=1) is None:
        return spaces
    chosen = next((choice for choice in choices if near.failure([choice], rounds=1) is None), None)
    if chosen is not None:
        spaces = [chosen_alike(chosen, space, check.model) for space in spaces]
        if near is not check:
            return spaces
    elif wrong := _all_wrong(check, spaces):
        failed |= wrong
        return []
    return _right_together(check, [], spaces, failed)


def _all_wrong(check: Check, spaces: Sequence[UnitSpace]) -> dict[str, str]:
    """Name -> reason for all spaces of one form, if the first few fail also in the modules around them;
    nothing otherwise.
    """
    wrong: dict[str, str] = {}
    for space in spaces[:FAILURES]:
        near = check_nearby(check, [space])
        failure = None if near is check else near.failure([space], rounds=1)
        if failure is None or "output's shape" in failure.reason:
            return {}
        wrong[space.name] = failure.reason
    first = spaces[0].name
    return {space.name: wrong.get(space.name, f"like {first}, {wrong[first]}") for space in spaces}


def _right_together(
    check: Check, sound: Sequence[UnitSpace], again: Sequence[UnitSpace], failed: dict[str, str]
) -> list[UnitSpace]:
    """The spaces that are correct together with the `sound` ones; the others are added to `failed`."""
    wrong: dict[str, str] = {}
    while rest := [space for space in again if space.name not in wrong]:
        failure = check.failure([*sound, *rest])
        if failure is None:
            break
        if len(wrong) == FAILURES:
            first = next(iter(wrong))
            wrong |= {space.name: f"like {first}, {wrong[first]}" for space in rest}
            break
        blamed = _blamed(failure, rest)
        alone = check.failure([*sound, *blamed]) if 0 < len(blamed) < len(rest) else None
        space, reason = _first_failing(check, sound, *((blamed, alone) if alone else (rest, failure)))
        wrong[space.name] = reason
    failed |= wrong
    return [space for space in again if space.name not in wrong]


def _first_failing(
    check: Check, sound: Sequence[UnitSpace], spaces: Sequence[UnitSpace], failure: Failure
) -> tuple[UnitSpace, str]:
    """Of spaces that fail together: the first one with which those before it fail, and the reason."""
    good, bad = 0, len(spaces)
    while bad - good > 1:
        middle = (good + bad) // 2
        earlier = check.failure([*sound, *spaces[:middle]])
        good, bad, failure = (good, middle, earlier) if earlier else (middle, bad, failure)
    return spaces[bad - 1], failure.reason


def _blamed(failure: Failure, spaces: Sequence[UnitSpace]) -> list[UnitSpace]:
    """The spaces that the module of a failure reads or carries, or else writes, or else the nearest module
    around it.
    """
    path = failure.path
    while path:
        inside = {
            space.name: {s.role for s in space.slices if f"{s.tensor}.".startswith(f"{path}.")}
            for space in spaces
        }
        blamed = [space for space in spaces if inside[space.name] - {"write"}]
        if blamed := blamed or [space for space in spaces if inside[space.name]]:
            return blamed
        path = path.rpartition(".")[0]
    return []


def _form(space: UnitSpace) -> tuple[object, ...]:
    """The form of a space: spaces at the same place of repeated blocks have the same form.

    It consists of the names of its tensors without the numbers of blocks and stages, such as 2.0 or conv2_1.
    Numbers in the name of the module that holds a tensor are kept: they distinguish layers of one block.
    """
    parts = {(re.sub(r"\d+(?=\w*\.\w+\.)", "#", s.tensor), s.dim, s.role) for s in space.slices}
    return (space.kind, *sorted(parts))


def disagreement(
    model: nn.Module,
    examples: Sequence[Any],
    spaces: Sequence[UnitSpace],
    removed: Mapping[str, Sequence[int]],
    *,
    room: int | None = None,
) -> str:
    """Why mask and cut of exactly these units do not agree on the examples; "" if they agree.

    With `room`, spaces are checked in parts whose tensors take at most this many bytes in float32, or one by
    one. Tensors that a part does not touch take no memory, so a model on the device "meta" can be checked.
    """
    units = {name: np.asarray(gone, dtype=np.int64) for name, gone in removed.items()}
    check = Check(model, with_padding(model, examples), spaces)
    if room is None:  # a model on the device "meta" is one of transformers, without functions of the user
        check_separate(check)
    for part in _parts(model, spaces, room):
        gone = {space.name: units[space.name] for space in part}
        for position in range(len(check.examples)):
            failure = check.disagreement(part, gone, position)
            if failure is not None:
                return failure.reason
    return ""


def _parts(model: nn.Module, spaces: Sequence[UnitSpace], room: int | None) -> Iterator[Sequence[UnitSpace]]:
    if room is None:
        yield spaces
        return
    sizes = {name: 4 * tensor.numel() for name, tensor in model.named_parameters()}
    part: list[UnitSpace] = []
    touched: set[str] = set()
    for space in spaces:
        own = {s.tensor for s in space.slices}
        if part and sum(sizes.get(name, 0) for name in touched | own) > room:
            yield part
            part, touched = [], set()
        part.append(space)
        touched |= own
    yield part


def runs_without_numbers(model: nn.Module, small: nn.Module, example: Any) -> str:
    """Why the output of a cut model on the device "meta" has other shapes than that of the whole model.

    "" if the shapes are equal, or if the whole model does not run there.
    """
    inputs = tree_map_only(torch.Tensor, lambda t: t.to("meta"), example)
    try:
        whole = outputs(model, inputs, Visits())
    except Exception:
        return ""
    try:
        found = outputs(small, inputs, Visits())
    except Exception as error:
        return f"a cut model cannot run: {first_line(error)}"
    shapes = [[tuple(t.shape) for t in tensors] for tensors in (whole, found)]
    return (
        "" if shapes[0] == shapes[1] else f"a cut changes the output's shape from {shapes[0]} to {shapes[1]}"
    )
