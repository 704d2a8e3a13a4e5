"""The proof of a space: on the example, the masked model and the cut model compute the same."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from fairpruner.core.arrays import Ints
from fairpruner.core.spaces import UnitSpace
from fairpruner.core.tod import removal_order
from fairpruner.models.calling import call, in_eval_mode, tensors_of
from fairpruner.models.narrowing import Change, copy_with, cut_units, mask_units

# A right cut differs by rounding alone. float32 is fast and settles nearly all; what it does not settle
# float64 decides; a model that runs in neither is tried in its own type.
PRECISIONS: tuple[tuple[torch.dtype | None, float], ...] = (
    (torch.float32, 1e-4),
    (torch.float64, 1e-9),
    (None, 1e-2),
)

Removed = dict[str, Ints]


def verify(model: nn.Module, example: Any, spaces: Sequence[UnitSpace]) -> dict[str, str]:
    """Name -> reason for each space whose cut fails or differs from its mask; all are tried together,
    then by halves.
    """
    check = Check(model, example, spaces)
    failed = _failing(check, spaces)
    while failed:
        sound = [s for s in spaces if s.name not in failed]
        reason = check.difference(sound)
        if not reason:
            break
        # Right one by one, wrong together: the first whose joining makes the others fail goes.
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
    """Compares mask and cut, with other numbers of units gone from each of the given spaces."""

    def __init__(self, model: nn.Module, example: Any, spaces: Sequence[UnitSpace]) -> None:
        rng = np.random.default_rng(0)
        depths = [
            int(rng.integers(1, max(1, min(s.size - s.min_keep, 2 * s.size // 3) // s.groups) + 1)) * s.groups
            for s in spaces
        ]
        everywhere: Removed = {
            s.name: removal_order(np.argsort(rng.permutation(s.size)), s.groups)[:depth]
            for s, depth in zip(spaces, depths, strict=True)
        }
        # Neighbours often share a tensor that the code splits: sizes that only fit while both lose the
        # same
        # must not pass.
        elsewhere: Removed = {s.name: everywhere[s.name] for s in spaces[1::2]}
        self._rounds = (everywhere, elsewhere)
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
                small = _outputs(
                    cut_units(self._model, spaces, removed, weights=weights), inputs
                )  # the cut model is gone before the masked one is built
            except Exception as error:
                reason = f"a cut model cannot run: {_brief(error)}"
                if self._runs(dtype, weights):
                    break
                continue
            reason = _compare(
                _outputs(mask_units(self._model, spaces, removed, weights=weights), inputs), small, tolerance
            )
            if not reason or dtype is torch.float64:
                break
        return reason


def _runs(model: nn.Module, example: Any, dtype: torch.dtype | None, weights: Change) -> bool:
    """Whether the uncut model runs in this type at all."""
    try:
        _outputs(copy_with(model, weights), _cast(example, dtype))
    except Exception:
        return False
    return True


# Windows begin this many numbers apart: 16 for the kernels that want aligned matrices, times a prime so
# that
# rows rarely meet rows.
APART = 16 * 61


def lively_weights(model: nn.Module, dtype: torch.dtype | None) -> Change:
    """Lively tensors for a whole model: its matrices are windows into one pool for each fan-in, and so
    take the memory of the largest.
    """
    stacks = frozenset(_stacks(model))
    # An embedding with max_norm writes into its weight, which must not be that of others.
    written = {
        f"{path}.weight" for path, module in model.named_modules() if getattr(module, "max_norm", None)
    }
    matrices = {
        name: p
        for name, p in model.named_parameters()
        if p.ndim > 1 and p.is_floating_point() and name not in written
    }
    kinds = {
        name: (max(p.shape[1:]) if name in stacks else p[0].numel(), p.dtype, p.device)
        for name, p in matrices.items()
    }
    starts = {name: APART * number for number, name in enumerate(matrices)}
    lengths: dict[tuple[int, torch.dtype, torch.device], int] = {}
    for name, kind in kinds.items():
        lengths[kind] = max(lengths.get(kind, 0), starts[name] + matrices[name].numel())
    pools = {
        kind: (
            lively(
                str(kind),
                torch.empty(1, dtype=kind[1], device=kind[2]).expand(-(-length // kind[0]), kind[0]),
                dtype,
            ).flatten()
        )
        for kind, length in lengths.items()
    }

    def weights(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in matrices:
            return lively(name, tensor, dtype)
        return pools[kinds[name]].narrow(0, starts[name], tensor.numel()).view(tensor.shape)

    return weights


def _stacks(model: nn.Module) -> Iterator[str]:
    """The names of parameters that are a matrix for each of several experts."""
    for path, module in model.named_modules():
        if not isinstance(module, nn.modules.conv._ConvNd):
            yield from (f"{path}.{name}" for name, p in module.named_parameters(recurse=False) if p.ndim == 3)


def lively(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Random numbers that keep the signal alive: under tiny or dead weights a wrong cut would look right."""
    if not tensor.is_floating_point():
        return tensor
    noise = torch.rand(
        tensor.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())), dtype=torch.float32
    )
    # Scales and variances near one; matrices with variance 2 / fan-in.
    fresh = noise.add_(0.5) if tensor.ndim < 2 else noise.sub_(0.5).mul_((24 / tensor[0].numel()) ** 0.5)
    return fresh.to(device=tensor.device, dtype=dtype or tensor.dtype)


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


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
