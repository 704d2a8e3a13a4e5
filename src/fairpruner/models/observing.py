"""Seeing what consumers read: the input tensors of the weights that read a space's units, without hooks
on the model.

A torch-function mode recognises calls (module or functional alike) whose weight is a watched parameter.
Only a weight that no such call shows, for example one computed by a parametrization, is watched by a hook
on its module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from fairpruner.core.arrays import Ints
from fairpruner.core.spaces import Slice, UnitSpace
from fairpruner.errors import FairprunerError


class NotObservable(FairprunerError):
    """Signals cannot look at a space, or at a block of experts, of this name."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


def consumed(rows: Tensor, weight: Tensor) -> Tensor:
    """The rows, [rows, I], as they are: tells whoever watches that weights [E, out, I] read them."""
    if has_torch_function((rows, weight)):
        seen: Tensor = handle_torch_function(consumed, (rows, weight), rows, weight)
        return seen
    return rows


class Reader(NamedTuple):
    """Where a torch function has its input and its weight, the input's channel axis, and the weight's dim
    that reads it.
    """

    source: tuple[int, str]
    weight: tuple[int, str]
    axis: int
    dim: int


_FIRST_TWO = ((0, "input"), (1, "weight"))
_MATMUL = Reader((0, "input"), (1, "other"), -1, 0)
_MM = Reader((0, "input"), (1, "mat2"), -1, 0)
_ADDMM = Reader((1, "mat1"), (2, "mat2"), -1, 0)
READERS: dict[Callable[..., Any], Reader] = {
    F.linear: Reader(*_FIRST_TWO, axis=-1, dim=1),
    **{f: Reader(*_FIRST_TWO, axis=1, dim=1) for f in (F.conv1d, F.conv2d, F.conv3d)},
    **{
        f: Reader(*_FIRST_TWO, axis=1, dim=0)
        for f in (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
    },
    torch.matmul: _MATMUL,
    torch.Tensor.matmul: _MATMUL,
    torch.mm: _MM,
    torch.Tensor.mm: _MM,
    torch.addmm: _ADDMM,
    torch.Tensor.addmm: _ADDMM,
    consumed: Reader(*_FIRST_TWO, axis=-1, dim=2),
}


@dataclass(frozen=True, eq=False)
class Read:
    """One weight dimension that reads units of one space."""

    space: UnitSpace
    part: Slice
    weight: nn.Parameter
    expert: tuple[str, int] | None = (
        None  # the list of experts that all hold a part of the space, and the one whose weight this is
    )
    _tables: dict[int, Tensor | None] = field(
        default_factory=dict
    )  # channels -> positions of each unit, None where they lie in order

    def fits(self, channels: int) -> bool:
        return channels % self.part.owner.size == 0

    def owner(self, channels: int) -> Ints:
        """The unit of each channel of the input; groups of a grouped convolution repeat the weight's own."""
        return np.tile(self.part.owner, channels // self.part.owner.size)

    def by_unit(self, source: Tensor, axis: int, samples: int) -> Tensor:
        """The input as [N, J, F], F features to each unit; a view wherever the units lie in order."""
        if source.ndim < (self.weight.ndim if axis == 1 else 2):  # called without a batch dimension
            source = source.unsqueeze(0)
        if source.shape[0] % samples:
            raise NotObservable(
                self.space.name,
                f"Space {self.space.name!r}: {self.part.tensor} reads {list(source.shape)}, whose dim 0 is no"
                f" multiple of the {samples} samples of the batch. Leave it out with"
                f" skip={self.space.name!r}.",
            )
        channels = source.shape[axis]
        # What a model folds into dim 0 (windows, tokens) are features of the sample it came from: [N, C,
        # positions].
        flat = (
            source.view(samples, -1, *source.shape[1:]).movedim(axis if axis < 0 else axis + 1, 1).flatten(2)
        )
        if channels not in self._tables:
            self._tables[channels] = _table(self.owner(channels), self.space.size)
        table = self._tables[channels]
        if table is not None:
            if (
                int(table.max()) == channels
            ):  # this position stands for "none": a feature that is zero in every sample
                flat = F.pad(flat, (0, 0, 0, 1))
            flat = flat.index_select(1, table.to(flat.device))
        return flat.reshape(samples, self.space.size, -1)


def _table(owner: Ints, size: int) -> Tensor | None:
    """Channel positions of unit 0, then of unit 1, …, all padded to one length; None where that is the
    order already.
    """
    positions = positions_of(owner, size).reshape(-1)
    return (
        None
        if np.array_equal(positions, np.arange(owner.size))
        else torch.from_numpy(np.where(positions < 0, owner.size, positions))
    )


def positions_of(owner: Ints, size: int) -> Ints:
    """Which indices each unit owns, [J, most], in order and padded with -1."""
    owned = np.flatnonzero(owner >= 0)
    order = owned[np.argsort(owner[owned], kind="stable")]
    counts = np.bincount(owner[owned], minlength=size)
    table = np.full((size, counts.max()), -1, dtype=np.int64)
    table[np.arange(counts.max()) < counts[:, None]] = order
    return table


InputVisitor = Callable[[Read, Tensor, int], Tensor]  # (read, input, channel axis) -> the input to go on with


class _Watch(TorchFunctionMode):
    """Shows `visit` every input that a watched weight reads."""

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
        kwargs = dict(kwargs or {})
        reader = READERS.get(function)
        if reader is None:
            return function(*args, **kwargs)
        weight, source = _argument(args, kwargs, reader.weight), _argument(args, kwargs, reader.source)
        if isinstance(weight, Tensor) and isinstance(source, Tensor):
            base = weight if weight._base is None else weight._base
            turned = (
                weight.ndim == base.ndim and weight.ndim > 1 and weight.stride() != base.stride()
            )  # a transposed view reads along the other dim
            dim = 2 * weight.ndim - 3 - reader.dim if turned else reader.dim
            for read in self._reads.get(id(base), ()):
                if read.part.dim == dim and read.fits(source.shape[reader.axis]):
                    source = self._visit(read, source, reader.axis)
            args, kwargs = _replaced(args, kwargs, reader.source, source)
        return function(*args, **kwargs)


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], where: tuple[int, str]) -> Any:
    position, name = where
    return args[position] if len(args) > position else kwargs.get(name)


def _replaced(
    args: Sequence[Any], kwargs: dict[str, Any], where: tuple[int, str], value: Any
) -> tuple[Sequence[Any], dict[str, Any]]:
    position, name = where
    if len(args) > position:
        return (*args[:position], value, *args[position + 1 :]), kwargs
    return args, {**kwargs, name: value}


@contextmanager
def watching(reads: Iterable[Read], visit: InputVisitor, hooked: Mapping[Read, nn.Module]) -> Iterator[None]:
    """Inside, every forward shows `visit` what the weights read; reads in `hooked` are seen at the door
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
    """What reads the units of each space: all of it, or only what signals look at; `lists` are the paths
    of lists of experts.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = []
    for space in spaces:
        experts = _experts(space, lists)
        parts = observed_parts(space, lists) if observed_only else space.slices_of("read")
        found += [Read(space, part, parameters[part.tensor], experts.get(part)) for part in parts]
    return tuple(found)


def observed_parts(space: UnitSpace, lists: Collection[str] = ()) -> tuple[Slice, ...]:
    """What signals look at: the last that reads all units, or in a list of experts the last of each."""
    complete = {
        expert: part
        for part, expert in _experts(space, lists).items()
        if np.unique(part.owner[part.owner >= 0]).size == space.size
    }
    return tuple(complete.values()) or (space.observed,)


def _experts(space: UnitSpace, lists: Collection[str]) -> dict[Slice, tuple[str, int]]:
    """For a space that lies inside all experts of a list: the list and the number of the expert that each
    consumer belongs to.
    """
    parts = space.slices_of("read")
    found = {
        part: (path, int(part.tensor.removeprefix(f"{path}.").partition(".")[0]))
        for part in parts
        for path in lists
        if part.tensor.startswith(f"{path}.")
    }
    return found if len(found) == len(parts) and len(set(found.values())) > 1 else {}


def find_hooks(model: nn.Module, reads: Sequence[Read], run: Callable[[], Any]) -> dict[Read, nn.Module]:
    """The reads that only a hook can see, found by calling `run`, which runs the model; an error where
    not even that can.
    """
    unseen = _unseen(reads, {}, run)
    reached = {read.space for read in reads if read not in unseen}
    idle = [
        read for read in unseen if read.expert and read.space in reached
    ]  # an expert that this sample does not use
    unseen = [read for read in unseen if read not in idle]
    stacks = [
        read
        for read in unseen
        if read.weight.ndim == 3
        and read.part.dim > 0
        and not isinstance(_holder(model, read), nn.modules.conv._ConvNd)
    ]
    hooked = {read: _holder(model, read) for read in unseen}
    # The door of a module that holds stacked matrices does not show what the last of them read.
    blind = stacks or ([read for read in _unseen(reads, hooked, run) if read not in idle] if hooked else [])
    if blind:
        read = blind[0]
        raise NotObservable(
            read.space.name,
            f"Space {read.space.name!r} cannot be observed: no call was seen in which {read.part.tensor}"
            f" reads its {read.space.size} units. Leave it out with skip={read.space.name!r} in discover, or"
            " score it by its weights, as removal='l2' does.",
        )
    return hooked


def _unseen(reads: Sequence[Read], hooked: Mapping[Read, nn.Module], run: Callable[[], Any]) -> list[Read]:
    seen: set[Read] = set()

    def visit(read: Read, source: Tensor, axis: int) -> Tensor:
        seen.add(read)
        return source

    with watching(reads, visit, hooked):
        run()
    return [read for read in reads if read not in seen]


def _holder(model: nn.Module, read: Read) -> nn.Module:
    tensor = read.part.tensor
    return model.get_submodule(
        tensor.split(".parametrizations.")[0] if ".parametrizations." in tensor else tensor.rpartition(".")[0]
    )


class LastInput(TorchFunctionMode):
    """Remembers the input of the last convolution or matrix product of a forward, as features [N, C]."""

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
        reader = READERS.get(function)
        if reader is not None:
            self._last = (_argument(args, kwargs or {}, reader.source), reader.axis)
        return function(*args, **(kwargs or {}))

    def features(self, samples: int, real: Tensor | None = None) -> Tensor:
        """The penultimate features of each sample, averaged over positions, of texts over the `real`
        tokens [N, T]: [N, C].
        """
        if self._last is None or self._last[0].shape[0] != samples:
            raise FairprunerError(
                "The model has no last linear call that reads one row of features for each sample, so its"
                " classes cannot be grouped. Leave out groups=."
            )
        source, axis = self._last
        if real is not None and source.shape[:-1] == real.shape:
            return mean_over_tokens(source.detach(), real)
        return source.detach().movedim(axis, 1).flatten(2).mean(2) if source.ndim > 2 else source.detach()


def mean_over_tokens(source: Tensor, real: Tensor) -> Tensor:
    """The mean over the real tokens of each text, [N, T, C] -> [N, C]."""
    source = source if source.dtype == torch.float64 else source.float()
    weights = real.to(source) / real.sum(1, keepdim=True).clamp(min=1)  # [N, T]
    return torch.bmm(weights.unsqueeze(1), source).squeeze(1)
