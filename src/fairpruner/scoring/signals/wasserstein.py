"""The paper's U-Score (Algorithm 1): the largest Wasserstein-1 distance between two classes' unit outputs.

On a common grid of quantiles, the W1 distance of two classes is the L1 distance of their quantile vectors.
The sliced distance is a mean over directions, so it is the L1 distance of the vectors of all directions in
one. The score is then the L1 diameter of K points, one for each class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fairpruner.core.arrays import Floats, Ints
from fairpruner.core.units import UnitSpace
from fairpruner.errors import FairprunerError, check_whole_number
from fairpruner.models.devices import device_of_model
from fairpruner.models.precision import in_float32
from fairpruner.scoring.processes import Processes
from fairpruner.scoring.signals.base import Accumulator, Context, Observation, Result, Signal
from fairpruner.scoring.signals.quantiles import ClassQuantiles

STATE_BYTES = 400 * 10**6  # what all spaces and classes together may keep
PLANNED_BLOCKS = 4  # of M values for each class, unit and projection; enough for 8 M samples of a class
SMALLEST, LARGEST = 4, 256  # samples of a class that are kept before they are summarised
GRID_CELLS = 4096  # bounds classes times kept samples, and so the common grid of classes of unequal sizes
CHUNK_VALUES = 2**22  # values that are compared at once
FEW_POINTS = 16  # below this, plain differences are quicker than cdist


@dataclass(frozen=True)
class Wasserstein(Signal):
    """The largest W1 distance between two classes of a unit's output.

    An output with F > 1 features is compared along random directions in R^F (sliced Wasserstein).
    """

    projections: int = 32
    name: str = "wasserstein"
    needs: ClassVar[frozenset[Observation]] = frozenset({"activations"})
    compares_classes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole_number("projections", self.projections)

    def start(self, context: Context) -> Accumulator:
        return _WassersteinAccumulator(self, context)

    def directions(self, features: int, projections: int, seed: Sequence[int]) -> Floats:
        """Unit vectors of R^F as columns, [F, P]."""
        if features == 1:
            return np.ones((1, 1))
        drawn: Floats = np.random.default_rng(seed).standard_normal((features, projections))
        drawn /= np.linalg.norm(drawn, axis=0)
        return drawn


@dataclass(frozen=True)
class WassersteinPooled(Wasserstein):
    """The largest W1 distance between two classes of a unit's output averaged over its features."""

    projections: int = 1
    name: str = "wasserstein_pooled"

    def directions(self, features: int, projections: int, seed: Sequence[int]) -> Floats:
        return np.full((features, 1), 1 / features)


def capacity(units: int, classes: int, projections: int, itemsize: int) -> tuple[int, int]:
    """How many samples of a class to keep (M) and how many projections to make, within STATE_BYTES.

    With very many classes there are fewer projections, so that M does not fall below SMALLEST.
    """
    affordable = STATE_BYTES // (PLANNED_BLOCKS * units * classes * itemsize)  # M times projections
    kept = LARGEST
    while kept > SMALLEST and (kept * projections > affordable or kept * classes > GRID_CELLS):
        kept //= 2
    return kept, max(1, min(projections, affordable // kept))


class _WassersteinAccumulator(Accumulator):
    pools_tokens = True  # so that texts of any length are points of one space

    def __init__(self, signal: Wasserstein, context: Context) -> None:
        itemsize = max(
            (p.element_size() for p in context.model.parameters() if p.dtype == torch.float64), default=4
        )
        units = sum(space.size for space in context.all_spaces)
        self._signal, self._seed = signal, context.seed
        self._kept, self._projections = capacity(units, context.classes, signal.projections, itemsize)
        self._position = {space.name: i for i, space in enumerate(context.all_spaces)}
        self._directions: dict[str, Tensor] = {}
        self._classes: dict[str, dict[int, ClassQuantiles]] = {space.name: {} for space in context.spaces}
        self._spaces = context.spaces
        self._device = device_of_model(context.model)

    def see_activation(self, space: UnitSpace, activation: Tensor, labels: Tensor | None) -> None:
        assert labels is not None  # only data with classes gets here
        values = in_float32(activation)
        projected = values @ self._directions_for(space, values)  # [N, J, P]
        rows = projected.flatten(1)  # [N, J * P]
        present = labels.cpu().numpy()
        order = np.argsort(present, kind="stable")
        found, starts = np.unique(present[order], return_index=True)
        classes = self._classes[space.name]
        by_class = torch.from_numpy(order).to(rows.device).tensor_split(starts[1:].tolist())
        for label, own in zip(found.tolist(), by_class, strict=True):
            if label not in classes:
                classes[label] = ClassQuantiles(rows.shape[1], self._kept, rows)
            classes[label].extend(rows, own)

    def _directions_for(self, space: UnitSpace, values: Tensor) -> Tensor:
        """The directions of a space, [F, P], drawn at its first batch."""
        features = values.shape[2]
        known = self._directions.get(space.name)
        if known is None or (len(known) != features and isinstance(self._signal, WassersteinPooled)):
            drawn = self._signal.directions(
                features, self._projections, (self._seed, self._position[space.name])
            )
            known = self._directions[space.name] = torch.from_numpy(drawn).to(values)
        if len(known) != features:
            raise FairprunerError(
                f"Space {space.name!r} has {features} features per unit in this batch and {len(known)} in"
                " earlier ones: give inputs of one size, or use removal='wasserstein_pooled'."
            )
        return known

    def join(self, processes: Processes) -> None:
        for name, classes in self._classes.items():
            # A process may have seen no sample of some class that others have seen.
            known = processes.gathered(
                [(label, one.columns, str(one.dtype)) for label, one in classes.items()]
            )
            for label, columns, dtype in sorted({entry for entries in known for entry in entries}):
                if label not in classes:
                    like = torch.empty(
                        0, dtype=getattr(torch, dtype.removeprefix("torch.")), device=self._device
                    )
                    classes[label] = ClassQuantiles(columns, self._kept, like)
                classes[label].join(processes)
            self._classes[name] = dict(sorted(classes.items()))

    def result(self) -> Result:
        scores, halves = {}, {}
        for space in self._spaces:
            # Popped, so that a space's state is freed once it is scored.
            classes = [own for _, own in sorted(self._classes.pop(space.name).items())]
            if len(classes) < 2:
                raise FairprunerError(
                    f"Signal {self._signal.name!r} compares classes, and the data holds {len(classes)}: give"
                    " samples of at least 2 classes."
                )
            scores[space.name], *of_halves = _diameters(classes, space.size, classes[0].columns // space.size)
            if len(of_halves) == 2:
                halves[space.name] = np.stack(of_halves)
        return Result(scores, halves, {"projections": self._projections, "kept_samples": self._kept})


def _diameters(classes: Sequence[ClassQuantiles], units: int, projections: int) -> list[Floats]:
    """The largest W1 over pairs of classes for each unit, [J]: of all, the even and the odd samples.

    The even or the odd ones are missing from the list if fewer than 2 classes have such samples.
    """
    cells = np.array([one.cells for one in classes])  # [K, 3]
    parts = [part for part in range(3) if np.count_nonzero(cells[:, part]) > 1]
    largest = max(len(grid(cells[:, part])) for part in parts)
    chunk = max(1, CHUNK_VALUES // (len(classes) * projections * largest))  # units
    found: list[list[Tensor]] = [[] for _ in parts]
    for start in range(0, units, chunk):
        columns = slice(start * projections, min(start + chunk, units) * projections)
        steps = [one.steps(columns) for one in classes]
        for pieces, part in zip(found, parts, strict=True):
            points = quantile_points([step[part] for step in steps if step[part].shape[1]], projections)
            pieces.append(diameter(points) / projections)
    return [torch.cat(pieces).cpu().numpy().astype(np.float64) for pieces in found]


def grid(cells: Ints) -> Floats:
    """The right edges, [G], of a grid on which step functions with these numbers of equal cells are constant.

    >>> grid(np.array([2, 4])).tolist()
    [0.25, 0.5, 0.75, 1.0]
    """
    # Division rounds correctly, so equal fractions are equal in float64 too.
    return np.unique(np.concatenate([np.arange(1, n + 1) / n for n in np.unique(cells)]))


def quantile_points(steps: Sequence[Tensor], projections: int) -> Tensor:
    """The classes as points [J, K, P * G], from the quantiles of each class, [J * P, cells].

    The L1 distance of two points is the sum of the W1 distances over the projections.
    """
    edges = grid(np.array([step.shape[1] for step in steps]))
    widths = np.diff(edges, prepend=0.0)
    middles = edges - widths / 2
    on_grid = []  # [J, P, G] each
    for step in steps:
        if step.shape[1] != len(edges):
            step = step[:, (middles * step.shape[1]).astype(np.int64)]
        on_grid.append(step.reshape(-1, projections, len(edges)))
    points = torch.stack(on_grid, dim=1)  # [J, K, P, G]
    points *= torch.from_numpy(widths).to(points)
    return points.flatten(2)


def diameter(points: Tensor) -> Tensor:
    """The largest L1 distance between two of K points, [J, K, D] -> [J]."""
    count, size = points.shape[1:]
    rule = _by_signs if 2**size < count else _by_halves if count > FEW_POINTS else _by_turns
    return torch.cat(
        [rule(piece) for piece in points.split(max(1, CHUNK_VALUES // (count * min(count, 2**size))))]
    )


def _by_signs(points: Tensor) -> Tensor:
    """Few dimensions: compare only the extremes of each signed sum of coordinates.

    The L1 distance of two points is the largest difference of their 2^(D-1) signed sums.
    """
    size = points.shape[2]
    choices = torch.arange(2 ** (size - 1), device=points.device)
    bits = choices >> torch.arange(size, device=points.device)[:, None] & 1  # [D, signs]
    sums = points @ (1 - 2 * bits).to(points)  # [J, K, signs]
    return (sums.amax(1) - sums.amin(1)).amax(1)


def _by_halves(points: Tensor) -> Tensor:
    """Many points: compare the two halves with each other, then each half in itself."""
    count = points.shape[1]
    if count <= FEW_POINTS:
        return _by_turns(points)
    left, right = points[:, : count // 2], points[:, count // 2 :]
    across = torch.cdist(left, right, p=1.0).flatten(1).amax(1)
    return across.maximum(_by_halves(left)).maximum(_by_halves(right))


def _by_turns(points: Tensor) -> Tensor:
    """Few points: compare each with those after it."""
    found = points.new_zeros(len(points))
    for first in range(points.shape[1] - 1):
        found = found.maximum((points[:, first + 1 :] - points[:, first : first + 1]).abs_().sum(2).amax(1))
    return found
