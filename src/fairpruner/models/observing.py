"""Observing what weights read: the inputs of the operations that read a space's units.

A torch-function mode recognises the calls whose weight is a watched parameter. It needs no hooks on the
model, and it sees modules and functional calls in the same way. Only a weight that no such call shows, for
example one that a parametrization computes, is watched by a hook on its module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from fairpruner.models.reads import Read
from fairpruner.models.torch_calls import TorchCalls
from fairpruner.models.torch_private import base_of
from fairpruner.models.weight_operations import WEIGHT_OPERATIONS, WeightOperation


def consumed(rows: Tensor, weight: Tensor) -> Tensor:
    """The rows [rows, I] unchanged; the call shows observers that the weights [E, out, I] read them."""
    if has_torch_function((rows, weight)):
        seen: Tensor = handle_torch_function(consumed, (rows, weight), rows, weight)
        return seen
    return rows


OBSERVED_OPERATIONS: dict[Callable[..., Any], WeightOperation] = {
    **WEIGHT_OPERATIONS,
    consumed: WeightOperation(("input", "weight"), axis=-1, dim=2),
}


# (read, input, channel axis) -> the input that the operation then uses
InputVisitor = Callable[[Read, Tensor, int], Tensor]


class _Watch(TorchCalls):
    """Calls `visit` with every input that a watched weight reads."""

    def __init__(self, reads: Iterable[Read], visit: InputVisitor) -> None:
        super().__init__()
        self._visit = visit
        self._reads: dict[int, list[Read]] = {}
        for read in reads:
            self._reads.setdefault(id(read.weight), []).append(read)

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        operation = OBSERVED_OPERATIONS.get(function)
        if operation is None:
            return function(*args, **kwargs)
        source, weight = (operation.argument(name, args, kwargs) for name in ("input", "weight"))
        if isinstance(weight, Tensor) and isinstance(source, Tensor):
            base = base_of(weight)
            for read in self._reads.get(id(base), ()):
                along = read.part.dim == _reading_dim(operation, weight, base)
                if along and read.fits(source.shape[operation.axis]):
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
    """Inside, every forward pass calls `visit` with what the weights read.

    `hooked` holds the reads that only a hook shows, each with the module whose input is visited.
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
    """A hook that visits the first input of a module."""
    axis = 1 if read.weight.ndim >= 3 else -1

    def enter(module: nn.Module, args: tuple[Any, ...]) -> Any:
        if args and isinstance(args[0], Tensor) and read.fits(args[0].shape[axis]):
            return (visit(read, args[0], axis), *args[1:])
        return None

    return enter
