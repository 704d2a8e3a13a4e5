"""Products of a matrix with itself, the largest computation of repairs and of some signals."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from fairpruner.models.torch_private import multiplied

WIDE, STRIPS = 256, 4  # features from which the product is computed in so many strips


def gram_matrix(features: Tensor) -> Tensor:
    """XᵀX of features [rows, p] or [G, rows, p]: [p, p] or [G, p, p].

    For wide features, only blocks on and above the diagonal are computed: 5/8 of the products.

    >>> import torch
    >>> gram_matrix(torch.tensor([[1.0, 2.0], [0.0, 1.0]])).tolist()
    [[1.0, 2.0], [2.0, 5.0]]
    """
    size = features.shape[-1]
    if size < WIDE:
        return multiplied(features.mT, features)
    found = features.new_empty(*features.shape[:-2], size, size)
    edges = [size * n // STRIPS for n in range(STRIPS + 1)]
    for start, stop in pairwise(edges):
        strip = multiplied(features[..., start:stop].mT, features[..., start:])  # [stop - start, p - start]
        found[..., start:stop, start:] = strip
        found[..., stop:, start:stop] = strip[..., stop - start :].mT
    return found
