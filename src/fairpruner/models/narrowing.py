"""Copies of a model in which units of any spaces are removed or masked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fairpruner.core.arrays import Ints
from fairpruner.core.units import ROLES, Replacement, Slice, UnitSpace
from fairpruner.errors import FairprunerError
from fairpruner.models.attention import FEWER_HEADS
from fairpruner.models.constant_experts import ConstantExperts
from fairpruner.models.copying import deep_copy, is_plain
from fairpruner.models.counts import set_count
from fairpruner.models.removed import remove
from fairpruner.models.silencing import close
from fairpruner.models.stream_norms import rescale_norms

Change = Callable[[str, torch.Tensor], torch.Tensor]


def _as_they_are(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def kept_indices(
    spaces: Iterable[UnitSpace], removed: Mapping[str, Iterable[int]]
) -> dict[str, dict[int, Ints]]:
    """Tensor name -> dim -> the kept indices, in order; only for tensors that lose some.

    The tensors of a removed block keep no index; `cut_units` removes them with their modules.
    """
    gone: dict[tuple[str, int], list[np.ndarray]] = {}
    for space in spaces:
        units = _units(space, removed)
        for part in space.slices if units.size else ():
            gone.setdefault((part.tensor, part.dim), []).append(_gone(part.owner, space, units))
    keep: dict[str, dict[int, Ints]] = {}
    for (tensor, dim), masks in gone.items():
        keep.setdefault(tensor, {})[dim] = np.flatnonzero(~np.logical_or.reduce(masks))
    return keep


def lost_by(small: nn.Module, spaces: Iterable[UnitSpace]) -> list[UnitSpace]:
    """The spaces with only those slices that a cut model lost: beside constant experts, a router is whole."""
    constant = tuple(f"{path}." for path, m in small.named_modules() if isinstance(m, ConstantExperts))
    found = []
    for space in spaces:
        inside = tuple(part for part in space.slices if part.tensor.startswith(constant))
        found.append(replace(space, slices=inside) if space.kind == "expert" and inside else space)
    return found


def replaced_modules(
    spaces: Iterable[UnitSpace], removed: Mapping[str, Iterable[int]]
) -> tuple[Replacement, ...]:
    """The modules that get stand-ins without weights; a module that holds others comes after them."""
    gone = {space.name: set(removed.get(space.name, ())) for space in spaces}
    return tuple(
        part for space in spaces for part in space.replaced if gone[space.name].issuperset(part.units)
    )


def cut_units(
    model: nn.Module,
    spaces: Iterable[UnitSpace],
    removed: Mapping[str, Iterable[int]],
    *,
    weights: Change = _as_they_are,
) -> nn.Module:
    """`cut` for any units of any spaces; `weights` may change the model's tensors before they are cut."""
    keep = kept_indices(spaces, removed)
    small = copy_with(model, lambda name, tensor: narrowed(weights(name, tensor), keep.get(name, {})))
    _set_counts(small, spaces, removed)
    for path, module in small.named_modules():
        # Also if all heads stay: torch's module does not accept a narrower input either.
        if type(module) in FEWER_HEADS and any(name.startswith(f"{path}.".lstrip(".")) for name in keep):
            module.__class__ = FEWER_HEADS[type(module)]
    _update_attributes(_sizes_by_path(model), small)
    for space in spaces:
        rescale_norms(small, space, kept=space.size - _units(space, removed).size)
    for part in replaced_modules(spaces, removed):
        remove(small.get_submodule(part.module), part.by, part.argument, part.outputs)
    for path, module in list(small.named_modules()):
        if isinstance(module, nn.ModuleList) and path in keep:
            _shorten(module, keep[path][0])
    return small


def restore_units(
    small: nn.Module,
    model: nn.Module,
    spaces: Iterable[UnitSpace],
    *,
    removed: Mapping[str, Iterable[int]],
    space: UnitSpace,
    outside: str,
) -> None:
    """Undo, in place, what `cut_units` did for one space `outside` of the module at this path."""
    keep = kept_indices(spaces, {name: units for name, units in removed.items() if name != space.name})
    before, inside = _sizes_by_path(small), f"{outside}."
    for name in dict.fromkeys(part.tensor for part in space.slices if not part.tensor.startswith(inside)):
        path, _, attribute = name.rpartition(".")
        held, tensor = small.get_submodule(path), getattr(model.get_submodule(path), attribute)
        fresh = narrowed(tensor.detach(), keep.get(name, {})).clone()
        if isinstance(tensor, nn.Parameter):
            fresh = nn.Parameter(fresh, requires_grad=tensor.requires_grad)
        setattr(held, attribute, fresh)
    for count in space.counts:
        if not f"{count.module}.".startswith(inside):
            every = range(len(count.owner))
            set_count(small.get_submodule(count.module), count.attribute, every, before=len(every))
    _update_attributes(before, small)


def narrowed(tensor: torch.Tensor, keep: Mapping[int, Ints]) -> torch.Tensor:
    """The kept indices of a tensor along some dims."""
    for dim, indices in keep.items():
        tensor = tensor.index_select(dim, torch.from_numpy(indices).to(tensor.device))
    return tensor


def _set_counts(small: nn.Module, spaces: Iterable[UnitSpace], removed: Mapping[str, Iterable[int]]) -> None:
    """Set the attributes that count units, such as `groups` and `num_heads`, to the kept numbers."""
    gone: dict[tuple[str, str], list[np.ndarray]] = {}  # several spaces may share one attribute
    for space in spaces:
        units = _units(space, removed)
        for count in space.counts if units.size else ():
            gone.setdefault((count.module, count.attribute), []).append(_gone(count.owner, space, units))
    for (path, attribute), masks in gone.items():
        kept = ~np.logical_or.reduce(masks)
        set_count(small.get_submodule(path), attribute, np.flatnonzero(kept).tolist(), before=kept.size)


def _shorten(modules: nn.ModuleList, kept: Ints) -> None:
    """Delete the modules of a list that are not kept."""
    for number in sorted(set(range(len(modules))) - set(kept.tolist()), reverse=True):
        del modules[number]


def mask_units(
    model: nn.Module,
    spaces: Iterable[UnitSpace],
    removed: Mapping[str, Iterable[int]],
    *,
    weights: Change = _as_they_are,
) -> nn.Module:
    """`mask` for any units of any spaces, `weights` as for `cut_units`.

    The weights that read a unit become zero: a bias or a norm would bring back a unit whose filter is zero.
    The logit of an expert becomes -inf: an expert whose weights are zero would still take tokens. The tensors
    that end a residual block become zero, so that it adds zero.
    """
    # tensor -> its slices, each with a mask of the indices that are silenced
    quiet: dict[str, list[tuple[Slice, torch.Tensor]]] = {}
    for space in spaces:
        units = _units(space, removed)
        # A norm reads all channels of a stream at once, so these become zero where they are written, too.
        roles = ROLES if space.kind == "stream" else ("read", "route", "add")
        for part in (part for part in space.slices if part.role in roles and units.size):
            gone = torch.from_numpy(_gone(part.owner, space, units))
            quiet.setdefault(part.tensor, []).append((part, gone))

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = weights(name, tensor)
        for part, gone in quiet.get(name, ()):
            if part.role == "route":
                tensor = close(part, tensor, gone)
            else:
                tensor = tensor.index_fill(part.dim, gone.nonzero().squeeze(1).to(tensor.device), 0)
        return tensor

    return copy_with(model, change)


def _units(space: UnitSpace, removed: Mapping[str, Iterable[int]]) -> Ints:
    """The removed units of one space."""
    return np.fromiter(removed.get(space.name, ()), dtype=np.int64)


def _gone(owner: Ints, space: UnitSpace, units: Ints) -> np.ndarray:
    """True for each index that one of the units owns."""
    removed = np.zeros(space.size + 1, dtype=bool)  # the last one is for -1, an index without an owner
    removed[units] = True
    return removed[owner]


def copy_with(model: nn.Module, change: Change) -> nn.Module:
    """A deep copy with changed tensors; no full-size copy of the unchanged tensors is made."""
    memo: dict[int, Any] = {}
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            fresh = change(name, tensor.detach())
            fresh = fresh.clone() if fresh.data_ptr() == tensor.data_ptr() else laid_out_as(tensor, fresh)
            if isinstance(tensor, nn.Parameter):
                fresh = nn.Parameter(fresh, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = fresh
    fresh_model = deep_copy(model, memo)
    _check_copied(model, fresh_model, memo)
    modes = [module.training for module in fresh_model.modules()]
    fresh_model.train()  # makes modules drop tensors that they derived from the old weights
    for module, training in zip(fresh_model.modules(), modes, strict=True):
        module.training = training
    return fresh_model


def _check_copied(model: nn.Module, copy: nn.Module, memo: Mapping[int, Any]) -> None:
    """Refuse a copy without the changed tensors: a class may define how it is copied, and leave them out."""
    if all(is_plain(type(module)) for module in model.modules()):
        return
    found = dict((*copy.named_parameters(), *copy.named_buffers()))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if found.get(name) is not memo[id(tensor)]:
            raise FairprunerError(
                f"A copy of {type(model).__name__} does not take over {name}, so the model cannot be cut: in"
                " its classes, remove __deepcopy__, or pass its memo on to copy.deepcopy for every attribute."
            )


def laid_out_as(tensor: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    """`fresh` with its dimensions in the memory order of `tensor`: channels_last stays channels_last."""
    if 0 in tensor.stride():  # an expanded tensor has no memory order
        return fresh.contiguous()
    if fresh.untyped_storage().nbytes() < fresh.nbytes:
        return fresh  # overlapping windows, which stand for random weights
    strides, step = [0] * fresh.ndim, 1
    # From the fastest dimension to the slowest; of two equal strides, that of length 1 comes first.
    for dim in sorted(range(tensor.ndim), key=lambda dim: (tensor.stride(dim), tensor.shape[dim])):
        strides[dim] = step
        step *= fresh.shape[dim]
    if fresh.stride() == tuple(strides):
        return fresh
    return fresh.new_empty_strided(fresh.shape, strides).copy_(fresh)


# Attribute -> the side of the module's weight whose length it holds. `in` and `out` are sides of a linear
# or convolutional weight, `all` is the length of a vector, `first` and `second` are dimensions of a matrix.
ATTRIBUTES: dict[str, str] = {
    "out_channels": "out",
    "out_features": "out",
    "in_channels": "in",
    "in_features": "in",
    "num_features": "all",
    "num_channels": "all",
    "num_parameters": "all",
    "normalized_shape": "all",
    "embedding_dim": "second",
    "nx": "first",
    "nf": "second",
}


def _update_attributes(before: Mapping[str, Mapping[str, int]], after: nn.Module) -> None:
    """Update the size attributes, such as `out_channels`, of every module whose weight changed."""
    for name, module in after.named_modules():
        old, new = before[name], _sizes(module)
        for attribute, side in ATTRIBUTES.items():
            if side not in old or old[side] == new[side]:
                continue
            if isinstance(getattr(type(module), attribute, None), property):
                continue  # a wrapper takes it from the module inside
            value = getattr(module, attribute, None)
            if value == old[side]:
                setattr(module, attribute, new[side])
            elif value == (old[side],):
                setattr(module, attribute, (new[side],))


def _sizes_by_path(model: nn.Module) -> dict[str, dict[str, int]]:
    return {path: _sizes(module) for path, module in model.named_modules()}


def _weight(module: nn.Module) -> Any:
    """What a module has as `weight`; a property of a wrapper may raise anything."""
    try:
        return getattr(module, "weight", None)
    except Exception:
        return None


def _sizes(module: nn.Module) -> dict[str, int]:
    """Lengths of a module's weight by side; without a weight, of its statistics."""
    parametrized = getattr(getattr(module, "parametrizations", None), "weight", None)
    # Reading a parametrized weight computes it, and a spectral norm changes its buffers when it does.
    weight = getattr(parametrized, "original", None)
    weight = _weight(module) if weight is None else weight
    weight = weight if isinstance(weight, torch.Tensor) else getattr(module, "running_mean", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim == 0:
        return {}
    if weight.ndim == 1:
        return {"all": weight.shape[0]}
    first, second = weight.shape[:2]
    groups = getattr(module, "groups", 1)
    sides = {"in": second * groups, "out": first}
    if getattr(module, "transposed", False):
        sides = {"in": first, "out": second * groups}
    return {**sides, "first": first, "second": second}
