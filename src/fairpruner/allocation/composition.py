"""Plans applied one after the other: the spaces that a plan leaves, and two plans composed into one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fairpruner.core.arrays import Ints
from fairpruner.core.cost_model import Factor
from fairpruner.core.costs import predict
from fairpruner.core.plan import Plan
from fairpruner.core.spaces import Spaces
from fairpruner.core.units import UnitSpace
from fairpruner.errors import FairprunerError
from fairpruner.models.fingerprint import fingerprint
from fairpruner.models.narrowing import replaced_modules

AxisName = tuple[str, int | str]  # (tensor, dimension), or (module, attribute that holds a count)


def compose(first: Plan, second: Plan) -> Plan:
    """One plan for the original model that has the effect of `first` and then `second`.

    `second` is a plan for the model that `first` leaves; the result names the original's units. Its rule is
    "iterative" and it has no tolerance, because each of the two plans had its own.

    >>> import fairpruner as fp, torch
    >>> net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    >>> first = Plan.removing(fp.discover(net, torch.zeros(1, 4)), {"0": (0, 3)})
    >>> second = Plan.removing(remaining(first, fp.cut(net, first)), {"0": (0, 1)})
    >>> compose(first, second).removed
    {'0': (0, 3, 1, 2)}
    """
    left = {space.name: space for space in _narrowed(first)}
    for space in second.spaces:
        if space.name not in left:
            raise FairprunerError(
                f"The second plan has the space {space.name!r}, which the first plan does not have: make the"
                " second plan for the model that the first one cut."
            )
        if space.size != left[space.name].size:
            raise FairprunerError(
                f"Space {space.name!r} has {space.size} units in the second plan, but the first plan leaves"
                f" {left[space.name].size}: make the second plan for the model that the first one cut."
            )
        if _owners(space) != _owners(left[space.name]):
            raise FairprunerError(
                f"Space {space.name!r} of the second plan differs from what the first plan leaves, in its"
                " slices or in the order of its units: make the second plan with remaining(first, small)."
            )
    removed = {
        space.name: (
            *first.removed[space.name],
            *_kept(space, first)[list(second.removed.get(space.name, ()))].tolist(),
        )
        for space in first.spaces
    }
    return Plan(
        first.spaces, removed, None, "iterative", False, predict(first.spaces, removed), first.original
    )


def remaining(plan: Plan, small: nn.Module) -> Spaces:
    """The spaces of `small`, the model that this plan cut, found without a forward pass.

    Spaces have the same names, and kept units stay in their order.
    """
    kept, left = {space.name: _kept(space, plan) for space in plan.spaces}, plan.kept

    def shortened(factor: Factor) -> Factor:
        owned = {name: counts[kept[name]] for name, counts in factor.owned.items()}
        gone = sum(int(counts.sum() - owned[name].sum()) for name, counts in factor.owned.items())
        return Factor(factor.size - gone, {name: counts for name, counts in owned.items() if left[name]})

    costs = plan.spaces.costs
    return replace(
        plan.spaces,
        items=_narrowed(plan),
        costs=replace(costs, factors=tuple(shortened(factor) for factor in costs.factors)),
        fingerprint=fingerprint(small),
    )


def _kept(space: UnitSpace, plan: Plan) -> Ints:
    """The units that the plan keeps, ascending."""
    return np.setdiff1d(np.arange(space.size), np.asarray(plan.removed[space.name], dtype=np.int64))


def _narrowed(plan: Plan) -> tuple[UnitSpace, ...]:
    """Each space without the removed units, and without what is inside removed blocks.

    The owners of the kept indices are renumbered.
    """
    stays = _kept_along_axes(plan)
    gone = tuple(f"{part.module}." for part in replaced_modules(plan.spaces, plan.removed))

    def narrowed(space: UnitSpace) -> UnitSpace:
        kept = _kept(space, plan)
        renumbered = np.full(space.size + 1, -1, dtype=np.int64)  # the last entry is for the owner -1, none
        renumbered[kept] = np.arange(kept.size)
        return replace(
            space,
            size=kept.size,
            multiple=math.gcd(space.multiple, kept.size),
            slices=tuple(
                replace(s, owner=renumbered[s.owner[stays[s.tensor, s.dim]]])
                for s in space.slices
                if not s.tensor.startswith(gone)
            ),
            counts=tuple(
                replace(c, owner=renumbered[c.owner[stays[c.module, c.attribute]]])
                for c in space.counts
                if not f"{c.module}.".startswith(gone)
            ),
            replaced=tuple(
                replace(r, units=left)
                for r in space.replaced
                if (left := tuple(int(renumbered[u]) for u in r.units if renumbered[u] >= 0))
            ),
            norms=tuple(norm for norm in space.norms if not f"{norm.module}.".startswith(gone)),
        )

    left = plan.kept
    return tuple(narrowed(space) for space in plan.spaces if left[space.name])


def _kept_along_axes(plan: Plan) -> Mapping[AxisName, NDArray[np.bool_]]:
    """For every axis that some space owns indices of: whether each index is kept."""
    kept: dict[AxisName, NDArray[np.bool_]] = {}
    for space in plan.spaces:
        axes: Sequence[tuple[AxisName, Ints]] = [
            *(((s.tensor, s.dim), s.owner) for s in space.slices),
            *(((c.module, c.attribute), c.owner) for c in space.counts),
        ]
        for axis, owner in axes:
            kept[axis] = kept.get(axis, np.array(True)) & ~np.isin(owner, plan.removed[space.name])
    return kept


def _owners(space: UnitSpace) -> set[tuple[str, int, bytes]]:
    """The slices of a space in a form that can be compared."""
    return {(s.tensor, s.dim, s.owner.tobytes()) for s in space.slices}
