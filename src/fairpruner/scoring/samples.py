"""What signals are shown of a batch: for each space what its consumers read, as samples.

A sample is an input, or of texts a real token. Inside listed experts it is a pair of a token and an
expert that it was sent to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from fairpruner.core.spaces import Kind, UnitSpace
from fairpruner.errors import FairprunerError
from fairpruner.inputs.batches import Batch
from fairpruner.inputs.tokens import real_tokens
from fairpruner.models.observing import NotObservable, Read, mean_over_tokens
from fairpruner.models.routing import RouterOutput
from fairpruner.scoring.signals.base import Accumulator, BatchInfo, Signal


class RunningSignal(NamedTuple):
    """A signal at work on the spaces of some kinds."""

    name: str  # of what was asked for, to which it belongs
    signal: Signal
    kinds: tuple[Kind, ...]
    accumulator: Accumulator


def show(
    read: Read, source: Tensor, axis: int, labels: Tensor, batch: Batch, parts: Sequence[RunningSignal]
) -> None:
    """Show what a weight reads to the signals that score its space."""
    with torch.autocast(
        source.device.type, enabled=False
    ):  # the model may run in low precision, the signals do not
        for pooled, some in _by_pooling(read.space, parts):
            _hand_over(read, *_seen(read, source, axis, labels, batch, pooled=pooled), batch, some)


def show_experts(
    parted: Mapping[Read, Sequence[Tensor]],
    calls: Sequence[RouterOutput],
    labels: Tensor,
    batch: Batch,
    parts: Sequence[RunningSignal],
) -> None:
    """Show what the experts of each list read, [rows, C] in every call of each."""
    texts = real_tokens(batch.inputs) is not None
    for space in dict.fromkeys(read.space for read in parted):
        own = {read: torch.cat(list(rows)) for read, rows in parted.items() if read.space is space}
        read = next(iter(own))
        places = [_places(read, calls, batch, len(rows)) for read, rows in own.items()]
        sample = torch.cat([sample[counted] for sample, counted in places])  # [P]
        if not len(sample):
            continue
        with torch.autocast(sample.device.type, enabled=False):
            chosen = [
                (read, rows[counted])
                for (read, rows), (_, counted) in zip(own.items(), places, strict=True)
                if counted.any()
            ]
            # [P, J, F]
            activation = torch.cat([read.by_unit(rows, -1, len(rows)) for read, rows in chosen])
            for pooled, some in _by_pooling(space, parts):
                shown, present = (
                    _means(activation, sample, batch.size) if pooled and texts else (activation, sample)
                )
                _hand_over(read, shown, labels[present], batch, some)


def gate_terms(
    gates: Sequence[tuple[Read, Tensor, int]],
    gradients: Sequence[Tensor | None],
    calls: Sequence[RouterOutput],
    batch: Batch,
    info: BatchInfo,
) -> dict[str, Tensor]:
    """<activation, gradient of each sample's own loss> of every unit, over all that read it: space -> [N,
    J].
    """
    terms: dict[str, Tensor] = {}
    parted: dict[Read, list[Tensor]] = {}  # [rows, J] of every call of an expert
    for (read, gate, axis), gradient in zip(gates, gradients, strict=True):
        if gradient is None:
            continue
        samples = gate.numel() // gate.shape[axis] if read.expert else batch.size
        if samples:
            shown = (rows_along(t.detach(), axis) if read.expert else t.detach() for t in (gate, gradient))
            activation, slope = (
                read.by_unit(t, -1 if read.expert else axis, samples) for t in shown
            )  # [N, J, F]
            term = (activation * slope).sum(
                2, dtype=torch.float64 if gate.dtype == torch.float64 else torch.float32
            ) * info.samples
            if read.expert:
                parted.setdefault(read, []).append(term)
            else:
                terms[read.space.name] = terms[read.space.name] + term if read.space.name in terms else term
    for read, rows in parted.items():
        term = torch.cat(rows)
        sample, _ = _places(read, calls, batch, len(term))
        terms[read.space.name] = terms.get(
            read.space.name, term.new_zeros(batch.size, term.shape[1])
        ).index_add(0, sample, term)
    return terms


def rows_along(tensor: Tensor, axis: int) -> Tensor:
    """A tensor with its channels last and all else in rows, [rows, C]."""
    return tensor.movedim(axis, -1).reshape(-1, tensor.shape[axis])


def _by_pooling(
    space: UnitSpace, parts: Sequence[RunningSignal]
) -> Iterator[tuple[bool, Iterator[RunningSignal]]]:
    return groupby(sorted((part for part in parts if space.kind in part.kinds), key=_pools), key=_pools)


def _pools(part: RunningSignal) -> bool:
    return part.accumulator.pools_tokens


def _seen(
    read: Read, source: Tensor, axis: int, labels: Tensor, batch: Batch, *, pooled: bool
) -> tuple[Tensor, Tensor]:
    """What a signal is shown, [N, J, F], and the labels: of texts, each real token is a sample, or if
    `pooled` their mean; padding is never seen.
    """
    real = real_tokens(batch.inputs, read.part.tensor)
    if (
        real is not None and read.weight.ndim == 3
    ):  # stacked experts read a token once for each that it was sent to
        real = real.repeat_interleave(max(1, source.shape[0] // real.numel()), dim=1)
    if real is None or axis != -1 or source.shape[:-1].numel() != real.numel():
        return read.by_unit(source, axis, batch.size), labels
    source = source.reshape(*real.shape, -1)  # [N, T, C]; some models fold texts and tokens into one dim
    if pooled:
        return read.by_unit(mean_over_tokens(source, real), axis, batch.size), labels
    rows = source[real]  # [tokens, C]
    return read.by_unit(rows, axis, len(rows)), labels.repeat_interleave(real.sum(1), dim=0)


def _places(read: Read, calls: Sequence[RouterOutput], batch: Batch, rows: int) -> tuple[Tensor, Tensor]:
    """The sample of every row that a listed expert read, and whether the row counts: it is no padding,
    and was sent there; [rows] each.
    """
    assert read.expert is not None
    path, number = read.expert
    samples, counted = [], []
    for call in calls:
        if call.block.experts == path:
            own = call.expert == number
            token, counts = call.token[own], call.weight[own] != 0
            real = real_tokens(batch.inputs, path)
            if real is not None and real.numel() == call.tokens:
                counts &= real.reshape(-1).to(token.device)[token]
            samples.append(token // max(1, call.tokens // batch.size))
            counted.append(counts)
    sample = torch.cat(samples)
    if len(sample) != rows or (rows and int(sample.max()) >= batch.size):
        raise NotObservable(
            read.space.name,
            f"Space {read.space.name!r} cannot be observed: {read.part.tensor} reads {rows} rows, of which"
            f" {len(sample)} could be told which of the {batch.size} samples they belong to. Leave it out"
            f" with skip={read.space.name!r} in discover.",
        )
    return sample, torch.cat(counted)


def _means(activation: Tensor, sample: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """The mean over the rows of each sample that has some, and which these are: [P, J, F] -> [n, J, F]
    and [n].
    """
    counts = torch.bincount(sample, minlength=samples)
    wide = activation if activation.dtype == torch.float64 else activation.float()
    sums = wide.new_zeros(samples, *wide.shape[1:]).index_add(0, sample, wide)
    present = counts.nonzero().squeeze(1)
    return sums[present] / counts[present, None, None], present


def _hand_over(
    read: Read, activation: Tensor, labels: Tensor, batch: Batch, parts: Iterable[RunningSignal]
) -> None:
    # The sum is quick and shows nearly every flaw; only if it looks bad are all values examined.
    if not torch.isfinite(activation.sum()) and not torch.isfinite(activation).all():
        raise FairprunerError(
            f"Space {read.space.name!r} has NaN or infinite activations in batch {batch.position}: look at"
            f" that batch and at the weights before {read.part.tensor}."
        )
    for part in parts:
        with _blaming(part.signal.name, read.space):
            part.accumulator.see_activation(read.space, activation, labels)


@contextmanager
def _blaming(signal: str, space: UnitSpace) -> Iterator[None]:
    """An own signal's failure told as such: it comes up inside the model's forward, which is not to
    blame.
    """
    try:
        yield
    except FairprunerError:
        raise
    except Exception as error:
        raise FairprunerError(
            f"Signal {signal!r} failed on space {space.name!r}: {type(error).__name__}: {error}"
        ) from error
