"""The check of every space: on the example, the masked model and the cut model compute the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from fairpruner.core.arrays import Ints
from fairpruner.core.spaces import UnitSpace
from fairpruner.core.tod import removal_order
from fairpruner.discovery.failing import first_line, raise_if_out_of_memory
from fairpruner.discovery.lively import lively_weights
from fairpruner.models.calling import call, in_eval_mode, tensors_of
from fairpruner.models.narrowing import Change, copy_with, cut_units, mask_units

# A right cut differs by rounding alone. float32 is fast and decides nearly always; where it does not,
# float64 does. A model that runs in neither is tried in its own type.
PRECISIONS: tuple[tuple[torch.dtype | None, float], ...] = (
    (torch.float32, 1e-4),
    (torch.float64, 1e-9),
    (None, 1e-2),
)

Removed = dict[str, Ints]


def verify(model: nn.Module, example: Any, spaces: Sequence[UnitSpace]) -> dict[str, str]:
    """Name -> reason for each space whose cut fails or differs from its mask. All spaces are tried
    together first, then by halves.
    """
    check = Check(model, example, spaces)
    failed = _failing(check, spaces)
    while failed:
        sound = [s for s in spaces if s.name not in failed]
        reason = check.difference(sound)
        if not reason:
            break
        # Right one by one, wrong together: leave out the first space with which the earlier ones fail.
        good, bad = 0, len(sound)
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (good, middle) if check.difference(sound[:middle]) else (middle, bad)
        failed[sound[bad - 1].name] = f"together with others, {reason}"
    return failed


def _failing(check: Check, part: Sequence[UnitSpace]) -> dict[str, str]:
    reason = check.difference(part)
    if not reason or len(part) == 1:
        return {part[0].name: reason} if reason else {}
    return _failing(check, part[: len(part) // 2]) | _failing(check, part[len(part) // 2 :])


class Check:
    """Compares mask and cut. Each space loses a random number of units, up to two thirds of them."""

    def __init__(self, model: nn.Module, example: Any, spaces: Sequence[UnitSpace]) -> None:
        rng = np.random.default_rng(0)
        # All spaces together, then every other one. Neighbours often share a tensor that the code splits
        # in equal parts, and must not pass because both happen to lose the same number.
        self._rounds: list[Removed] = [
            {space.name: _drawn(space, rng, odd) for space in some}
            for odd, some in ((False, spaces), (True, spaces[1::2]), (True, spaces[::2]))
        ]
        self._example = example
        self._model = model
        self._lively = cache(partial(lively_weights, model))
        self._runs = cache(partial(_runs, model, example))

    def difference(self, spaces: Sequence[UnitSpace]) -> str:
        """Why mask and cut do not agree, or nothing."""
        wanted = [{s.name: removed[s.name] for s in spaces if s.name in removed} for removed in self._rounds]
        return next(
            (reason for removed in wanted if removed and (reason := self._disagreement(spaces, removed))), ""
        )

    def _disagreement(self, spaces: Sequence[UnitSpace], removed: Removed) -> str:
        reason = ""
        for dtype, tolerance in PRECISIONS:
            weights = self._lively(dtype)
            inputs = _cast(self._example, dtype)
            try:
                # The cut model is freed before the masked one is built.
                small = _outputs(cut_units(self._model, spaces, removed, weights=weights), inputs)
            except Exception as error:  # the user's code may raise anything when sizes change
                raise_if_out_of_memory(error, self._model)
                reason = f"a cut model cannot run: {first_line(error)}"
                if self._runs(dtype, weights):
                    break
                continue
            reason = _compare(
                _outputs(mask_units(self._model, spaces, removed, weights=weights), inputs), small, tolerance
            )
            if not reason or dtype is torch.float64:
                break
        return reason


def _drawn(space: UnitSpace, rng: np.random.Generator, odd: bool) -> Ints:
    """Units to remove, up to two thirds of a space and more of them from its first half.

    Code that splits a tensor into equal parts gets the parts right by chance if all lose the same number.
    They cannot if the first half loses more, or if the number is odd.
    """
    most = max(1, min(space.size - space.min_keep, 2 * space.size // 3) // space.groups)
    depth = int(rng.integers(-(-most // 3), most + 1))
    depth -= odd and depth % 2 == 0
    if space.groups > 1:
        return removal_order(np.argsort(rng.permutation(space.size)), space.groups)[: depth * space.groups]
    early, late = (rng.permutation(part) for part in np.array_split(np.arange(space.size), 2))
    from_early = min(-(-3 * depth // 4), early.size)
    return np.concatenate([early[:from_early], late[: depth - from_early]])


def _runs(model: nn.Module, example: Any, dtype: torch.dtype | None, weights: Change) -> bool:
    """Whether the uncut model runs in this type at all."""
    try:
        _outputs(copy_with(model, weights), _cast(example, dtype))
    except Exception as error:  # the user's code may raise anything in another type
        raise_if_out_of_memory(error, model)
        return False
    return True


def _cast(example: Any, dtype: torch.dtype | None) -> Any:
    return tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if dtype is not None and t.is_floating_point() else t, example
    )


def _outputs(model: nn.Module, inputs: Any) -> list[torch.Tensor]:
    with in_eval_mode(model), torch.no_grad():
        return list(tensors_of(call(model, inputs)))


def _compare(masked: list[torch.Tensor], small: list[torch.Tensor], tolerance: float) -> str:
    if [t.shape for t in masked] != [t.shape for t in small]:
        return (
            f"a cut changes the output's shape from {[tuple(t.shape) for t in masked]} to"
            f" {[tuple(t.shape) for t in small]}"
        )
    for a, b in zip(masked, small, strict=True):
        if not a.is_floating_point() or not a.numel():
            continue
        if not a.isfinite().all():
            return "the output on the example is not finite, so that nothing can be verified"
        difference, scale = float((a - b).abs().max()), float(a.abs().max())
        if not difference <= tolerance * scale:
            return f"mask and cut differ by {difference:.2g} where the output is {scale:.2g}"
    return ""
