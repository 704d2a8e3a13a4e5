"""Damped least squares from sums over rows; one half of the samples is fitted, the other half judges.

With features X [rows, p] and targets Y [rows, q] a fit is a slope B [p, q] and an offset b [q] that minimise

    |X B + 1 bᵀ - Y|² + damping · size · |B|²

where size is the mean variance of the features, so that the damping needs no unit. The solution needs only
sums over the n rows. With the means x = Xᵀ1 / n and y = Yᵀ1 / n it is

    (XᵀX - n x xᵀ + damping · size · I) B = XᵀY - n x yᵀ,     b = y - Bᵀx,

and without an offset the same with x = y = 0. The squared error of a fit on other rows needs only their sums:

    |X B + 1 bᵀ - Y|² = |Y|² + sum of B ∘ (XᵀX B - 2 XᵀY) + sum of b ∘ (n b - 2 Yᵀ1 + 2 Bᵀ Xᵀ1).

So rows are seen batch by batch and forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fairpruner.models.gram import gram_matrix
from fairpruner.models.precision import in_float32, without_autocast
from fairpruner.models.torch_private import multiplied

# The first is for solutions that are exact, the last for very few samples.
DAMPINGS = (1e-13, 1e-9, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
PAST = 1.02  # times the least error so far: beyond it, larger dampings are not tried
MOST_TARGETS = 128  # on which a damping is chosen
ROUNDING = 1e-12  # share of the features' squares that is taken for rounding where no feature varies


def float64(tensor: Tensor) -> Tensor:
    """A float64 copy on the CPU: not every device has float64."""
    return tensor.to("cpu").to(torch.float64, copy=True)


def in_first_half(rows: Tensor, total: int, samples: int, position: int) -> Tensor:
    """Which rows belong to samples that are fitted, bool [rows].

    The rows index `total` rows of a batch of `samples`, sample after sample. The batch is the position-th.
    """
    return (rows * samples // total + position) % 2 == 0


@dataclass(frozen=True, eq=False)
class Fit:
    """Targets are about `features @ slope + offset`."""

    slope: Tensor  # [G, p, q]
    offset: Tensor  # [G, q]


@dataclass(frozen=True, eq=False)
class NormalEquations:
    """Float64 sums on the CPU over rows of p features and q targets, separately for G groups."""

    rows: float  # their number, or the sum of their weights
    gram: Tensor  # XᵀX, [G, p, p]
    cross: Tensor  # XᵀY, [G, p, q]
    square: Tensor  # |Y|² of each target, [G, q]
    features: Tensor  # Xᵀ1, [G, p]
    targets: Tensor  # Yᵀ1, [G, q]

    @staticmethod
    def of(features: Tensor, targets: Tensor, weights: Tensor | None = None) -> NormalEquations:
        """From features [G, rows, p] and targets [G, rows, q]; `weights` [rows] multiply squared errors."""
        features, targets = in_float32(features), in_float32(targets)
        if not features.shape[1]:  # a batch of one sample leaves a half without rows: nothing is allocated
            groups, p, q = len(features), features.shape[2], targets.shape[2]
            shapes = (groups, p, p), (groups, p, q), (groups, q), (groups, p), (groups, q)
            return NormalEquations(
                0, *(torch.zeros((), dtype=torch.float64, device="cpu").expand(s) for s in shapes)
            )
        counted_features, counted_targets, rows = features, targets, float(features.shape[1])
        if weights is not None:
            root = weights.to(features).sqrt()[:, None]  # [rows, 1]
            features, targets, rows = features * root, targets * root, float(weights.sum())
            counted_features, counted_targets = features * root, targets * root
        with without_autocast(features.device):
            gram, cross = gram_matrix(features), multiplied(features.mT, targets)
        return NormalEquations(
            rows,
            gram=float64(gram),
            cross=float64(cross),
            square=float64(targets.square().sum(1)),
            features=float64(counted_features.sum(1)),
            targets=float64(counted_targets.sum(1)),
        )

    def __add__(self, other: NormalEquations) -> NormalEquations:
        if not (self.rows and other.rows):
            return self if self.rows else other
        return NormalEquations(
            self.rows + other.rows,
            self.gram + other.gram,
            self.cross + other.cross,
            self.square + other.square,
            self.features + other.features,
            self.targets + other.targets,
        )

    def __iadd__(self, other: NormalEquations) -> NormalEquations:
        """Add to the sums where they are: wide ones take as long to copy as to compute."""
        if not (self.rows and other.rows):
            return self if self.rows else other
        for own, new in zip(self._sums, other._sums, strict=True):
            own += new
        return replace(self, rows=self.rows + other.rows)

    @property
    def _sums(self) -> tuple[Tensor, ...]:
        return self.gram, self.cross, self.square, self.features, self.targets

    @property
    def finite(self) -> bool:
        """Whether the rows hold neither infinity nor NaN: each would show in these sums."""
        return bool(self.gram.diagonal(dim1=1, dim2=2).isfinite().all() and self.square.isfinite().all())

    def some_targets(self) -> NormalEquations:
        """The same for at most MOST_TARGETS targets, evenly spread."""
        step = -(-self.cross.shape[2] // MOST_TARGETS)
        return replace(
            self,
            cross=self.cross[:, :, ::step],
            square=self.square[:, ::step],
            targets=self.targets[:, ::step],
        )

    def error(self, fit: Fit) -> float:
        """The squared error of a fit, summed over these rows."""
        slope, offset = fit.slope, fit.offset
        of_slope = (slope * (self.gram @ slope - 2 * self.cross)).sum(1)  # [G, q]
        predicted = (self.features[:, None] @ slope)[:, 0]  # [G, q]
        of_offset = offset * (self.rows * offset - 2 * self.targets + 2 * predicted)
        return float((self.square + of_slope + of_offset).sum())

    def error_of_nothing(self) -> float:
        """The squared error of predicting zero."""
        return float(self.square.sum())

    def solve(self, dampings: Iterable[float], with_offset: bool) -> Iterator[Fit | None]:
        """The fit for each damping, or None if that is too small for a solution in float64."""
        gram, cross = self.gram, self.cross
        least_size = ROUNDING * _mean_of_diagonal(gram)
        if with_offset:
            mean = self.features / self.rows  # [G, p]
            gram = gram - mean[:, :, None] * self.features[:, None, :]
            cross = cross - mean[:, :, None] * self.targets[:, None, :]
        size = _mean_of_diagonal(gram).maximum(least_size).clamp_min(torch.finfo(gram.dtype).tiny)
        diagonal, damped = gram.diagonal(dim1=1, dim2=2), gram.clone()
        for damping in dampings:
            damped.diagonal(dim1=1, dim2=2).copy_(diagonal + (damping * size)[:, None])
            factor, failed = torch.linalg.cholesky_ex(damped)
            slope = torch.cholesky_solve(cross, factor)
            offset = torch.zeros_like(self.targets)
            if with_offset:
                offset = (self.targets - (self.features[:, None] @ slope)[:, 0]) / self.rows
            yield None if failed.any() or not slope.isfinite().all() else Fit(slope, offset)

    def mean(self) -> Fit:
        """The fit that is only an offset."""
        return Fit(torch.zeros_like(self.cross), self.targets / self.rows)


def _mean_of_diagonal(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=1, dim2=2).mean(1)  # [G]


@dataclass(frozen=True, eq=False)
class Halves:
    """The equations of the samples that are fitted, and of those that judge the fit."""

    fitted: NormalEquations
    judging: NormalEquations

    @staticmethod
    def of(features: Tensor, targets: Tensor, fitted: int, weights: Tensor | None = None) -> Halves:
        """From features [G, rows, p] and targets [G, rows, q] of which the first `fitted` rows are fitted.

        `weights` [rows] multiply the squared errors of the rows; None: they all count the same.
        """
        first, second = (None, None) if weights is None else (weights[:fitted], weights[fitted:])
        return Halves(
            NormalEquations.of(features[:, :fitted], targets[:, :fitted], first),
            NormalEquations.of(features[:, fitted:], targets[:, fitted:], second),
        )

    def __iadd__(self, other: Halves) -> Halves:
        fitted, judging = self.fitted, self.judging
        fitted += other.fitted
        judging += other.judging
        return Halves(fitted, judging)

    @property
    def obstacle(self) -> str:
        """Why nothing can be fitted and judged; "" if it can."""
        if not (self.fitted.finite and self.judging.finite):
            return "its inputs or outputs hold numbers that are not finite: compute in float32 or bfloat16"
        if not (self.fitted.rows and self.judging.rows):
            return "a single sample leaves none to judge a fit with"
        return ""


@dataclass(frozen=True, eq=False)
class JudgedFit:
    """A fit of all rows, or None and why not, with squared errors on the judging half before and after."""

    fit: Fit | None
    before: float
    after: float
    reason: str
    damping: int = 0  # place in DAMPINGS


def judged_fit(halves: Halves, with_offset: bool, *, near: int | None = None) -> JudgedFit:
    """Fit all rows with the damping under which a fit of one half does best on the other.

    No fit is returned unless the best one beats predicting zero. With `near`, only the dampings beside that
    one, and the smallest, are tried. Of many targets, some stand for all until the damping is chosen.
    """
    fitted, judging = halves.fitted.some_targets(), halves.judging.some_targets()
    before = judging.error_of_nothing()
    if halves.obstacle:
        return JudgedFit(None, before, before, halves.obstacle)
    places = [p for p in range(len(DAMPINGS)) if near is None or p == 0 or abs(p - near) <= 1]
    best, after = None, before
    for place, trial in zip(places, fitted.solve((DAMPINGS[p] for p in places), with_offset), strict=True):
        error = before if trial is None else max(judging.error(trial), 0.0)
        if error < after:
            best, after = place, error
        elif best is not None and error > PAST * after:
            break  # the error falls and then rises with the damping
    fit = None
    if best is not None:
        (fit,) = (halves.fitted + halves.judging).solve([DAMPINGS[best]], with_offset)
    if best is None or fit is None:
        return JudgedFit(None, before, before, _USELESS)
    reason = "fitted" if with_offset else f"fitted without an offset: {_NO_OFFSET}"
    return JudgedFit(fit, before, after, reason, best)


def judged_mean(halves: Halves, with_offset: bool) -> JudgedFit:
    """The offset alone, judged in the same way."""
    before = halves.judging.error_of_nothing()
    if halves.obstacle or not with_offset:
        return JudgedFit(None, before, before, halves.obstacle or _NO_OFFSET)
    after = halves.judging.error(halves.fitted.mean())
    if after >= before:
        return JudgedFit(None, before, before, _USELESS)
    return JudgedFit((halves.fitted + halves.judging).mean(), before, after, "fitted")


_USELESS = "no fit of one half of the samples does better than the cut on the other"
_NO_OFFSET = "no bias and no batch norm takes one"
