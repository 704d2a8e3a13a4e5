"""The exact cost of any plan: params, FLOPs, bytes, units, experts, and milliseconds from a latency table.

FLOPs are multiply-accumulates (MACs), as the pruning literature counts them: half of what
`torch.utils.flop_counter` prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fairpruner.core.arrays import Floats, Ints
from fairpruner.core.budget import METRICS, MORE_METRICS, Metric
from fairpruner.core.cost_model import Factor, Term
from fairpruner.core.latency import LatencyTable
from fairpruner.core.spaces import Spaces


class Lengths:
    """The lengths of tensor axes after any plan that removes the first units of a fixed order per space.

    `orders[s]` is the removal order of space s, [J], so a plan is one depth per space, [S].
    """

    def __init__(self, factors: Sequence[Factor], spaces: Spaces, orders: Sequence[Ints]) -> None:
        self._sizes = np.array([factor.size for factor in factors], dtype=np.int64)
        # In most spaces every unit owns the same number of indices of an axis. One matrix product then gives
        # the removed indices.
        self._slopes = np.zeros((len(factors), len(spaces)), dtype=np.int64)
        # The other spaces: (factor, space, number of removed indices at each depth [J + 1]).
        self._ragged: list[tuple[int, int, Ints]] = []
        position = {name: s for s, name in enumerate(spaces.names)}
        for f, factor in enumerate(factors):
            for name, owned in factor.owned.items():
                if name not in position:  # a space that was left out keeps all its units
                    continue
                s = position[name]
                if (owned == owned[0]).all():
                    self._slopes[f, s] = owned[0]
                else:
                    self._ragged.append((f, s, np.concatenate([[0], np.cumsum(owned[orders[s]])])))

    def kept(self, depths: Ints) -> Ints:
        """Axis lengths after removing `depths[s]` units from space s: [S] -> [F].

        For N plans at once: [S, N] -> [F, N].
        """
        if depths.ndim == 1:
            kept: Ints = self._sizes - self._slopes @ depths
        else:  # most slopes are zero, and numpy has no fast product of integers
            kept = np.repeat(self._sizes[:, None], depths.shape[1], axis=1)
            for f, s in zip(*self._slopes.nonzero(), strict=True):
                kept[f] -= self._slopes[f, s] * depths[s]
        for f, s, removed in self._ragged:
            kept[f] -= removed[depths[s]]
        return kept


class CostTable:
    """The costs of any plan that removes the first units of a fixed order, [J], per space."""

    def __init__(self, spaces: Spaces, orders: Sequence[Ints], latency: LatencyTable | None = None) -> None:
        self._sizes = np.array([space.size for space in spaces], dtype=np.int64)
        self._experts = np.array([space.kind == "expert" for space in spaces], dtype=bool)
        position = {name: s for s, name in enumerate(spaces.names)}
        # (space, space of blocks, place in its removal order of the block that holds the former)
        self._inside = [
            (position[name], position[blocks], int(np.flatnonzero(orders[position[blocks]] == unit)[0]))
            for name, (blocks, unit) in spaces.enclosing.items()
        ]
        self._latency = latency
        self.metrics = metrics_of(spaces) + (() if latency is None else ("latency_ms",))
        model = spaces.costs
        # The last factor, of size 1, pads the products of terms with fewer factors than others.
        self._lengths = Lengths([*model.factors, Factor(1, {})], spaces, orders)
        self._timed = None if latency is None else Lengths(latency.factors, spaces, orders)
        terms = {"params": model.params, "flops": model.flops, "bytes": model.bytes, **model.more}
        self._terms = {metric: _arrays(t, len(model.factors)) for metric, t in terms.items()}

    def totals(self, metric: Metric, depths: Ints) -> float:
        """The amount of a metric that is kept when `depths[s]` units are removed from space s, [S]."""
        if metric == "latency_ms":
            return float(self.milliseconds(depths[:, None])[0])
        if metric in ("units", "experts"):
            units = self._sizes - depths
            for s, blocks, place in self._inside:
                units[s] *= place >= depths[blocks]
            return int(units[self._experts | (metric == "units")].sum())
        kept = self._lengths.kept(depths)
        coefficients, factors = self._terms[metric]
        return int((coefficients * kept[factors].prod(axis=1)).sum())

    def milliseconds(self, depths: Ints) -> Floats:
        """The predicted latency of N plans, [S, N] -> [N]."""
        assert self._latency is not None
        assert self._timed is not None
        return self._latency.milliseconds(self._timed.kept(depths))


def _arrays(terms: Sequence[Term], empty: int) -> tuple[Ints, Ints]:
    """Terms as coefficients [T] and factor positions [T, W], rows padded with the position `empty`."""
    width = max((len(t.factors) for t in terms), default=0)
    factors = np.full((len(terms), width), empty, dtype=np.int64)
    for row, term in zip(factors, terms, strict=True):
        row[: len(term.factors)] = term.factors
    return np.array([t.coefficient for t in terms], dtype=np.int64), factors


def metrics_of(spaces: Spaces) -> tuple[Metric, ...]:
    """The metrics that plans of these spaces predict; some only if the model has what they count."""
    experts = any(space.kind == "expert" for space in spaces)
    more: tuple[Metric, ...] = tuple(metric for metric in MORE_METRICS if metric in spaces.costs.more)
    return METRICS + (("bytes",) if spaces.costs.bytes else ()) + (("experts",) if experts else ()) + more


def unit_savings(spaces: Spaces, *metrics: Metric) -> dict[str, dict[Metric, Floats]]:
    """What the model saves of some metrics by each unit alone, at least 1: space -> metric -> [1] or [J].

    Only the units of residual blocks differ within a space.
    """
    table = CostTable(spaces, [np.arange(space.size) for space in spaces])
    nothing = np.zeros(len(spaces), dtype=np.int64)
    whole = {metric: table.totals(metric, nothing) for metric in metrics}
    found = {}
    for position, space in enumerate(spaces):
        if space.kind == "block":
            kept = [predict(spaces, {space.name: (unit,)}) for unit in range(space.size)]
        else:
            first = nothing.copy()
            first[position] = 1
            kept = [{metric: table.totals(metric, first) for metric in metrics}]
        found[space.name] = {
            metric: np.array([max(whole[metric] - left[metric], 1) for left in kept]) for metric in metrics
        }
    return found


def predict(
    spaces: Spaces, removed: Mapping[str, Sequence[int]], latency: LatencyTable | None = None
) -> dict[str, float]:
    """The amount of every metric that is kept when these units are removed from each space."""
    orders, depths = [], []
    for space in spaces:
        units = np.asarray(removed.get(space.name, ()), dtype=np.int64)
        orders.append(np.concatenate([units, np.setdiff1d(np.arange(space.size), units)]))
        depths.append(units.size)
    table = CostTable(spaces, orders, latency)
    depth = np.array(depths, dtype=np.int64)
    return {metric: table.totals(metric, depth) for metric in table.metrics}
