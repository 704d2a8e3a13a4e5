"""Whether two models gave the same outputs, up to rounding.

Outputs are compared at each index of each dimension: beside boxes in pixels, the probabilities of a detector
would be too small to count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

NOT_FINITE = "the output on the example is not finite, so a cut cannot be checked"
NO_NUMBERS = "the output on the example holds no real numbers, so a cut cannot be checked"

# A model may amplify rounding, as attention between large numbers does. A difference up to this share is
# rounding if weights that change by a tiny share make one ten times as large.
TREMOR = 1e-4
# Numbers at one index of a dimension from which their size is known. A single one may be near zero by chance.
ENOUGH = 8
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-14}  # as a share of the largest number of an output
ROUGHLY = 1e-2  # float32 cannot show that numbers which rounding changes by more than this share are equal


def compare(masked: Sequence[Tensor], small: Sequence[Tensor], tolerance: float, *, final: bool) -> str:
    """Why outputs of mask and cut differ, or "". If this is not `final`, float64 may show that they do not.

    >>> compare([torch.tensor([400.0, 0.5])], [torch.tensor([400.0, 0.49])], 1e-4, final=True)
    'mask and cut differ by 0.01 where the output is 0.5'
    """
    if [t.shape for t in masked] != [t.shape for t in small]:
        return (
            f"a cut changes the output's shape from {[tuple(t.shape) for t in masked]} to"
            f" {[tuple(t.shape) for t in small]}"
        )
    pairs = _pairs(masked, small)
    if not pairs:
        return NO_NUMBERS
    # An infinity may be meant, as the logit of a forbidden choice is, or be a number too large for float32.
    unknown = (a.isnan().any() or not (final or a.isfinite().all()) for a, _ in pairs)
    if any(unknown) or not any(a.isfinite().any() for a, _ in pairs):
        return NOT_FINITE
    if any(not torch.equal(a[a.isinf()], b[a.isinf()]) for a, b in pairs):
        return "mask and cut differ where the output is infinite"
    pairs = [_finite(a, b) for a, b in pairs]
    if not any(a.any() for a, _ in pairs):
        return "the output on the example is zero, so a cut cannot be checked"
    for a, b in pairs:
        whole = a.abs().max()
        for difference, scale, count in _by_index(a, b):
            rounding = whole * min(ROUNDING.get(a.dtype, tolerance), tolerance)
            if not final and count >= ENOUGH:
                rounding = rounding.minimum(ROUGHLY * scale)
            wrong = ~(difference <= (tolerance * scale).maximum(rounding))  # also if it is not a number
            if wrong.any():
                worst = int((difference / scale).where(wrong, -1).argmax())
                return (
                    f"mask and cut differ by {float(difference[worst]):.2g} where the output is"
                    f" {float(scale[worst]):.2g}"
                )
    return ""


def close(masked: Sequence[Tensor], small: Sequence[Tensor]) -> bool:
    """Whether outputs of the same shapes differ by no more than amplified rounding may."""
    if [t.shape for t in masked] != [t.shape for t in small]:
        return False
    found = shares(masked, small)
    return bool(found) and all(bool(share[0] <= TREMOR) for share in found)


def is_rounding(found: Sequence[Tensor], floors: Sequence[Tensor] | None) -> bool:
    """Whether mask and cut differ far less than a mask with shaken weights differs from the mask."""
    return floors is not None and all(
        bool((share <= (floor / 10).clamp_min(1e-9)).all())
        for share, floor in zip(found, floors, strict=True)
    )


def shares(masked: Sequence[Tensor], small: Sequence[Tensor]) -> list[Tensor]:
    """For each pair of outputs: the largest difference as a share of the largest number, in the whole output
    first, then at each index of a dimension with enough numbers.
    """
    found = []
    for a, b in _pairs(masked, small):
        a, b = _finite(a, b)
        (difference, scale, _), *parts = _by_index(a, b)
        least = ROUNDING.get(a.dtype, 0) * scale
        of_parts = [apart / size.maximum(least) for apart, size, count in parts if count >= ENOUGH]
        found.append(torch.cat([difference / scale, *of_parts]))
    return found


def _pairs(masked: Sequence[Tensor], small: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The outputs that hold real numbers."""
    return [(a, b) for a, b in zip(masked, small, strict=True) if a.is_floating_point() and a.numel()]


def _finite(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two outputs with zeros where both have the same infinity."""
    same = a.isinf() & (a == b)
    return a.masked_fill(same, 0), b.masked_fill(same, 0)


def _by_index(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
    """The largest difference and the largest number of `a`: in all, then at each index of each dimension.

    The third value is how many numbers have that index.
    """
    difference, size = (a - b).abs(), a.abs()
    yield difference.max()[None], size.max()[None], a.numel()
    for dim, length in enumerate(a.shape):
        if length > 1:
            others = [d for d in range(a.ndim) if d != dim]
            largest, scale = (t.amax(others) if others else t for t in (difference, size))
            yield largest, scale, a.numel() // length
