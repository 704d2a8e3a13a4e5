"""Grouping classes for the paper's grouped U-Score, which compares a few groups instead of many classes.

The groups are the clusters that K-means finds among the classes' mean features.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from fairpruner.core.arrays import Floats, Ints
from fairpruner.errors import FairprunerError


class ClassGroups:
    """The group of each class: sorted class indices [K] and their groups [K].

    Memory grows with the number of classes, not with the largest index.
    """

    def __init__(self, classes: Ints, groups: Ints) -> None:
        self._classes, self._groups = torch.from_numpy(classes), torch.from_numpy(groups)

    def __call__(self, labels: Tensor) -> Tensor:
        """Class indices replaced by group indices, [N]."""
        known, groups = (table.to(labels.device) for table in (self._classes, self._groups))
        place = torch.searchsorted(known, labels.contiguous()).clamp(max=len(known) - 1)
        new = known[place] != labels
        if new.any():
            raise FairprunerError(
                f"Class {int(labels[new][0])} appeared only after the classes had been grouped: give data"
                " that yields the same samples each time."
            )
        return groups[place]


def group_classes(batches: Iterable[tuple[Tensor, Tensor]], groups: int, seed: int) -> ClassGroups:
    """Cluster the classes by their mean features; a batch is penultimate features [N, D] and labels [N]."""
    sums: dict[int, Floats] = {}
    counts: dict[int, int] = {}
    for features, labels in batches:
        values, present = features.cpu().double().numpy(), labels.cpu().numpy()
        found, inverse = np.unique(present, return_inverse=True)
        totals = np.zeros((len(found), values.shape[1]))
        np.add.at(totals, inverse, values)
        for label, total, count in zip(found.tolist(), totals, np.bincount(inverse).tolist(), strict=True):
            sums[label] = sums.get(label, 0.0) + total
            counts[label] = counts.get(label, 0) + count
    if not 2 <= groups <= len(sums):
        raise FairprunerError(
            f"groups={groups} cannot group the {len(sums)} classes of the data: expected 2 <= groups <="
            f" {len(sums)}."
        )
    classes = np.array(sorted(sums))
    prototypes = np.stack([sums[label] / counts[label] for label in classes.tolist()])
    return ClassGroups(classes, kmeans(prototypes, groups, seed))


def kmeans(points: Floats, groups: int, seed: int) -> Ints:
    """The cluster of each point, [K, D] -> [K]: Lloyd's iterations from a k-means++ start.

    No cluster is empty. `scipy.cluster.vq.kmeans2` may leave clusters empty, and fewer groups than the
    caller asked for would be compared.

    >>> kmeans(np.array([[0.0], [10.0], [0.1], [10.2]]), 2, seed=0).tolist() in ([0, 1, 0, 1], [1, 0, 1, 0])
    True
    """
    rng = np.random.default_rng(seed)
    centres = points[rng.integers(len(points))][None]
    while len(centres) < groups:
        nearest = _distances(points, centres).min(1)
        total = nearest.sum()
        pick = rng.choice(len(points), p=nearest / total) if total > 0 else rng.integers(len(points))
        centres = np.concatenate([centres, points[pick][None]])
    labels = np.full(len(points), -1)
    for _ in range(100):
        distances = _distances(points, centres)
        updated = distances.argmin(1)
        for empty in np.setdiff1d(np.arange(groups), updated):
            # An empty cluster takes the farthest point of the clusters with several points.
            crowded = np.bincount(updated, minlength=groups)[updated] > 1
            updated[np.where(crowded, distances[np.arange(len(points)), updated], -1).argmax()] = empty
        if np.array_equal(updated, labels):
            break
        labels = updated
        members = np.arange(groups)[:, None] == labels  # [G, K]
        centres = members @ points / members.sum(1, keepdims=True)
    return labels


def _distances(points: Floats, centres: Floats) -> Floats:
    """Squared Euclidean distances, [K, G]."""
    squares: Floats = np.square(points).sum(1)[:, None] + np.square(centres).sum(1) - 2 * points @ centres.T
    return squares.clip(min=0.0)  # rounding may make the square of a tiny distance negative
