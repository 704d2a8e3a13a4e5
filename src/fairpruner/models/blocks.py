"""Residual blocks while a model runs: the stream before and after each, and the model without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fairpruner.core.units import Replacement, UnitSpace
from fairpruner.models.torch_private import AnyConvolution

# (unit, the stream before the block, the stream after it), or (unit, what it adds, the gradient for that)
BlockVisitor = Callable[[int, Tensor, Tensor], None]


@contextmanager
def watching_blocks(model: nn.Module, space: UnitSpace, visit: BlockVisitor) -> Iterator[None]:
    """Inside, every forward pass calls `visit` for each block of a space, through hooks on its modules."""
    with ExitStack() as stack:
        for unit in range(space.size):
            watch = _BlockWatch(space, unit, visit)
            first, last = (model.get_submodule(part.module) for part in (watch.first, watch.last))
            stack.callback(first.register_forward_pre_hook(watch.enter, with_kwargs=True).remove)
            stack.callback(last.register_forward_hook(watch.leave).remove)
        yield


class _BlockWatch:
    """Shows one block to a visitor, when its last module has run."""

    def __init__(self, space: UnitSpace, unit: int, visit: BlockVisitor) -> None:
        self.first, self.last = _ends(space, unit)
        self._unit, self._visit = unit, visit
        self._before: Tensor | None = None

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._before = _given(self.first, args, kwargs).detach()

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        before, self._before = self._before, None
        assert before is not None  # the first module of a block runs before its last
        result = _tensor(output).detach()
        self._visit(self._unit, before, result if self.last.by == "input" else before + result)


@contextmanager
def watching_block_slopes(model: nn.Module, space: UnitSpace, visit: BlockVisitor) -> Iterator[None]:
    """Inside, the backward pass of every forward pass calls `visit` for each block.

    `visit` gets what the block added to its stream, and the gradient for it.
    """
    with ExitStack() as stack:
        for unit in range(space.size):
            _, last = _ends(space, unit)

            def leave(
                module: nn.Module,
                args: Any,
                kwargs: Any,
                output: Any,
                unit: int = unit,
                last: Replacement = last,
            ) -> None:
                result = _tensor(output)
                added = result.detach()
                if last.by == "input":  # the module returns the stream behind the block
                    added = added - _given(last, args, kwargs).detach()
                if result.requires_grad:
                    result.register_hook(lambda slope: visit(unit, added, slope.detach()))

            handle = model.get_submodule(last.module).register_forward_hook(leave, with_kwargs=True)
            stack.callback(handle.remove)
        yield


@contextmanager
def without_block(model: nn.Module, space: UnitSpace, unit: int) -> Iterator[None]:
    """Inside, one block of this model adds zero to its stream; the model is not copied."""
    _, last = _ends(space, unit)

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        result = _given(last, args, kwargs) if last.by == "input" else torch.zeros_like(_tensor(output))
        return (result, *output[1:]) if isinstance(output, (tuple, list)) else result

    with model.get_submodule(last.module).register_forward_hook(leave, with_kwargs=True):
        yield


def blocks_of_maps(model: nn.Module, space: UnitSpace) -> frozenset[int]:
    """The blocks that convolve: the channels of their streams are dim 1."""
    convolutions = {path for path, module in model.named_modules() if isinstance(module, AnyConvolution)}
    return frozenset(
        int(part.owner[0]) for part in space.slices if part.tensor.rpartition(".")[0] in convolutions
    )


def _ends(space: UnitSpace, unit: int) -> tuple[Replacement, Replacement]:
    """The modules of a block that run first and last; they are listed in the order of the forward pass."""
    parts = [part for part in space.replaced if part.units == (unit,)]
    return parts[0], parts[-1]


def _given(part: Replacement, args: Any, kwargs: Any) -> Tensor:
    """The argument through which a module reads the stream."""
    given: Tensor = kwargs[part.argument] if isinstance(part.argument, str) else args[part.argument]
    return given


def _tensor(output: Any) -> Tensor:
    """The tensor that a module returned, alone or first in a tuple."""
    found: Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return found
