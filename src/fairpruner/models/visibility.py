"""Whether and how every read of a model can be observed, from one or two forward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fairpruner.models.observing import watching
from fairpruner.models.reads import NotObservable, Read
from fairpruner.models.torch_private import AnyConvolution


@dataclass(frozen=True)
class Visibility:
    """Which reads need a hook, and the spaces that cannot be observed, each with the reason."""

    hooked: Mapping[Read, nn.Module]
    hidden: Mapping[str, str]


def find_visibility(
    model: nn.Module, reads: Sequence[Read], samples: int, run: Callable[[], Any]
) -> Visibility:
    """Call `run`, which runs the model on `samples` samples, to find how every read can be observed."""
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
    """The reason for a space that no observed call reads."""
    name = read.space.name
    return (
        f"Space {name!r} cannot be observed: no call was seen in which {read.part.tensor} reads its"
        f" {read.space.size} units. Leave it out with skip={name!r} in discover, or score it by its weights,"
        " as removal='l2' does."
    )


def _is_stack(model: nn.Module, read: Read) -> bool:
    """Whether the weight is a stack of matrices; then the input of its module is not what they read."""
    matrices = read.weight.ndim == 3 and read.part.dim > 0
    return matrices and not isinstance(_holder(model, read), AnyConvolution)


def _holder(model: nn.Module, read: Read) -> nn.Module:
    """The module that the weight belongs to; a parametrization's weight belongs to the outer module."""
    path, parametrized, _ = read.part.tensor.partition(".parametrizations.")
    return model.get_submodule(path if parametrized else path.rpartition(".")[0])
