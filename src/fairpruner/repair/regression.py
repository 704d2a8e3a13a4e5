"""Damped least squares from summed products, with the damping chosen, and its use proven, on the other
half of the samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Shares of the features' mean variance that are added to each: the first is for exact solutions, the last
# for
# few samples.
DAMPINGS = (1e-13, 1e-9, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)

ROUNDING = 1e-12


def wide(tensor: Tensor) -> Tensor:
    """Float64 as it is, everything narrower as float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def float64(tensor: Tensor) -> Tensor:
    """A float64 copy on the CPU: not every device has float64."""
    return tensor.to("cpu", torch.float64, copy=True)


def first_half(rows: Tensor, total: int, samples: int, before: int) -> Tensor:
    """Which rows, of `total` that lie sample by sample, belong to the samples that fit; the others prove.
    `before` came earlier.
    """
    return (rows * samples // total + before) % 2 == 0


@dataclass(frozen=True, eq=False)
class Sums:
    """Float64 sums on the CPU over rows of p features and q targets, in G groups: all that least squares
    needs to know of them.
    """

    rows: int
    gram: Tensor  # [G, p, p]
    cross: Tensor  # [G, p, q]
    square: Tensor  # [G], of all targets
    features: Tensor  # [G, p], summed
    targets: Tensor  # [G, q], summed

    @staticmethod
    def of(features: Tensor, targets: Tensor) -> Sums:
        """From features [G, rows, p] and targets [G, rows, q]."""
        features, targets = wide(features), wide(targets)
        return Sums(
            features.shape[1],
            *map(
                float64,
                (
                    features.mT @ features,
                    features.mT @ targets,
                    targets.square().sum((1, 2)),
                    features.sum(1),
                    targets.sum(1),
                ),
            ),
        )

    @property
    def finite(self) -> bool:
        """Whether the rows hold neither infinity nor NaN: each would show in these sums."""
        return bool(self.gram.diagonal(dim1=1, dim2=2).isfinite().all() and self.square.isfinite().all())

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.rows + other.rows,
            *(
                getattr(self, f) + getattr(other, f)
                for f in ("gram", "cross", "square", "features", "targets")
            ),
        )

    def error(self, fit: Fit) -> float:
        """The summed squared error of a fit on these rows."""
        slope, offset = fit.slope, fit.offset
        linear = (slope * (self.gram @ slope - 2 * self.cross)).sum((1, 2))
        shift = (
            offset * (self.rows * offset - 2 * self.targets + 2 * (self.features[:, None, :] @ slope)[:, 0])
        ).sum(1)
        return float((self.square + linear + shift).sum())

    def fit(self, damping: float, with_offset: bool) -> Fit | None:
        """The damped fit, or None if the damping is too small for a solution."""
        gram, cross = self.gram, self.cross
        floor = ROUNDING * gram.diagonal(dim1=1, dim2=2).mean(
            1
        )  # [G]: all that is left where every feature is constant
        if with_offset:
            mean = self.features / self.rows  # [G, p]
            gram = gram - mean[:, :, None] * self.features[:, None, :]
            cross = cross - mean[:, :, None] * self.targets[:, None, :]
        size = (
            gram.diagonal(dim1=1, dim2=2).mean(1).maximum(floor).clamp_min(torch.finfo(gram.dtype).tiny)
        )  # [G]
        damped = gram.clone()
        damped.diagonal(dim1=1, dim2=2).add_((damping * size)[:, None])
        factor, failed = torch.linalg.cholesky_ex(damped)
        if failed.any():
            return None
        slope = torch.cholesky_solve(cross, factor)
        offset = (
            (self.targets - (self.features[:, None, :] @ slope)[:, 0]) / self.rows
            if with_offset
            else torch.zeros_like(self.targets)
        )
        return Fit(slope, offset) if torch.isfinite(slope).all() else None

    def mean(self) -> Fit:
        """The fit that is only an offset."""
        return Fit(torch.zeros_like(self.cross), self.targets / self.rows)


@dataclass(frozen=True, eq=False)
class Fit:
    """Targets are about `features @ slope + offset`."""

    slope: Tensor  # [G, p, q]
    offset: Tensor  # [G, q]


@dataclass(frozen=True, eq=False)
class Choice:
    """The fit to use, or None and why not, with the held-out errors of doing nothing and of the fit."""

    fit: Fit | None
    before: float
    after: float
    reason: str


def choose(halves: tuple[Sums, Sums], with_offset: bool) -> Choice:
    """Fit all rows with the damping under which a fit of the first half does best on the second; None if
    none beats doing nothing.
    """
    first, second = halves
    best, after = None, _nothing(second)
    for damping in DAMPINGS if _can_prove(halves) else ():
        fit = first.fit(damping, with_offset)
        error = second.error(fit) if fit is not None else after
        if error < after:
            best, after = damping, max(error, 0.0)
    fit = None if best is None else (first + second).fit(best, with_offset)
    return _choice(
        halves,
        fit,
        after,
        "fitted" if with_offset else "fitted without an offset: no bias and no batch norm takes one",
    )


def choose_mean(halves: tuple[Sums, Sums], with_offset: bool) -> Choice:
    """The offset alone, under the same proof."""
    first, second = halves
    if not with_offset:
        return Choice(None, _nothing(second), _nothing(second), "no bias and no batch norm takes an offset")
    after = second.error(first.mean()) if _can_prove(halves) else _nothing(second)
    helps = after < _nothing(second)
    return _choice(halves, (first + second).mean() if helps else None, after, "fitted")


def _nothing(sums: Sums) -> float:
    """The error of no repair at all."""
    return float(sums.square.sum())


def _can_prove(halves: tuple[Sums, Sums]) -> bool:
    return all(half.rows > 0 and half.finite for half in halves)


def _choice(halves: tuple[Sums, Sums], fit: Fit | None, after: float, reason: str) -> Choice:
    before = _nothing(halves[1])
    if fit is not None:
        return Choice(fit, before, after, reason)
    if not all(half.finite for half in halves):
        reason = "its inputs or outputs hold numbers that are not finite: compute in float32 or bfloat16"
    elif not all(half.rows for half in halves):
        reason = "a single sample leaves none to prove a fit with"
    else:
        reason = "no fit of one half of the samples does better than the cut on the other"
    return Choice(None, before, before, reason)
