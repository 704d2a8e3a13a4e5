"""Residual blocks in the calibration pass.

Signals see the stream before and after each block, or what the block adds and the gradient for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import Tensor, nn

from fairpruner.core.units import UnitSpace
from fairpruner.models.blocks import blocks_of_maps, watching_block_slopes, watching_blocks
from fairpruner.scoring.feeding import SignalFeed
from fairpruner.scoring.signals.base import BatchInfo


@contextmanager
def showing_blocks(
    model: nn.Module, spaces: Iterable[UnitSpace], feed: SignalFeed, info: BatchInfo
) -> Iterator[None]:
    """Inside, every forward pass shows signals the stream before and after each block of these spaces."""

    def show(
        space: UnitSpace, channels_first: frozenset[int], unit: int, before: Tensor, after: Tensor
    ) -> None:
        feed.streams(space, unit, (before, after), 1 if unit in channels_first else -1, info)

    with ExitStack() as stack:
        for space in spaces:
            visit = partial(show, space, blocks_of_maps(model, space))
            stack.enter_context(watching_blocks(model, space, visit))
        yield


@contextmanager
def showing_block_slopes(
    model: nn.Module, spaces: Iterable[UnitSpace], feed: SignalFeed, info: BatchInfo
) -> Iterator[None]:
    """Inside, every backward pass shows signals what each block added to its stream, and its gradient."""

    def show(space: UnitSpace, channels_first: frozenset[int], unit: int, *pair: Tensor) -> None:
        feed.block_slope(space, unit, (pair[0], pair[1]), 1 if unit in channels_first else -1, info)

    with ExitStack() as stack:
        for space in spaces:
            if space.kind == "block":
                visit = partial(show, space, blocks_of_maps(model, space))
                stack.enter_context(watching_block_slopes(model, space, visit))
        yield
