"""Plans one after another: what a plan leaves of its spaces, and two plans as one in terms of the
original's units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fairpruner.core.arrays import Ints
from fairpruner.core.costs import predict
from fairpruner.core.plan import Plan
from fairpruner.core.spaces import Factor, Spaces, UnitSpace
from fairpruner.errors import FairprunerError
from fairpruner.models.fingerprint import fingerprint

Place = tuple[str, int | str]  # a tensor's dimension, or a module's attribute


def compose(first: Plan, second: Plan) -> Plan:
    """One plan for the original model that removes what `first` removes from it, and `second` from what
    that leaves.

    Its rule is "iterative": each part kept to its own tolerance, the whole claims none.

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
                f"The second plan removes from space {space.name!r}, which the first plan does not know: make"
                " it for the first one's cut model."
            )
        if space.size != left[space.name].size:
            raise FairprunerError(
                f"Space {space.name!r} has {space.size} units in the second plan, and the first leaves"
                f" {left[space.name].size}: make the second for the first one's cut model."
            )
        if _owners(space) != _owners(left[space.name]):
            raise FairprunerError(
                f"Space {space.name!r} has other slices or another order of units in the second plan than the"
                " first leaves: use remaining(first, small)."
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
    """The spaces of `small`, the model cut by this plan, with no forward pass: the same names, and the
    kept units in their order.
    """
    kept = {space.name: _kept(space, plan) for space in plan.spaces}

    def shortened(factor: Factor) -> Factor:
        owned = {name: counts[kept[name]] for name, counts in factor.owned.items()}
        gone = sum(int(counts.sum() - owned[name].sum()) for name, counts in factor.owned.items())
        return Factor(factor.size - gone, owned)

    costs = plan.spaces.costs
    return Spaces(
        _narrowed(plan),
        plan.spaces.left_out,
        replace(costs, factors=tuple(shortened(factor) for factor in costs.factors)),
        fingerprint(small),
    )


def _kept(space: UnitSpace, plan: Plan) -> Ints:
    """The units that stay, ascending."""
    return np.setdiff1d(np.arange(space.size), np.asarray(plan.removed[space.name], dtype=np.int64))


def _narrowed(plan: Plan) -> tuple[UnitSpace, ...]:
    """What is left of each space: owners of the indices that stay, renumbered."""
    stays = _staying(plan)

    def left_of(space: UnitSpace) -> UnitSpace:
        kept = _kept(space, plan)
        renumbered = np.full(space.size + 1, -1, dtype=np.int64)  # the last entry serves owner -1
        renumbered[kept] = np.arange(kept.size)
        return replace(
            space,
            size=kept.size,
            multiple=math.gcd(space.multiple, kept.size),
            slices=tuple(replace(s, owner=renumbered[s.owner[stays[s.tensor, s.dim]]]) for s in space.slices),
            counts=tuple(
                replace(c, owner=renumbered[c.owner[stays[c.module, c.attribute]]]) for c in space.counts
            ),
        )

    return tuple(left_of(space) for space in plan.spaces)


def _staying(plan: Plan) -> Mapping[Place, NDArray[np.bool_]]:
    """Whether each index of a place stays, whichever space it belongs to."""
    stays: dict[Place, NDArray[np.bool_]] = {}
    for space in plan.spaces:
        places: Sequence[tuple[Place, Ints]] = [
            *(((s.tensor, s.dim), s.owner) for s in space.slices),
            *(((c.module, c.attribute), c.owner) for c in space.counts),
        ]
        for place, owner in places:
            stays[place] = stays.get(place, np.array(True)) & ~np.isin(owner, plan.removed[space.name])
    return stays


def _owners(space: UnitSpace) -> set[tuple[str, int, bytes]]:
    return {(s.tensor, s.dim, s.owner.tobytes()) for s in space.slices}
