"""The inputs of one block of a cut model, batch by batch, and the output that it should return.

The block should return what lets the model continue as the original does. If its output is added to a
residual stream r, the cut model has z = block + r and the original has z*. Then the block should return
z* - r, which also corrects the error of the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fairpruner.inputs.batches import Batch, forward
from fairpruner.inputs.tokens import counted_rows
from fairpruner.models.calling import tensors_of
from fairpruner.models.experts import ExpertBlock
from fairpruner.models.precision import in_float32
from fairpruner.models.torch_calls import TorchCalls
from fairpruner.repair.interceptor import ADDITIONS
from fairpruner.repair.job import Job
from fairpruner.repair.regression import in_first_half

MOST_HELD = 2**30  # bytes of calls, so that only the block runs again where it is looked at several times


def caller_of(block: ExpertBlock) -> str:
    """The path of the module that calls the block's experts; empty for the model itself."""
    return block.experts.rpartition(".")[0]


@dataclass(frozen=True, eq=False)
class BlockCall:
    """The arguments of a block in one batch, and the output that it should return."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Tensor  # [T, H]
    fitted: Tensor  # the rows that are fitted
    judging: Tensor  # the rows that judge the fit

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in tensors_of([self.args, self.kwargs, self.target]))


class BlockCalls:
    """The calls of a block, batch by batch; the first iteration keeps them as far as there is room."""

    def __init__(self, job: Job, block: ExpertBlock) -> None:
        self._job, self._path = job, caller_of(block)
        self._held: dict[int, BlockCall] = {}
        self._room = MOST_HELD

    def __iter__(self) -> Iterator[BlockCall]:
        for batch in self._job.read():
            call = self._held.get(batch.position)
            if call is None:
                call = self._observed(batch)
                if call.bytes <= self._room:
                    self._held[batch.position] = call
                    self._room -= call.bytes
            yield call

    def _observed(self, batch: Batch) -> BlockCall:
        original, ours = (_observe(m, self._path, batch) for m in (self._job.model, self._job.small))
        target = in_float32(original.out)
        if original.sum is not None and ours.sum is not None:
            stream = in_float32(ours.sum) - in_float32(ours.out)
            target = in_float32(original.sum) - stream
        target = target.flatten(0, -2)
        rows = counted_rows(len(target), batch.inputs, self._path)
        first = in_first_half(rows, len(target), batch.size, batch.position)
        # A cache of keys would remember the block's first run.
        kwargs = {name: value for name, value in ours.kwargs.items() if name != "past_key_values"}
        halves = (rows[chosen].to(target.device) for chosen in (first, ~first))
        return BlockCall(ours.args, kwargs, target, *halves)


@dataclass(frozen=True, eq=False)
class _Observed:
    """The arguments and the output of a block, and the sum that its output was added into."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Tensor
    sum: Tensor | None


class _Seen(BaseException):
    """Ends a forward pass early; it is a BaseException, so that the model's handlers do not catch it."""


class _UntilAddition(TorchCalls):
    """Runs a model until the output of a module is added to something."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: tuple[tuple[Any, ...], Mapping[str, Any], Tensor] | None = None
        self.sum: Tensor | None = None

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        self.seen = args, kwargs, next(tensors_of(output))

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.seen is not None and function in ADDITIONS and not kwargs:
            out = self.seen[2]
            if any(operand is out for operand in args):
                self.sum = torch.add(*args)  # never in place: the output is needed as it was
                raise _Seen
        return function(*args, **kwargs)


def _observe(model: nn.Module, path: str, batch: Batch) -> _Observed:
    run = _UntilAddition()
    with (
        suppress(_Seen),
        model.get_submodule(path).register_forward_hook(run.leave, with_kwargs=True),
        run,
    ):
        forward(model, batch)
    assert run.seen is not None
    return _Observed(*run.seen, run.sum)
