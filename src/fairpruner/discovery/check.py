"""Whether zeroing units and cutting them give the same output, on the examples or in one module."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fairpruner.core.arrays import Ints
from fairpruner.core.tod import removal_order
from fairpruner.core.units import UnitSpace
from fairpruner.discovery.comparing import NO_NUMBERS, NOT_FINITE, close, compare, is_rounding, shares
from fairpruner.discovery.failing import first_line, raise_if_out_of_memory
from fairpruner.discovery.lively import lively_weights
from fairpruner.discovery.ties import in_one_order
from fairpruner.discovery.watching import Visits, first_difference, watching_modules
from fairpruner.models.calling import call, in_eval_mode, output_tensors
from fairpruner.models.devices import device_of_model, has_float64
from fairpruner.models.narrowing import Change, copy_with, cut_units, mask_units
from fairpruner.models.torch_private import tree_map_only

# The outputs of a correct cut differ only by rounding. float32 is fast and nearly always decides; if it does
# not, float64 does. A model that runs in neither type is tried in the type of its parameters.
PRECISIONS: tuple[tuple[torch.dtype | None, float], ...] = (
    (torch.float32, 1e-4),
    (torch.float64, 1e-9),
    (None, 1e-2),
)
# The share by which weights are shaken, to see how much a model amplifies rounding: a wrong cut changes far
# more than they do.
SHAKE = 1e-12

DRAWS = 8  # of random weights, if the output of the model holds no real numbers

RemovedUnits = dict[str, Ints]


@dataclass(frozen=True)
class Failure:
    """Why mask and cut do not agree, and the path of the module in which it shows, if there is one."""

    reason: str
    path: str | None = None


class _Run(NamedTuple):
    """What a model returned, and the modules that it ran through."""

    outputs: list[torch.Tensor]
    visits: Visits


class Check:
    """Compares mask and cut in several rounds, in which each space loses up to two thirds of its units."""

    def __init__(self, model: nn.Module, examples: Sequence[Any], spaces: Sequence[UnitSpace]) -> None:
        rng = np.random.default_rng(0)
        some, others = _halves(spaces)
        self._rounds: list[RemovedUnits] = [
            {space.name: _drawn(space, rng, most=True) for space in spaces},
            *(
                {space.name: _drawn(space, rng, most=False) for space in drawn}
                | {space.name: _first(space) for space in rest}
                for drawn, rest in ((some, others), (others, some))
            ),
            {space.name: _last(space) for space in spaces},
        ]
        self.examples = examples
        self.model = model
        self._draws = 0  # of further random weights
        self._own_buffers = False  # whether buffers stay near their values
        self.lively = cache(partial(lively_weights, model))
        # A difference in this type is taken as the answer.
        self._decisive = torch.float64 if has_float64(device_of_model(model)) else torch.float32
        self._too_coarse = False  # whether rounding in float32 looks like a difference
        # By example: the differences of the outputs that shaken weights made, when they were tried last.
        self._floors: dict[int, list[torch.Tensor]] = {}
        self.runs = cache(self._whole_model_runs)
        # The model itself with the random weights, which take little memory.
        self.whole = cache(lambda: copy_with(model, self.lively(torch.float32)))

    def failure(self, spaces: Sequence[UnitSpace], *, rounds: int | None = None) -> Failure | None:
        """Why mask and cut of these spaces do not agree; None if they agree. A trial takes fewer rounds."""
        for drawn in self._rounds[:rounds]:
            removed = {space.name: drawn[space.name] for space in spaces if space.name in drawn}
            for position in range(len(self.examples)) if removed else ():
                failure = self.disagreement(spaces, removed, position)
                if failure is not None:
                    return failure
        return None

    def disagreement(
        self, spaces: Sequence[UnitSpace], removed: RemovedUnits, position: int
    ) -> Failure | None:
        """Why mask and cut of these units do not agree on one example; None if they agree.

        A detector may find nothing with some random weights. Then other weights are drawn. A model may take
        the root of a constant that it holds. Then its buffers stay near their values.
        """
        for _ in range(DRAWS):
            failure = self._compared(spaces, removed, position)
            if failure is None or failure.reason not in (NO_NUMBERS, NOT_FINITE):
                break
            if failure.reason == NOT_FINITE and self._own_buffers:
                break
            self._draws += failure.reason == NO_NUMBERS
            self._own_buffers |= failure.reason == NOT_FINITE
            drawn = partial(lively_weights, draw=self._draws, own_buffers=self._own_buffers)
            self.lively = cache(partial(drawn, self.model))
        return failure

    def _compared(self, spaces: Sequence[UnitSpace], removed: RemovedUnits, position: int) -> Failure | None:
        """Why the outputs of mask and cut differ, by the first type that can decide; None if they do not."""
        failure = None
        for dtype, tolerance in PRECISIONS:
            if dtype is torch.float64 and self._decisive is not torch.float64:
                continue
            if dtype is torch.float32 and self._too_coarse:
                continue
            weights, inputs = self.lively(dtype), cast(self.examples[position], dtype)
            # The cut model is freed before the masked one is built.
            cut = partial(cut_units, self.model, spaces, removed, weights=weights)
            small = self._run("a cut model", cut, inputs)
            if isinstance(small, Failure):
                if self.runs(dtype, position):
                    return small
                failure = small
                continue
            mask = partial(mask_units, self.model, spaces, removed)
            masked = self._run("the masked model", partial(mask, weights=weights), inputs)
            if isinstance(masked, Failure):  # a file's example may only fit the cut model
                failure = masked
                continue
            whole, less = (in_one_order(run.outputs, tolerance) for run in (masked, small))
            final = dtype is not torch.float32 or dtype is self._decisive
            reason = compare(whole, less, tolerance, final=final)
            if reason and dtype is torch.float64 and close(whole, less):
                found = shares(whole, less)
                if not is_rounding(found, self._floors.get(position)):
                    shaken = self._outputs(mask(weights=_shaken(weights)), inputs, Visits())
                    self._floors[position] = shares(whole, in_one_order(shaken, tolerance))
                reason = "" if is_rounding(found, self._floors[position]) else reason
            if not reason:
                self._too_coarse |= dtype is torch.float64
                return None
            failure = Failure(reason, first_difference(masked.visits, small.visits, 10 * tolerance))
            if dtype is self._decisive:
                break
        return failure

    def _run(self, name: str, make: Callable[[], nn.Module], inputs: Any) -> _Run | Failure:
        """Build a model and run it; a failure if it cannot run."""
        visits = Visits()
        try:
            return _Run(self._outputs(make(), inputs, visits), visits)
        except Exception as error:  # the user's code may raise anything when sizes change
            raise_if_out_of_memory(error, self.model)
            return Failure(f"{name} cannot run: {first_line(error)}", visits.running)

    def _outputs(self, model: nn.Module, inputs: Any, visits: Visits) -> list[torch.Tensor]:
        return outputs(model, inputs, visits)

    def _whole_model_runs(self, dtype: torch.dtype | None, position: int) -> bool:
        """Whether the uncut model runs in this type at all."""
        try:
            model = copy_with(self.model, self.lively(dtype))
            self._outputs(model, cast(self.examples[position], dtype), Visits())
        except Exception as error:  # the user's code may raise anything in another type
            raise_if_out_of_memory(error, self.model)
            return False
        return True


def _halves(spaces: Sequence[UnitSpace]) -> tuple[list[UnitSpace], list[UnitSpace]]:
    """The spaces in two halves. Spaces that own parts of one producer are put into different halves.

    In one round, one half loses an odd number of units and the other an even number. If all parts lost the
    same number, code that splits the producer's output into equal parts could pass by chance.
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
    limit = _most(space)
    depth = limit if most else int(rng.integers(-(-limit // 3), limit + 1) - 1) // 2 * 2 + 1
    if space.groups > 1:
        return removal_order(np.argsort(rng.permutation(space.size)), space.groups)[: depth * space.groups]
    early, late = (rng.permutation(part) for part in np.array_split(np.arange(space.size), 2))
    from_early = min(depth // 2 + 1, depth, early.size)
    return np.concatenate([early[:from_early], late[: depth - from_early]])


def _most(space: UnitSpace) -> int:
    """How many units a space loses at most, in each of its groups."""
    return max(1, min(space.size - space.min_keep, 2 * space.size // 3) // space.groups)


def _first(space: UnitSpace) -> Ints:
    """The first units of each group, an even number if there are two.

    Code that takes a part of the channels by a share of their number, such as the first half, is then wrong.
    """
    depth = max(1, _most(space) // 2 * 2)
    return removal_order(np.arange(space.size), space.groups)[: depth * space.groups]


def _last(space: UnitSpace) -> Ints:
    """The last units of each group: code that treats the last channel in another way is then wrong."""
    return removal_order(-np.arange(space.size), space.groups)[: _most(space) * space.groups]


def cast(example: Any, dtype: torch.dtype | None) -> Any:
    """The example with its real numbers in this type."""
    return tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if dtype is not None and t.is_floating_point() else t, example
    )


def outputs(model: nn.Module, inputs: Any, visits: Visits) -> list[torch.Tensor]:
    """The tensors that a model in eval mode returns; the modules it runs through join `visits`.

    Nested tensors are returned in parts, sparse ones dense, and complex numbers as pairs of real ones.
    """
    with in_eval_mode(model), torch.no_grad(), watching_modules(model, visits):
        found = output_tensors(call(model, inputs))
        parts = [part for t in found for part in (t.unbind() if t.is_nested else (t,))]
        dense = [part if part.layout is torch.strided else part.to_dense() for part in parts]
        return [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in dense]


def _shaken(weights: Change) -> Change:
    """The weights, each changed by a tiny share of itself up or down."""

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = weights(name, tensor)
        if not tensor.is_floating_point():
            return tensor
        generator = torch.Generator("cpu").manual_seed(zlib.crc32(name.encode()) + 1)
        up = torch.randint(0, 2, tensor.shape, generator=generator, device="cpu").to(tensor) * 2 - 1
        return tensor * (1 + SHAKE * up)

    return change
