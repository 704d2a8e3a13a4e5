"""What signals are shown of a batch: for each space, the values that its consumers read, as samples.

A sample is an input of the batch, or for texts one token that is no padding. Where each pixel has a class,
signals that compare classes see positions of maps as samples. Inside a list of experts a sample is a pair of
a token and an expert that the token was sent to.
"""

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
from fairpruner.models.features import mean_over_tokens
from fairpruner.models.precision import wide_dtype, widened
from fairpruner.models.reads import NotObservable, Read
from fairpruner.models.routing import RouterOutput
from fairpruner.scoring.signals.base import Accumulator, BatchInfo, Signal

PIXELS = 16  # positions along each side of a map that are samples


class RunningSignal(NamedTuple):
    """A signal that accumulates scores for the spaces of some kinds."""

    selection: str  # the name of the selection that it belongs to
    signal: Signal
    kinds: tuple[Kind, ...]
    accumulator: Accumulator


class GateInput(NamedTuple):
    """What a weight read, as a tensor whose gradient flows through this weight alone."""

    read: Read
    tensor: Tensor
    axis: int


class Showing:
    """Shows one batch to the running signals."""

    def __init__(self, batch: Batch, labels: Tensor | None, signals: Sequence[RunningSignal]) -> None:
        self._batch, self._labels, self._signals = batch, labels, signals

    def activation(self, read: Read, source: Tensor, axis: int) -> None:
        """Show what a weight read."""
        # The model may run in low precision under autocast; the signals do not.
        with torch.autocast(source.device.type, enabled=False):
            for pooled, signals in self._by_pooling(read.space):
                comparing = [running for running in signals if running.signal.compares_classes]
                others = [running for running in signals if not running.signal.compares_classes]
                if self._labels is not None and self._labels.ndim == 3 and comparing:
                    self._hand_over(read, *_pixels(read, source, axis, self._labels), comparing)
                    signals = others
                if signals:
                    self._hand_over(read, *self._samples(read, source, axis, pooled=pooled), signals)

    def expert_activations(
        self, inputs: Mapping[Read, Sequence[Tensor]], outputs: Sequence[RouterOutput]
    ) -> None:
        """Show what the experts of each list read: [rows, C] of every call of each of them."""
        texts = real_tokens(self._batch.inputs) is not None
        for space in dict.fromkeys(read.space for read in inputs):
            rows = {read: torch.cat(list(calls)) for read, calls in inputs.items() if read.space is space}
            places = {read: _places(read, outputs, self._batch, len(own)) for read, own in rows.items()}
            sample = torch.cat([sample[counted] for sample, counted in places.values()])  # [P]
            if not len(sample):
                continue
            with torch.autocast(sample.device.type, enabled=False):
                counted = {read: own[places[read][1]] for read, own in rows.items()}
                by_unit = [read.by_unit(own, -1, len(own)) for read, own in counted.items() if len(own)]
                activation = torch.cat(by_unit)  # [P, J, F]
                for pooled, signals in self._by_pooling(space):
                    shown, present = activation, sample
                    if pooled and texts:
                        shown, present = _means(activation, sample, self._batch.size)
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
        with torch.autocast(rows[0].device.type, enabled=False):
            for running in self._signals:
                if space.kind in running.kinds:
                    with _naming_signal(running.signal.name, space):
                        running.accumulator.see_block(space, unit, (rows[0], rows[1]), info)

    def _by_pooling(self, space: UnitSpace) -> Iterator[tuple[bool, list[RunningSignal]]]:
        """The signals that score the space: first those that see every token, then those that see means."""
        own = [running for running in self._signals if space.kind in running.kinds]
        for pooled in (False, True):
            found = [running for running in own if running.accumulator.pools_tokens == pooled]
            if found:
                yield pooled, found

    def _samples(
        self, read: Read, source: Tensor, axis: int, *, pooled: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The samples [N, J, F] and their labels; for texts every real token, or their mean if `pooled`."""
        # A model may be spread over several devices: what a weight reads is on the weight's device.
        labels, samples = None if self._labels is None else self._labels.to(source.device), self._batch.size
        real = real_tokens(self._batch.inputs, read.part.tensor)
        real = None if real is None else real.to(source.device)
        if real is not None and read.weight.ndim == 3:
            # Stacked experts read a token once for each expert that it was sent to.
            real = real.repeat_interleave(max(1, source.shape[0] // real.numel()), dim=1)
        if real is None or axis != -1 or source.shape[:-1].numel() != real.numel():
            if labels is None and source.shape[0] % samples:
                return read.by_unit(source, axis, source.shape[0]), None  # every row is a sample
            return read.by_unit(source, axis, samples), labels
        source = source.reshape(*real.shape, -1)  # [N, T, C]; some models fold texts and tokens into one dim
        if pooled:
            return read.by_unit(mean_over_tokens(source, real), axis, samples), labels
        rows = source[real]  # [tokens, C]
        repeated = None if labels is None else labels.repeat_interleave(real.sum(1), dim=0)
        return read.by_unit(rows, axis, len(rows)), repeated

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


def gate_terms(
    gates: Sequence[GateInput],
    gradients: Sequence[Tensor | None],
    outputs: Sequence[RouterOutput],
    *,
    batch: Batch,
    scale: int,
) -> dict[str, Tensor]:
    """<activation, gradient> of every sample and unit, summed over all weights that read it: space -> [N, J].

    The gradients are those of the mean loss over `scale` samples. Times `scale` they are the gradients of
    each sample's loss.
    """
    terms: dict[str, Tensor] = {}
    expert_terms: dict[Read, list[Tensor]] = {}  # [rows, J] of every call of an expert
    for (read, gate, axis), gradient in zip(gates, gradients, strict=True):
        if gradient is None or not gate.numel():
            continue
        pair = (gate.detach(), gradient.detach())
        if read.expert:
            activation, slope = (rows_along(t, axis) for t in pair)
            activation, slope = (read.by_unit(t, -1, len(t)) for t in (activation, slope))
        else:
            activation, slope = (read.by_unit(t, axis, batch.size) for t in pair)  # [N, J, F]
        term = (activation * slope).sum(2, dtype=wide_dtype(gate)) * scale
        if read.expert:
            expert_terms.setdefault(read, []).append(term)
        else:
            before = terms.get(read.space.name)
            terms[read.space.name] = term if before is None else before.to(term.device) + term
    for read, rows in expert_terms.items():
        term = torch.cat(rows)
        sample, _ = _places(read, outputs, batch, len(term))
        sums = terms.get(read.space.name, term.new_zeros(batch.size, term.shape[1]))
        terms[read.space.name] = sums.to(term.device).index_add(0, sample, term)
    return terms


def _pixels(read: Read, source: Tensor, axis: int, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The positions of a map as samples, [n, J, F], each with the class of its pixel, [n].

    Of a large map, PIXELS x PIXELS positions are taken, evenly spaced. The class is that of the nearest pixel
    of the label map [N, H, W]; positions on pixels without a class are left out.
    """
    maps = source.movedim(axis, -1)  # [N, h, w, C]; or [N, h w, C], or [N, C]
    if maps.ndim != 4:
        height = round((maps[0].numel() / maps.shape[-1] * labels.shape[1] / labels.shape[2]) ** 0.5)
        width = maps[0].numel() // maps.shape[-1] // max(height, 1)
        if len(maps) != len(labels) or maps[0].numel() != height * width * maps.shape[-1]:
            raise FairprunerError(
                f"Space {read.space.name!r} cannot be compared pixel by pixel: {read.part.tensor} reads"
                f" {list(source.shape)}, which is no map like the labels {list(labels.shape)}. Use a removal"
                " signal that needs no classes, for example removal='activation'."
            )
        maps = maps.reshape(len(maps), height, width, -1)
    rows, columns = (
        torch.linspace(0, size - 1, min(size, PIXELS), device=source.device).round().long()
        for size in maps.shape[1:3]
    )
    pixel_rows = (rows + 0.5).mul(labels.shape[1] / maps.shape[1]).long()
    pixel_columns = (columns + 0.5).mul(labels.shape[2] / maps.shape[2]).long()
    classes = labels.to(source.device)[:, pixel_rows][:, :, pixel_columns].flatten()
    samples = maps[:, rows][:, :, columns].flatten(0, 2)[classes >= 0]  # [n, C]
    return read.by_unit(samples, -1, max(len(samples), 1)), classes[classes >= 0]


def rows_along(tensor: Tensor, axis: int) -> Tensor:
    """A tensor with its channels last and all else in rows, [rows, C]."""
    return tensor.movedim(axis, -1).reshape(-1, tensor.shape[axis])


def _places(read: Read, outputs: Sequence[RouterOutput], batch: Batch, rows: int) -> tuple[Tensor, Tensor]:
    """The sample of every row that an expert of a list read, and whether the row counts, [rows] each.

    A row counts if its token is no padding and was sent to the expert with a weight other than 0.
    """
    assert read.expert is not None
    path, number = read.expert
    samples, counted = [], []
    for output in outputs:
        if output.block.experts == path:
            own = output.expert == number
            token, counts = output.token[own], output.weight[own] != 0
            real = real_tokens(batch.inputs, path)
            if real is not None and real.numel() == output.tokens:
                counts &= real.reshape(-1).to(token.device)[token]
            samples.append(token // max(1, output.tokens // batch.size))
            counted.append(counts)
    sample = torch.cat(samples)
    if len(sample) != rows or (rows and int(sample.max()) >= batch.size):
        raise NotObservable(
            read.space.name,
            f"Space {read.space.name!r} cannot be observed: {read.part.tensor} reads {rows} rows, and the"
            f" router's output assigns {len(sample)} rows to the {batch.size} samples. Leave it out with"
            f" skip={read.space.name!r} in discover.",
        )
    return sample, torch.cat(counted)


def _means(activation: Tensor, sample: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """The mean over the rows of each sample, [n, J, F], from rows [P, J, F] and the sample of each row, [P].

    The second result, [n], names the samples that have rows.
    """
    counts = torch.bincount(sample, minlength=samples)
    wide = widened(activation)
    sums = wide.new_zeros(samples, *wide.shape[1:]).index_add(0, sample, wide)
    present = counts.nonzero().squeeze(1)
    return sums[present] / counts[present, None, None], present


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
