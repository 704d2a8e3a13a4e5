"""One forward pass in which every operation of torch is also applied to shadows, which follow the units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fairpruner.core.arrays import Ints
from fairpruner.core.tod import removal_order
from fairpruner.core.units import UnitSpace
from fairpruner.discovery.experts import ExpertLists
from fairpruner.discovery.ids import Axis, Partition
from fairpruner.discovery.recorder import Recorder, SizeAttribute, flat
from fairpruner.discovery.recurrent import tie_recurrent
from fairpruner.discovery.rules import FOLLOW_BUFFERS, Operation, rule_for
from fairpruner.errors import FairprunerError
from fairpruner.models.calling import call_checked, evaluating, output_tensors
from fairpruner.models.narrowing import cut_units
from fairpruner.models.recurrence import plain_recurrence
from fairpruner.models.torch_private import (
    TorchDispatchMode,
    as_products,
    draws_random_numbers,
    flop_formula,
    hooked_modules,
)

ZEROS = ("zeros", "new_zeros", "zeros_like")
LEAVING = (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__)
OUTPUT = "reaches the model's output"


@dataclass(frozen=True, eq=False)
class OperationCost:
    """MACs of one operation, proportional to the number of kept ids along each of its axes."""

    macs: int
    axes: tuple[Ints, ...]
    expert: tuple[str, int] | None = None  # the list of modules, and the one among them, that ran it
    module: str = ""  # the path of the innermost module that ran it


@dataclass(frozen=True, eq=False)
class Trace:
    """The result of tracing."""

    partition: Partition
    costs: tuple[OperationCost, ...]
    size_attributes: tuple[SizeAttribute, ...]
    unmet: tuple[str, ...]  # parameters that no operation used
    random: tuple[str, ...]  # operations that drew random numbers, and where
    shared: tuple[str, ...]  # modules whose weights several heads share, though they were taken for groups


class ShadowMode(TorchDispatchMode):
    """Runs every operation for real and then, by its rule, on the shadows."""

    def __init__(self, recorder: Recorder, experts: ExpertLists) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.costs: list[OperationCost] = []
        self._recorder = recorder
        self._experts = experts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        products = as_products(func)
        if products is not None:
            with self:
                return products(*args, **kwargs)
        out = func(*args, **kwargs)
        op = Operation(self._recorder, func, args, kwargs, out)
        if draws_random_numbers(func, args, kwargs):
            self._recorder.drew(op.name)
        if op.name in ZEROS:
            self._recorder.blank(op.result)
        # An expert that no token chose works on tensors without elements.
        idle = op.results and not any(t.numel() for t in op.results)
        rule = rule_for(func)
        buffers = rule in FOLLOW_BUFFERS
        met = any(op.shadow(t, buffers=buffers).maps for t in op.tensors)
        axes = rule(op) if met and not idle else ()
        flops = flop_formula(func)
        if flops is not None:
            macs = int(flops(*args, **kwargs, out_val=out)) // 2
            expert = self._experts.running(self._recorder.running)
            lengths = tuple(flat(idmap) for idmap in axes or ())
            self.costs.append(OperationCost(macs, lengths, expert, self._recorder.running_path))
        return out


class NumberMode(TorchFunctionMode):
    """Locks what leaves torch as an array or a list, which no operation shows."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LEAVING:
            self._recorder.algebra.lock_as_number(self._recorder.shadow(args[0]))
        return func(*args, **(kwargs or {}))


def trace(model: nn.Module, examples: Sequence[Any], experts: Sequence[UnitSpace] = ()) -> Trace:
    """Run the model once on each example, and follow the indices of every parameter through it.

    The dimension that counts experts is not followed. Costs are those of the first example. A weight that
    reads several groups one after the other ties their positions. If all of these turn out to be one unit,
    the groups were heads, and a second pass follows them as heads.
    """
    seen = _trace(model, examples, experts, ())
    return _trace(model, examples, experts, seen.shared) if seen.shared else seen


def _trace(
    model: nn.Module, examples: Sequence[Any], experts: Sequence[UnitSpace], shared: Sequence[str]
) -> Trace:
    lists = ExpertLists(model, experts)
    recorder = Recorder(model, lists, shared)
    costs: list[OperationCost] = []
    for position, example in enumerate(examples):
        mode = ShadowMode(recorder, lists)
        watching, numbers = _watching_modules(recorder, lists), NumberMode(recorder)
        with evaluating(model), torch.no_grad(), plain_recurrence(model), watching, mode, numbers:
            output = call_checked(model, example)
        outputs = list(output_tensors(output))
        if not outputs:
            raise FairprunerError(
                f"The output of {type(model).__name__} on the example holds no tensor: found"
                f" {type(output).__name__}. A cut is checked by its output, so let the model return tensors."
            )
        for tensor in outputs:
            recorder.algebra.lock(recorder.shadow(tensor), OUTPUT)
        costs = mode.costs if position == 0 else costs
    axes = recorder.finish_experts(model)
    tie_recurrent(recorder, model)
    recorder.algebra.settle_rest()
    partition = recorder.ids.partition()
    apart = [
        name
        for name in lists.lists
        if lists.all_see_all(name) or _each_takes_its_own(model, examples[0], lists, experts, name)
    ]
    one_unit = (path for path, ids in recorder.suspects if np.unique(partition.roots[ids]).size == 1)
    return Trace(
        partition,
        tuple(_shared_out(cost, apart, axes) for cost in costs),
        tuple(recorder.size_attributes),
        tuple(recorder.unmet(model)),
        tuple(recorder.random),
        tuple(dict.fromkeys(one_unit)),
    )


def _each_takes_its_own(
    model: nn.Module, example: Any, lists: ExpertLists, spaces: Sequence[UnitSpace], name: str
) -> bool:
    """Whether the experts of a list see as many tokens as before when one is removed.

    So it is where experts choose their tokens. It is tried if all of them saw equally many.
    """
    rows = lists.rows(name)
    if not rows[0] or len(set(rows)) > 1:
        return False
    space = next(space for space in spaces if any(part.tensor == name for part in space.slices))
    small = cut_units(model, [space], {space.name: _one_of_each_group(space)})
    fewer = ExpertLists(small, [space])
    try:
        with evaluating(small), torch.no_grad(), _watching_modules(Recorder(small, fewer, ()), fewer):
            call_checked(small, example)
    except FairprunerError:  # the model needs all of its experts
        return False
    return set(fewer.rows(name)) == set(rows)


def _one_of_each_group(space: UnitSpace) -> Ints:
    return removal_order(np.arange(space.size), space.groups)[: space.groups]


def _shared_out(cost: OperationCost, apart: Sequence[str], axes: dict[str, Axis]) -> OperationCost:
    """The cost of one operation; that of an expert with tokens of its own is 0 without this expert.

    Where each token goes to some experts only, the others take over the tokens of a removed expert, and the
    cost does not change.
    """
    if cost.expert is None or cost.expert[0] not in apart:
        return cost
    name, number = cost.expert
    return replace(cost, axes=(*cost.axes, axes[name].ids[[number]]))


@contextmanager
def _watching_modules(recorder: Recorder, experts: ExpertLists) -> Iterator[None]:
    """Record which modules are running, through global hooks, so that the user's model gets no hooks."""

    def enter(module: nn.Module, inputs: Any) -> None:
        recorder.running.append(module)
        experts.entered(module, inputs)

    def leave(*_: Any) -> None:
        recorder.running.pop()

    with hooked_modules(enter, leave, always_leave=True):
        yield
