"""What reaches one block of a cut model, batch by batch, and what the block should give so that the model
goes on as the original does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fairpruner.inputs.batches import Batch, forward
from fairpruner.inputs.tokens import counted_rows
from fairpruner.models.calling import tensors_of
from fairpruner.models.experts import ExpertBlock
from fairpruner.repair.products import SUMS
from fairpruner.repair.regression import first_half, wide

MOST_HELD = (
    2**30
)  # bytes of what reaches a block, so that only the block runs again where it is looked at several times

Sweep = Callable[[], Iterable[Batch]]  # reads the data once more


def caller_of(block: ExpertBlock) -> str:
    """The path of the module that calls the block's experts; empty for the model itself."""
    return block.experts.rpartition(".")[0]


@dataclass(frozen=True, eq=False)
class Arrival:
    """What a block is called with in a batch, what it should give, and the rows that count: to fit, and
    to prove.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    wanted: Tensor  # [T, H]
    halves: tuple[Tensor, Tensor]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in tensors_of([self.args, self.kwargs, self.wanted]))


class Arrivals:
    """What reaches the module that calls a block's experts, batch by batch; held from the first time on
    as far as there is room.
    """

    def __init__(self, small: nn.Module, model: nn.Module, block: ExpertBlock, sweep: Sweep) -> None:
        self._small, self._model, self._path, self._sweep = small, model, caller_of(block), sweep
        self._held: dict[int, Arrival] = {}
        self._room = MOST_HELD

    def __iter__(self) -> Iterator[Arrival]:
        for batch in self._sweep():
            arrival = self._held.get(batch.position)
            if arrival is None:
                arrival = self._made(batch)
                if arrival.bytes <= self._room:
                    self._held[batch.position] = arrival
                    self._room -= arrival.bytes
            yield arrival

    def _made(self, batch: Batch) -> Arrival:
        target, here = _reach(self._model, self._path, batch), _reach(self._small, self._path, batch)
        wanted = (
            wide(target.sum) - (wide(here.sum) - wide(here.out))
            if target.sum is not None and here.sum is not None
            else wide(target.out)
        ).flatten(0, -2)
        rows = counted_rows(len(wanted), batch.inputs, self._path)
        first = first_half(rows, len(wanted), batch.size, batch.position)
        kwargs = {
            name: value for name, value in here.kwargs.items() if name != "past_key_values"
        }  # a cache would remember the block's first run
        return Arrival(
            here.args, kwargs, wanted, (rows[first].to(wanted.device), rows[~first].to(wanted.device))
        )


@dataclass(frozen=True, eq=False)
class _Call:
    """What a block was called with, what it gave, and what became of that in the sum behind it."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Tensor
    sum: Tensor | None


class _Reached(BaseException):
    """Ends a forward pass of which no more is needed; no error, so that nothing on the way takes it for
    one.
    """


class _UpTo(TorchFunctionMode):
    """Runs a model as far as the sum into which a module's output goes."""

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
        if (
            self.call is not None
            and function in SUMS
            and not kwargs
            and any(operand is self.call[2] for operand in args)
        ):
            self.sum = torch.add(*args)  # never in place: the output is needed as it was
            raise _Reached
        return function(*args, **(kwargs or {}))


def _reach(model: nn.Module, path: str, batch: Batch) -> _Call:
    run = _UpTo()
    hook = model.get_submodule(path).register_forward_hook(run.leave, with_kwargs=True)
    try:
        with run:
            forward(model, batch)
    except _Reached:
        pass
    finally:
        hook.remove()
    assert run.call is not None
    return _Call(*run.call, run.sum)
