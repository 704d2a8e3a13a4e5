"""Observing what weights read: the inputs of the operations that read a space's units.

A torch-function mode recognises the calls whose weight is a watched parameter. It needs no hooks on the
model, and it sees modules and functional calls in the same way. Only a weight that no such call shows, for
example one that a parametrization computes, is watched by a hook on its module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from fairpruner.core.arrays import Ints
from fairpruner.core.units import Slice, UnitSpace
from fairpruner.errors import FairprunerError
from fairpruner.models.precision import widened
from fairpruner.models.torch_private import AnyConvolution, base_of
from fairpruner.models.weight_operations import WEIGHT_OPERATIONS, WeightOperation


class NotObservable(FairprunerError):
    """The activations of a space, or the routing of a block of experts, cannot be observed."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name  # of the space or block


def consumed(rows: Tensor, weight: Tensor) -> Tensor:
    """The rows [rows, I] unchanged; the call tells observers that the weights [E, out, I] read them."""
    if has_torch_function((rows, weight)):
        seen: Tensor = handle_torch_function(consumed, (rows, weight), rows, weight)
        return seen
    return rows


OBSERVED_OPERATIONS: dict[Callable[..., Any], WeightOperation] = {
    **WEIGHT_OPERATIONS,
    consumed: WeightOperation(("input", "weight"), axis=-1, dim=2),
}


@dataclass(frozen=True, eq=False)
class Read:
    """One weight dimension that reads the units of one space."""

    space: UnitSpace
    part: Slice
    weight: nn.Parameter
    # The path of a list of experts and the number of the expert that holds the weight, if each of them
    # holds a part of the space.
    expert: tuple[str, int] | None = None
    # Channels of the input -> the channel positions of unit 0, then of unit 1, …; None if already in order.
    _positions: dict[int, Tensor | None] = field(default_factory=dict)

    def fits(self, channels: int) -> bool:
        return channels % self.part.owner.size == 0

    def owner(self, channels: int) -> Ints:
        """The unit of each channel of the input; in a grouped convolution the weight's owners repeat."""
        return np.tile(self.part.owner, channels // self.part.owner.size)

    def by_unit(self, source: Tensor, axis: int, samples: int) -> Tensor:
        """The input as [N, J, F], F features of each unit; a view if the units lie in order."""
        if source.ndim < (self.weight.ndim if axis == 1 else 2):  # called without a batch dimension
            source = source.unsqueeze(0)
        if source.shape[0] % samples:
            raise NotObservable(
                self.space.name,
                f"Space {self.space.name!r} cannot be observed: {self.part.tensor} reads"
                f" {list(source.shape)}, whose dim 0 is no multiple of the {samples} samples of the batch."
                f" Leave it out with skip={self.space.name!r} in discover.",
            )
        channels = source.shape[axis]
        # A model may fold windows or tokens into dim 0: they are features of the sample they came from.
        folded = source.view(samples, -1, *source.shape[1:])
        flat = folded.movedim(axis if axis < 0 else axis + 1, 1).flatten(2)  # [N, C, positions]
        if channels not in self._positions:
            self._positions[channels] = _channel_positions(self.owner(channels), self.space.size)
        positions = self._positions[channels]
        if positions is not None:
            if int(positions.max()) == channels:  # a missing feature is read from an added channel of zeros
                flat = F.pad(flat, (0, 0, 0, 1))
            flat = flat.index_select(1, positions.to(flat.device))
        return flat.reshape(samples, self.space.size, -1)


def _channel_positions(owner: Ints, size: int) -> Tensor | None:
    """The channels of unit 0, then of unit 1, …, padded with C to one length; None if already in order."""
    positions = positions_of(owner, size).reshape(-1)
    if np.array_equal(positions, np.arange(owner.size)):
        return None
    return torch.from_numpy(np.where(positions < 0, owner.size, positions))


def positions_of(owner: Ints, size: int) -> Ints:
    """The indices that each unit owns, [J, most], in order and padded with -1.

    >>> positions_of(np.array([1, 0, 1]), 2).tolist()
    [[1, -1], [0, 2]]
    """
    owned = np.flatnonzero(owner >= 0)
    order = owned[np.argsort(owner[owned], kind="stable")]
    counts = np.bincount(owner[owned], minlength=size)
    table = np.full((size, counts.max()), -1, dtype=np.int64)
    table[np.arange(counts.max()) < counts[:, None]] = order
    return table


# (read, input, channel axis) -> the input that the operation goes on with
InputVisitor = Callable[[Read, Tensor, int], Tensor]


class _Watch(TorchFunctionMode):
    """Calls `visit` with every input that a watched weight reads."""

    def __init__(self, reads: Iterable[Read], visit: InputVisitor) -> None:
        super().__init__()
        self._visit = visit
        self._reads: dict[int, list[Read]] = {}
        for read in reads:
            self._reads.setdefault(id(read.weight), []).append(read)

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        operation = OBSERVED_OPERATIONS.get(function)
        if operation is None:
            return function(*args, **kwargs)
        source, weight = (operation.argument(name, args, kwargs) for name in ("input", "weight"))
        if isinstance(weight, Tensor) and isinstance(source, Tensor):
            base = base_of(weight)
            for read in self._reads.get(id(base), ()):
                if read.part.dim == _reading_dim(operation, weight, base) and read.fits(
                    source.shape[operation.axis]
                ):
                    source = self._visit(read, source, operation.axis)
            args, kwargs = operation.with_input(source, args, kwargs)
        return function(*args, **kwargs)


def _reading_dim(operation: WeightOperation, weight: Tensor, base: Tensor) -> int:
    """The dim of the stored weight that reads the input: a transposed view reads along the other one."""
    transposed = weight.ndim == base.ndim and weight.ndim > 1 and weight.stride() != base.stride()
    # Transposing swaps the last two dims, n-2 and n-1, whose sum is 2n-3.
    return 2 * weight.ndim - 3 - operation.dim if transposed else operation.dim


@contextmanager
def watching(reads: Iterable[Read], visit: InputVisitor, hooked: Mapping[Read, nn.Module]) -> Iterator[None]:
    """Inside, every forward calls `visit` with what the weights read; reads in `hooked` are seen as inputs
    of that module.
    """
    with ExitStack() as stack:
        for read, module in hooked.items():
            hook = module.register_forward_pre_hook(_hook(read, visit))
            stack.callback(hook.remove)
        by_call = [read for read in reads if read not in hooked]
        if by_call:
            stack.enter_context(_Watch(by_call, visit))
        yield


def _hook(read: Read, visit: InputVisitor) -> Callable[[nn.Module, tuple[Any, ...]], Any]:
    axis = 1 if read.weight.ndim >= 3 else -1

    def enter(module: nn.Module, args: tuple[Any, ...]) -> Any:
        if args and isinstance(args[0], Tensor) and read.fits(args[0].shape[axis]):
            return (visit(read, args[0], axis), *args[1:])
        return None

    return enter


def reads_of(
    model: nn.Module, spaces: Iterable[UnitSpace], *, observed_only: bool, lists: Collection[str] = ()
) -> tuple[Read, ...]:
    """The reads of each space: all of them, or only those that activation signals observe.

    `lists` holds the paths of the model's lists of experts.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = []
    for space in spaces:
        experts = _experts(space, lists)
        parts = observed_parts(space, lists) if observed_only else space.slices_of("read")
        found += [Read(space, part, parameters[part.tensor], experts.get(part)) for part in parts]
    return tuple(found)


def observed_parts(space: UnitSpace, lists: Collection[str] = ()) -> tuple[Slice, ...]:
    """What activation signals observe: the last slice that reads all units, or the last one of each expert
    if the space lies inside a list of experts.
    """
    complete = {
        expert: part
        for part, expert in _experts(space, lists).items()
        if np.unique(part.owner[part.owner >= 0]).size == space.size
    }
    return tuple(complete.values()) or (space.observed,)


def _experts(space: UnitSpace, lists: Collection[str]) -> dict[Slice, tuple[str, int]]:
    """Slice -> (list of experts, number of the expert), for a space that lies inside all experts of a list;
    empty for any other space.
    """
    parts = space.slices_of("read")
    found = {
        part: (path, int(part.tensor.removeprefix(f"{path}.").partition(".")[0]))
        for part in parts
        for path in lists
        if part.tensor.startswith(f"{path}.")
    }
    return found if len(found) == len(parts) and len(set(found.values())) > 1 else {}


@dataclass(frozen=True)
class Visibility:
    """Which reads need a hook, and the spaces that cannot be observed, each with the reason."""

    hooked: Mapping[Read, nn.Module]
    hidden: Mapping[str, str]


def find_visibility(
    model: nn.Module, reads: Sequence[Read], samples: int, run: Callable[[], Any]
) -> Visibility:
    """Call `run`, which runs the model on so many samples, to learn how every read can be observed."""
    by_call = _examine(reads, {}, samples, run)
    reached = {read.space for read in by_call}
    # A sample need not use every expert of a list.
    missing = [read for read in reads if read not in by_call and not (read.expert and read.space in reached)]
    hooked = {read: _holder(model, read) for read in missing if not _is_stack(model, read)}
    by_hook = _examine(list(hooked), hooked, samples, run) if hooked else {}
    seen = by_call | by_hook
    hidden = {read.space.name: _not_seen(read) for read in missing if read not in seen}
    hidden |= {read.space.name: problem for read, problem in seen.items() if problem}
    return Visibility(hooked, hidden)


def _examine(
    reads: Sequence[Read], hooked: Mapping[Read, nn.Module], samples: int, run: Callable[[], Any]
) -> dict[Read, str]:
    """The reads that `run` shows, each with the reason why it cannot be divided into samples, or ""."""
    seen: dict[Read, str] = {}

    def visit(read: Read, source: Tensor, axis: int) -> Tensor:
        if read not in seen:
            try:
                if not read.expert:  # an expert of a list reads the tokens that were sent to it
                    read.by_unit(source.detach(), axis, samples)
                seen[read] = ""
            except NotObservable as problem:
                seen[read] = str(problem)
        return source

    with watching(reads, visit, hooked):
        run()
    return seen


def _not_seen(read: Read) -> str:
    name = read.space.name
    return (
        f"Space {name!r} cannot be observed: no call was seen in which {read.part.tensor} reads its"
        f" {read.space.size} units. Leave it out with skip={name!r} in discover, or score it by its weights,"
        " as removal='l2' does."
    )


def _is_stack(model: nn.Module, read: Read) -> bool:
    """Whether the weight is a stack of matrices: the input of its module is not what the last one reads."""
    matrices = read.weight.ndim == 3 and read.part.dim > 0
    return matrices and not isinstance(_holder(model, read), AnyConvolution)


def _holder(model: nn.Module, read: Read) -> nn.Module:
    """The module that the weight belongs to; a parametrization's weight belongs to the outer module."""
    path, parametrized, _ = read.part.tensor.partition(".parametrizations.")
    return model.get_submodule(path if parametrized else path.rpartition(".")[0])


class LastInput(TorchFunctionMode):
    """Keeps the input of the last convolution or matrix product of a forward, as features [N, C]."""

    def __init__(self) -> None:
        super().__init__()
        self._last: tuple[Tensor, int] | None = None

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        operation = OBSERVED_OPERATIONS.get(function)
        if operation is not None:
            self._last = (operation.argument("input", args, kwargs or {}), operation.axis)
        return function(*args, **(kwargs or {}))

    def features(self, samples: int, real: Tensor | None = None) -> Tensor:
        """The penultimate features of each sample, [N, C]: the mean over positions, or over the `real`
        tokens [N, T] of each text.
        """
        if self._last is None or self._last[0].shape[0] != samples:
            raise FairprunerError(
                "The model's last linear operation does not read one row of features for each sample, so its"
                " classes cannot be grouped. Leave out groups=."
            )
        source, axis = self._last
        if real is not None and source.shape[:-1] == real.shape:
            return mean_over_tokens(source.detach(), real)
        return source.detach().movedim(axis, 1).flatten(2).mean(2) if source.ndim > 2 else source.detach()


def mean_over_tokens(source: Tensor, real: Tensor) -> Tensor:
    """The mean over the real tokens of each text, [N, T, C] -> [N, C]."""
    source = widened(source)
    weights = real.to(source) / real.sum(1, keepdim=True).clamp(min=1)  # [N, T]
    return torch.bmm(weights.unsqueeze(1), source).squeeze(1)
