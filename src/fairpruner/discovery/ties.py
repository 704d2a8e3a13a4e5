"""Outputs that are sorted by a score, such as those of detectors: rows of tied scores may come in any order.

A detector returns boxes [n, 4], labels [n] and scores [n] of an image, the highest score first. Boxes with
equal scores change places through rounding, which is no difference between two models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MOST_NUMBERS = 64  # of a row by which rows are ordered: a mask of an image has far more


def in_one_order(outputs: Sequence[Tensor], tolerance: float) -> list[Tensor]:
    """The outputs of each image, with the rows of tied scores in an order that depends on the rows alone.

    Scores tie if they differ by no more than this share of the highest one. Other outputs stay as they are.

    >>> scores, boxes = torch.tensor([0.9, 0.5, 0.5]), torch.tensor([[1.0], [2.0], [3.0]])
    >>> one, other = (in_one_order([boxes[rows], scores], 1e-9) for rows in ([0, 1, 2], [0, 2, 1]))
    >>> torch.equal(one[0], other[0])
    True
    """
    scores = [tensor for tensor in outputs if _is_sorted(tensor, tolerance)]
    if not scores or len(outputs) % len(scores):
        return list(outputs)
    size = len(outputs) // len(scores)  # outputs of an image
    found: list[Tensor] = []
    for start in range(0, len(outputs), size):
        image = outputs[start : start + size]
        own = [tensor for tensor in image if any(tensor is one for one in scores)]
        found += _ordered(image, own[0], tolerance) if len(own) == 1 else image
    return found


def _is_sorted(tensor: Tensor, tolerance: float) -> bool:
    """Whether these are scores, the highest first."""
    if tensor.ndim != 1 or len(tensor) < 2 or not tensor.is_floating_point():
        return False
    return bool((tensor.diff() <= tolerance * tensor.abs().max()).all())


def _ordered(image: Sequence[Tensor], scores: Tensor, tolerance: float) -> list[Tensor]:
    """The outputs of one image: by score, and where scores tie, by a random projection of the narrow rows."""
    rows = [tensor for tensor in image if tensor.ndim and len(tensor) == len(scores)]
    parts = [row.reshape(len(row), -1).cpu().double() for row in rows if row[0].numel() <= MOST_NUMBERS]
    numbers = torch.cat(parts, 1)  # [n, all numbers of a row]
    numbers = numbers / numbers.abs().amax(0).clamp_min(torch.finfo(numbers.dtype).tiny)
    generator = torch.Generator("cpu").manual_seed(0)
    weights = torch.rand(numbers.shape[1], generator=generator, dtype=numbers.dtype, device="cpu")
    falls = -scores.cpu().double().diff() > tolerance * float(scores.abs().max())
    level = torch.cat([falls.new_zeros(1), falls]).cumsum(0)  # [n], equal where scores tie
    order = (numbers @ weights).argsort(stable=True)
    order = order[level[order].argsort(stable=True)]
    moved = {id(row) for row in rows}
    return [tensor[order.to(tensor.device)] if id(tensor) in moved else tensor for tensor in image]
