"""What one block of a cut model is called with, batch by batch, and what it should return.

With the block's output returned, the model should continue as the original does. Where the output is added
to a residual stream, z = block + r in the cut model and z* in the original, the block should return z* - r:
it then also undoes the error of the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fairpruner.inputs.batches import Batch, forward
from fairpruner.inputs.tokens import counted_rows
from fairpruner.models.calling import tensors_of
from fairpruner.models.experts import ExpertBlock
from fairpruner.models.precision import widened
from fairpruner.repair.interceptor import ADDITIONS
from fairpruner.repair.job import Job
from fairpruner.repair.regression import in_first_half

MOST_HELD = 2**30  # bytes of calls, so that only the block runs again where it is looked at several times


def caller_of(block: ExpertBlock) -> str:
    """The path of the module that calls the block's experts; empty for the model itself."""
    return block.experts.rpartition(".")[0]


@dataclass(frozen=True, eq=False)
class BlockCall:
    """What a block is called with in one batch, and what it should return."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Tensor  # [T, H]
    fitted: Tensor  # the rows that are fitted
    judging: Tensor  # the rows that judge the fit

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in tensors_of([self.args, self.kwargs, self.target]))


class BlockCalls:
    """The calls of a block, batch by batch; held from the first iteration on, as far as there is room."""

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
        target = widened(original.out)
        if original.sum is not None and ours.sum is not None:
            stream = widened(ours.sum) - widened(ours.out)
            target = widened(original.sum) - stream
        target = target.flatten(0, -2)
        rows = counted_rows(len(target), batch.inputs, self._path)
        first = in_first_half(rows, len(target), batch.size, batch.position)
        # A cache of keys would remember the block's first run.
        kwargs = {name: value for name, value in ours.kwargs.items() if name != "past_key_values"}
        halves = (rows[chosen].to(target.device) for chosen in (first, ~first))
        return BlockCall(ours.args, kwargs, target, *halves)


@dataclass(frozen=True, eq=False)
class _Observed:
    """What a block was called with, what it returned, and the sum that this was added into."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Tensor
    sum: Tensor | None


class _Seen(BaseException):
    """Ends a forward pass once enough was seen; no Exception, so that no handler on the way catches it."""


class _UntilAddition(TorchFunctionMode):
    """Runs a model until the output of a module is added to something."""

    def __init__(self) -> None:
        super().__init__()
        self.call: tuple[tuple[Any, ...], Mapping[str, Any], Tensor] | None = None
        self.sum: Tensor | None = None

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        self.call = args, kwargs, next(tensors_of(output))

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self.call is not None and function in ADDITIONS and not kwargs:
            out = self.call[2]
            if any(operand is out for operand in args):
                self.sum = torch.add(*args)  # never in place: the output is needed as it was
                raise _Seen
        return function(*args, **(kwargs or {}))


def _observe(model: nn.Module, path: str, batch: Batch) -> _Observed:
    run = _UntilAddition()
    hook = model.get_submodule(path).register_forward_hook(run.leave, with_kwargs=True)
    try:
        with run:
            forward(model, batch)
    except _Seen:
        pass
    finally:
        hook.remove()
    assert run.call is not None
    return _Observed(*run.call, run.sum)
