"""The check of every space: on the examples, the masked model and the cut model give the same output.

All spaces are checked together. If that fails, the module in which it fails shows which spaces are at fault.
These are set aside, together with the spaces of the same form in other blocks. Later they are tried again,
one form at a time. So a fault that is repeated in fifty blocks costs only a few forward passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import nn

from fairpruner.core.arrays import Ints
from fairpruner.core.tod import removal_order
from fairpruner.core.units import UnitSpace
from fairpruner.discovery.couple import couple
from fairpruner.discovery.failing import first_line, raise_if_out_of_memory
from fairpruner.discovery.heads import chosen_alike, other_choices
from fairpruner.discovery.lively import lively_weights
from fairpruner.discovery.watching import Visits, first_difference, watching_modules
from fairpruner.models.calling import call, in_eval_mode, output_tensors
from fairpruner.models.devices import device_of_model, has_float64
from fairpruner.models.narrowing import copy_with, cut_units, mask_units
from fairpruner.models.torch_private import tree_map_only

# The outputs of a correct cut differ only by rounding. float32 is fast and nearly always decides; if it does
# not, float64 does. A model that runs in neither type is tried in the type of its parameters.
PRECISIONS: tuple[tuple[torch.dtype | None, float], ...] = (
    (torch.float32, 1e-4),
    (torch.float64, 1e-9),
    (None, 1e-2),
)
FAILURES = 3  # so often spaces of one form are tried again before the rest of the form is left out

RemovedUnits = dict[str, Ints]


@dataclass(frozen=True)
class Failure:
    """Why mask and cut do not agree, and the path of the module in which it shows, if there is one."""

    reason: str
    path: str | None = None


def verify(
    model: nn.Module, examples: Sequence[Any], spaces: Sequence[UnitSpace]
) -> tuple[list[UnitSpace], dict[str, str]]:
    """The spaces whose cut is correct, and name -> reason for the others.

    Some spaces only become correct with other attributes, or coupled with another space.
    """
    check = Check(model, examples, spaces)
    sound, aside = _set_aside(check, spaces)
    joined = couple([space for space in aside if space.kind not in ("expert", "block")])
    right = [s for form in _by_form([space for space, _ in joined]) for s in _right(check, form, {})]
    names = {space.name for space in right}
    absorbed = {name for space, parts in joined if space.name in names for name in parts}
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


def _by_form(spaces: Sequence[UnitSpace]) -> Iterator[list[UnitSpace]]:
    forms: dict[object, list[UnitSpace]] = {}
    for space in spaces:
        forms.setdefault(_form(space), []).append(space)
    yield from forms.values()


def _right(check: Check, spaces: list[UnitSpace], failed: dict[str, str]) -> list[UnitSpace]:
    """The correct ones of some spaces of one form, if need be with other attributes that count their units.

    The others are added to `failed`.
    """
    if check.failure(spaces) is None:
        return spaces
    first = spaces[0]
    chosen = next((s for s in other_choices(first, check.model) if check.failure([s]) is None), None)
    if chosen is not None:
        spaces = [chosen_alike(chosen, space, check.model) for space in spaces]
    return _right_together(check, [], spaces, failed)


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
    """The spaces that the module of a failure reads or carries, or else the nearest module around it."""
    path = failure.path
    while path:
        inside = [
            space
            for space in spaces
            if any(f"{s.tensor}.".startswith(f"{path}.") for s in space.slices if s.role != "write")
        ]
        if inside:
            return inside
        path = path.rpartition(".")[0]
    return []


def _form(space: UnitSpace) -> tuple[object, ...]:
    """The form of a space: spaces at the same place of repeated blocks have the same form.

    It consists of the names of its tensors without the numbers of blocks. A number right before the name of
    a tensor is kept, because it distinguishes the layers of one block.
    """
    parts = {(re.sub(r"(^|\.)\d+(?=\.\w+\.)", r"\1#", s.tensor), s.dim, s.role) for s in space.slices}
    return (space.kind, *sorted(parts))


def disagreement(
    model: nn.Module,
    examples: Sequence[Any],
    spaces: Sequence[UnitSpace],
    removed: Mapping[str, Sequence[int]],
    *,
    room: int | None = None,
) -> str:
    """Why mask and cut of exactly these units do not agree on the examples; None if they agree.

    With `room`, spaces are checked in parts whose tensors take at most this many bytes in float32, or one by
    one. Tensors that a part does not touch take no memory, so a model on the device "meta" can be checked.
    """
    units = {name: np.asarray(gone, dtype=np.int64) for name, gone in removed.items()}
    check = Check(model, examples, spaces)
    for part in _parts(model, spaces, room):
        gone = {space.name: units[space.name] for space in part}
        for position in range(len(examples)):
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

    None if the shapes are equal, or if the whole model does not run there.
    """
    inputs = tree_map_only(torch.Tensor, lambda t: t.to("meta"), example)
    try:
        whole = _outputs(model, inputs, Visits())
    except Exception:
        return ""
    try:
        found = _outputs(small, inputs, Visits())
    except Exception as error:
        return f"a cut model cannot run: {first_line(error)}"
    shapes = [[tuple(t.shape) for t in tensors] for tensors in (whole, found)]
    return (
        "" if shapes[0] == shapes[1] else f"a cut changes the output's shape from {shapes[0]} to {shapes[1]}"
    )


class Check:
    """Compares mask and cut in three rounds, in which each space loses up to two thirds of its units."""

    def __init__(self, model: nn.Module, examples: Sequence[Any], spaces: Sequence[UnitSpace]) -> None:
        rng = np.random.default_rng(0)
        some, others = _halves(spaces)
        self._rounds: list[RemovedUnits] = [
            {space.name: _drawn(space, rng, most=True) for space in spaces},
            {space.name: _drawn(space, rng, most=False) for space in some},
            {space.name: _drawn(space, rng, most=False) for space in others},
        ]
        self._examples = examples
        self.model = model
        self._lively = cache(partial(lively_weights, model))
        # A difference in this type is taken as the answer.
        self._decisive = torch.float64 if has_float64(device_of_model(model)) else torch.float32
        self._runs = cache(self._whole_model_runs)

    def failure(self, spaces: Sequence[UnitSpace]) -> Failure | None:
        """Why mask and cut of these spaces do not agree; None if they agree."""
        for drawn in self._rounds:
            removed = {space.name: drawn[space.name] for space in spaces if space.name in drawn}
            for position in range(len(self._examples)) if removed else ():
                failure = self.disagreement(spaces, removed, position)
                if failure is not None:
                    return failure
        return None

    def disagreement(
        self, spaces: Sequence[UnitSpace], removed: RemovedUnits, position: int
    ) -> Failure | None:
        failure = None
        for dtype, tolerance in PRECISIONS:
            if dtype is torch.float64 and self._decisive is not torch.float64:
                continue
            weights, inputs = self._lively(dtype), _cast(self._examples[position], dtype)
            visits = Visits()
            try:
                # The cut model is freed before the masked one is built.
                small = _outputs(cut_units(self.model, spaces, removed, weights=weights), inputs, visits)
            except Exception as error:  # the user's code may raise anything when sizes change
                raise_if_out_of_memory(error, self.model)
                failure = Failure(f"a cut model cannot run: {first_line(error)}", visits.running)
                if self._runs(dtype, position):
                    break
                continue
            other = Visits()
            try:
                masked = _outputs(mask_units(self.model, spaces, removed, weights=weights), inputs, other)
            except Exception as error:  # a file's example may only fit the cut model
                raise_if_out_of_memory(error, self.model)
                failure = Failure(f"the masked model cannot run: {first_line(error)}", other.running)
                continue
            reason = _compare(masked, small, tolerance)
            if not reason:
                return None
            failure = Failure(reason, first_difference(other, visits, 10 * tolerance))
            if dtype is self._decisive:
                break
        return failure

    def _whole_model_runs(self, dtype: torch.dtype | None, position: int) -> bool:
        """Whether the uncut model runs in this type at all."""
        try:
            model = copy_with(self.model, self._lively(dtype))
            _outputs(model, _cast(self._examples[position], dtype), Visits())
        except Exception as error:  # the user's code may raise anything in another type
            raise_if_out_of_memory(error, self.model)
            return False
        return True


def _halves(spaces: Sequence[UnitSpace]) -> tuple[list[UnitSpace], list[UnitSpace]]:
    """The spaces in two halves. Spaces that own parts of one producer are put into different halves.

    Otherwise code that splits the producer's output into equal parts could pass by chance, because all parts
    lose the same number of units.
    """
    siblings: dict[tuple[str, int], list[UnitSpace]] = {}
    for space in spaces:
        producer = (space.slices_of("write") or space.slices)[0]
        siblings.setdefault((producer.tensor, producer.dim), []).append(space)
    alone = [group[0] for group in siblings.values() if len(group) == 1]
    groups = [alone, *(group for group in siblings.values() if len(group) > 1)]
    return [s for group in groups for s in group[::2]], [s for group in groups for s in group[1::2]]


def _drawn(space: UnitSpace, rng: np.random.Generator, *, most: bool) -> Ints:
    """Units to remove: two thirds of a space, or an odd number up to that; more of them from its first half.

    Code that splits a tensor into equal parts is correct by chance if all parts lose the same number, or if
    the last part loses few. It cannot be correct by chance in all these draws.
    """
    limit = max(1, min(space.size - space.min_keep, 2 * space.size // 3) // space.groups)
    depth = limit if most else int(rng.integers(-(-limit // 3), limit + 1) - 1) // 2 * 2 + 1
    if space.groups > 1:
        return removal_order(np.argsort(rng.permutation(space.size)), space.groups)[: depth * space.groups]
    early, late = (rng.permutation(part) for part in np.array_split(np.arange(space.size), 2))
    from_early = min(depth // 2 + 1, depth, early.size)
    return np.concatenate([early[:from_early], late[: depth - from_early]])


def _cast(example: Any, dtype: torch.dtype | None) -> Any:
    return tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if dtype is not None and t.is_floating_point() else t, example
    )


def _outputs(model: nn.Module, inputs: Any, visits: Visits) -> list[torch.Tensor]:
    with in_eval_mode(model), torch.no_grad(), watching_modules(model, visits):
        return list(output_tensors(call(model, inputs)))


def _compare(masked: list[torch.Tensor], small: list[torch.Tensor], tolerance: float) -> str:
    if [t.shape for t in masked] != [t.shape for t in small]:
        return (
            f"a cut changes the output's shape from {[tuple(t.shape) for t in masked]} to"
            f" {[tuple(t.shape) for t in small]}"
        )
    pairs = [(a, b) for a, b in zip(masked, small, strict=True) if a.is_floating_point() and a.numel()]
    if not pairs:
        return "the output on the example holds no real numbers, so a cut cannot be checked"
    for a, b in pairs:
        if not a.isfinite().all():
            return "the output on the example is not finite, so a cut cannot be checked"
        difference, scale = float((a - b).abs().max()), float(a.abs().max())
        if not difference <= tolerance * scale:
            return f"mask and cut differ by {difference:.2g} where the output is {scale:.2g}"
    return ""
