"""Whether a plan fits a model: every tensor, dimension, length and count that it names is there."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import nn

from fairpruner.core.plan import Plan
from fairpruner.core.units import Count, Norm, Slice
from fairpruner.errors import FairprunerError
from fairpruner.models.counts import counted

STEP = "Discover and score this model again."


def check_fits(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan whose slices or counts do not fit this model, even if its fingerprint matches."""
    shapes = {name: tuple(t.shape) for name, t in (*model.named_parameters(), *model.named_buffers())}
    modules = dict(model.named_modules())
    lists = {name: (len(module),) for name, module in modules.items() if isinstance(module, nn.ModuleList)}
    owned: dict[tuple[str, int], np.ndarray] = {}
    for space in plan.spaces:
        if plan.removed[space.name] and not space.slices:
            raise FairprunerError(f"Space {space.name!r} of the plan loses units but owns no tensor. {STEP}")
        for part in space.slices:
            _check_slice(part, {**lists, **shapes}, space.name)
            if space.kind == "block":
                continue  # a block owns whole tensors, also those in which other spaces own indices
            mine = part.owner >= 0
            if (mine & owned.get((part.tensor, part.dim), np.zeros_like(mine))).any():
                raise FairprunerError(
                    f"Space {space.name!r} of the plan and another own the same indices of {part.tensor},"
                    f" dim {part.dim}. {STEP}"
                )
            owned[part.tensor, part.dim] = mine | owned.get((part.tensor, part.dim), np.zeros_like(mine))
        for count in space.counts:
            _check_count(count, modules, space.name)
        for norm in space.norms:
            _check_norm(norm, modules, space.name)
        for gone in space.replaced:
            if not gone.module or gone.module not in modules:
                raise FairprunerError(
                    f"Space {space.name!r} of the plan replaces {gone.module!r}: no such module. {STEP}"
                )


def _check_slice(part: Slice, shapes: Mapping[str, tuple[int, ...]], space: str) -> None:
    shape = shapes.get(part.tensor)
    if shape is None:
        raise FairprunerError(f"Space {space!r} of the plan owns {part.tensor!r}: no such tensor. {STEP}")
    if part.dim >= len(shape) or part.owner.size != shape[part.dim]:
        raise FairprunerError(
            f"Space {space!r} of the plan owns {part.owner.size} indices of {part.tensor}, dim {part.dim},"
            f" whose shape is {list(shape)}. {STEP}"
        )


def _check_norm(norm: Norm, modules: Mapping[str, nn.Module], space: str) -> None:
    """Refuse a norm unless its module holds a number as its epsilon."""
    held = vars(modules[norm.module]).get(norm.epsilon) if norm.module in modules else None
    if not isinstance(held, float):
        raise FairprunerError(
            f"Space {space!r} of the plan rescales {norm.module}.{norm.epsilon}, which is"
            f" {str(held)[:60]}, expected a number. {STEP}"
        )


def _check_count(count: Count, modules: Mapping[str, nn.Module], space: str) -> None:
    """Refuse a count unless the module itself holds a whole number of the expected size under that name."""
    module = modules.get(count.module)
    value = None if module is None else counted(module, count.attribute, count.owner.size)
    if type(value) is not int or value != count.owner.size:
        raise FairprunerError(
            f"Space {space!r} of the plan counts {count.owner.size} with the attribute"
            f" {count.module}.{count.attribute}, which is {str(value)[:60]}. {STEP}"
        )
