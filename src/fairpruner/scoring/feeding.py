"""Giving the inputs of weights to signals: which signals get them, and in which form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from fairpruner.core.units import Kind, UnitSpace
from fairpruner.errors import FairprunerError
from fairpruner.inputs.batches import Batch
from fairpruner.inputs.tokens import real_tokens
from fairpruner.models.precision import without_autocast
from fairpruner.models.reads import Read
from fairpruner.models.routing import RouterOutput
from fairpruner.scoring.samples import (
    means_by_sample,
    pixel_samples,
    rows_along,
    samples_of,
    samples_of_rows,
)
from fairpruner.scoring.signals.base import Accumulator, BatchInfo, Signal


class RunningSignal(NamedTuple):
    """A signal that accumulates scores for the spaces of some kinds."""

    selection: str  # the name of the selection that it belongs to
    signal: Signal
    kinds: tuple[Kind, ...]
    accumulator: Accumulator


class SignalFeed:
    """Gives the activations of one batch to the running signals."""

    def __init__(self, batch: Batch, labels: Tensor | None, signals: Sequence[RunningSignal]) -> None:
        self._batch, self._labels, self._signals = batch, labels, signals

    def activation(self, read: Read, source: Tensor, axis: int) -> None:
        """Show what a weight read."""
        # The model may run in low precision under autocast; the signals do not.
        with without_autocast(source.device):
            for pooled, signals in self._by_pooling(read.space):
                comparing = [running for running in signals if running.signal.compares_classes]
                others = [running for running in signals if not running.signal.compares_classes]
                if self._labels is not None and self._labels.ndim == 3 and comparing:
                    self._hand_over(read, *pixel_samples(read, source, axis, self._labels), comparing)
                    signals = others
                if signals:
                    shown = samples_of(
                        read, source, axis, batch=self._batch, labels=self._labels, pooled=pooled
                    )
                    self._hand_over(read, *shown, signals)

    def expert_activations(
        self, inputs: Mapping[Read, Sequence[Tensor]], outputs: Sequence[RouterOutput]
    ) -> None:
        """Show what the experts of each list read: [rows, C] of every call of each of them."""
        texts = real_tokens(self._batch.inputs) is not None
        for space in dict.fromkeys(read.space for read in inputs):
            rows = {read: torch.cat(list(calls)) for read, calls in inputs.items() if read.space is space}
            places = {
                read: samples_of_rows(read, outputs, self._batch, len(own)) for read, own in rows.items()
            }
            sample = torch.cat([sample[counted] for sample, counted in places.values()])  # [P]
            if not len(sample):
                continue
            with without_autocast(sample.device):
                counted = {read: own[places[read][1]] for read, own in rows.items()}
                by_unit = [read.by_unit(own, -1, len(own)) for read, own in counted.items() if len(own)]
                activation = torch.cat(by_unit)  # [P, J, F]
                for pooled, signals in self._by_pooling(space):
                    shown, present = activation, sample
                    if pooled and texts:
                        shown, present = means_by_sample(activation, sample, self._batch.size)
                    labels = None if self._labels is None else self._labels.to(present.device)[present]
                    self._hand_over(next(iter(rows)), shown, labels, signals)

    def streams(
        self, space: UnitSpace, unit: int, streams: tuple[Tensor, Tensor], axis: int, info: BatchInfo
    ) -> None:
        """Show the stream before a residual block and after it; padding is left out."""
        rows = [rows_along(stream, axis) for stream in streams]
        real = real_tokens(self._batch.inputs)
        if real is not None and real.numel() == len(rows[0]):
            counted = real.reshape(-1).to(rows[0].device)
            rows = [own[counted] for own in rows]
        with without_autocast(rows[0].device):
            for running in self._signals:
                if space.kind in running.kinds:
                    with _naming_signal(running.signal.name, space):
                        running.accumulator.see_block(space, unit, (rows[0], rows[1]), info)

    def slope(self, read: Read, slope: Tensor, axis: int, info: BatchInfo) -> None:
        """Show the gradient of the summed loss for what a weight read."""
        rows = rows_along(slope.detach(), axis)
        by_unit = read.by_unit(rows, -1, len(rows))
        with without_autocast(rows.device):
            for running in self._signals:
                if read.space.kind in running.kinds:
                    with _naming_signal(running.signal.name, read.space):
                        running.accumulator.see_slope(read.space, by_unit, info)

    def block_slope(
        self, space: UnitSpace, unit: int, pair: tuple[Tensor, Tensor], axis: int, info: BatchInfo
    ) -> None:
        """Show what a residual block adds to its stream, and the gradient of the mean loss for it."""
        change, slope = (rows_along(tensor, axis) for tensor in pair)
        with without_autocast(change.device):
            for running in self._signals:
                if space.kind in running.kinds:
                    with _naming_signal(running.signal.name, space):
                        running.accumulator.see_block_slope(space, unit, (change, slope * info.samples), info)

    def _by_pooling(self, space: UnitSpace) -> Iterator[tuple[bool, list[RunningSignal]]]:
        """The signals that score the space: first those that see every token, then those that see means."""
        own = [running for running in self._signals if space.kind in running.kinds]
        for pooled in (False, True):
            found = [running for running in own if running.accumulator.pools_tokens == pooled]
            if found:
                yield pooled, found

    def _hand_over(
        self, read: Read, activation: Tensor, labels: Tensor | None, signals: Iterable[RunningSignal]
    ) -> None:
        """Give samples [N, J, F] to signals, refused if a value is NaN or infinite."""
        # The sum is quick to compute. All values are examined only if it is not finite.
        if not torch.isfinite(activation.sum()) and not torch.isfinite(activation).all():
            raise FairprunerError(
                f"Space {read.space.name!r} has NaN or infinite activations in batch {self._batch.position}:"
                f" look at that batch and at the weights before {read.part.tensor}."
            )
        for running in signals:
            with _naming_signal(running.signal.name, read.space):
                running.accumulator.see_activation(read.space, activation, labels)


@contextmanager
def _naming_signal(signal: str, space: UnitSpace) -> Iterator[None]:
    """Attribute a user signal's exception to that signal; it is raised inside the model's forward pass."""
    try:
        yield
    except FairprunerError:
        raise
    except Exception as error:
        raise FairprunerError(
            f"Signal {signal!r} failed on space {space.name!r}: {type(error).__name__}: {error}"
        ) from error
