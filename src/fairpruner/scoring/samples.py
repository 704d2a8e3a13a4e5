"""Samples: what a consumer of a space read in a batch, as [N, J, F], and the label of each sample.

A sample is an input of the batch, or for texts one token that is not padding. Where each pixel has a class,
signals that compare classes see positions of maps as samples. Inside a list of experts a sample is a pair of
a token and an expert that the token was sent to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fairpruner.errors import FairprunerError
from fairpruner.inputs.batches import Batch
from fairpruner.inputs.tokens import real_tokens
from fairpruner.models.features import mean_over_tokens
from fairpruner.models.precision import in_float32
from fairpruner.models.reads import NotObservable, Read
from fairpruner.models.routing import RouterOutput

PIXELS = 16  # positions along each side of a map that are samples


def samples_of(
    read: Read, source: Tensor, axis: int, *, batch: Batch, labels: Tensor | None, pooled: bool
) -> tuple[Tensor, Tensor | None]:
    """The samples [N, J, F] of what a weight read, and their labels.

    Of texts, every real token is a sample, or the mean of the real tokens of each text if `pooled`.
    """
    # A model may be spread over several devices: what a weight reads is on the weight's device.
    labels = None if labels is None else labels.to(source.device)
    real = _real_tokens(read, source, batch)
    if real is None or axis != -1 or source.shape[:-1].numel() != real.numel():
        if labels is None and source.shape[0] % batch.size:
            return read.by_unit(source, axis, source.shape[0]), None  # every row is a sample
        return read.by_unit(source, axis, batch.size), labels
    source = source.reshape(*real.shape, -1)  # [N, T, C]; some models fold texts and tokens into one dim
    if pooled:
        return read.by_unit(mean_over_tokens(source, real), axis, batch.size), labels
    rows = source[real]  # [tokens, C]
    repeated = None if labels is None else labels.repeat_interleave(real.sum(1), dim=0)
    return read.by_unit(rows, axis, len(rows)), repeated


def _real_tokens(read: Read, source: Tensor, batch: Batch) -> Tensor | None:
    """Which rows that a weight read are not padding, bool [N, rows of a text]; None for other data."""
    real = real_tokens(batch.inputs, read.part.tensor)
    if real is None:
        return None
    if read.weight.ndim == 3:
        # Stacked experts read a token once for each expert that it was sent to.
        real = real.repeat_interleave(max(1, source.shape[0] // real.numel()), dim=1)
    return real.to(source.device)


def pixel_samples(read: Read, source: Tensor, axis: int, labels: Tensor) -> tuple[Tensor, Tensor]:
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
                f" {list(source.shape)}, which is not a map like the labels {list(labels.shape)}. Use a"
                " removal signal that needs no classes, for example removal='activation'."
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


def samples_of_rows(
    read: Read, outputs: Sequence[RouterOutput], batch: Batch, rows: int
) -> tuple[Tensor, Tensor]:
    """The sample of every row that an expert of a list read, and whether the row counts, [rows] each.

    A row counts if its token is not padding and was sent to the expert with a weight other than 0.
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


def means_by_sample(activation: Tensor, sample: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """The mean over the rows of each sample, [n, J, F], from rows [P, J, F] and the sample of each row, [P].

    The second result, [n], names the samples that have rows.
    """
    counts = torch.bincount(sample, minlength=samples)
    wide = in_float32(activation)
    sums = wide.new_zeros(samples, *wide.shape[1:]).index_add(0, sample, wide)
    present = counts.nonzero().squeeze(1)
    return sums[present] / counts[present, None, None], present
