"""What a model or a plan costs: params, FLOPs, bytes, units and experts, counted and predicted exactly.

FLOPs are multiply-accumulates (MACs), as the pruning literature counts them: half of what
`torch.utils.flop_counter` prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fairpruner.core.arrays import Floats, Ints
from fairpruner.core.budget import METRICS, Metric
from fairpruner.core.latency import LatencyTable
from fairpruner.core.spaces import Factor, Spaces, Term


class Lengths:
    """Kept lengths of axes, for every plan that removes a prefix of a fixed order of units in each space.

    `orders[s]` is the removal order of the s-th space, [J]; depths are given in the same order of spaces.
    """

    def __init__(self, factors: Sequence[Factor], spaces: Spaces, orders: Sequence[Ints]) -> None:
        self._sizes = np.array([factor.size for factor in factors], dtype=np.int64)
        # Nearly every unit of a space owns the same number of indices of an axis: one matrix does for
        # those.
        self._slopes = np.zeros((len(factors), len(spaces)), dtype=np.int64)
        # (factor, space, [J + 1] indices gone at each depth)
        self._ragged: list[tuple[int, int, Ints]] = []
        position = {name: s for s, name in enumerate(spaces.names)}
        for f, factor in enumerate(factors):
            for name, owned in factor.owned.items():
                if name not in position:  # left out: stays whole
                    continue
                s = position[name]
                if (owned == owned[0]).all():
                    self._slopes[f, s] = owned[0]
                else:
                    self._ragged.append((f, s, np.concatenate([[0], np.cumsum(owned[orders[s]])])))

    def kept(self, depths: Ints) -> Ints:
        """When `depths[s]` units go from the s-th space: of one plan [S] -> [F], or of several [S, N] ->
        [F, N].
        """
        kept: Ints = (self._sizes if depths.ndim == 1 else self._sizes[:, None]) - self._slopes @ depths
        for f, s, gone in self._ragged:
            kept[f] -= gone[depths[s]]
        return kept


class CostTable:
    """Costs of every plan that removes a prefix of a fixed order of units in each space, [J] for each."""

    def __init__(self, spaces: Spaces, orders: Sequence[Ints], latency: LatencyTable | None = None) -> None:
        self._sizes = np.array([space.size for space in spaces], dtype=np.int64)
        self._experts = np.array([space.kind == "expert" for space in spaces], dtype=bool)
        self._latency = latency
        self.metrics = metrics_of(spaces) + (() if latency is None else ("latency_ms",))
        model = spaces.costs
        self._lengths = Lengths(
            [*model.factors, Factor(1, {})], spaces, orders
        )  # the last is the empty product
        self._timed = None if latency is None else Lengths(latency.factors, spaces, orders)
        terms = {"params": model.params, "flops": model.flops, "bytes": model.bytes}
        self._terms = {metric: _arrays(t, len(model.factors)) for metric, t in terms.items()}

    def totals(self, metric: Metric, depths: Ints) -> float:
        """What is kept of a metric when `depths[s]` units go from the s-th space, [S] -> a count, or
        milliseconds.
        """
        if metric == "latency_ms":
            return float(self.milliseconds(depths[:, None])[0])
        if metric in ("units", "experts"):
            return int((self._sizes - depths)[self._experts | (metric == "units")].sum())
        kept = self._lengths.kept(depths)
        coefficients, factors = self._terms[metric]
        return int((coefficients * kept[factors].prod(axis=1)).sum())

    def milliseconds(self, depths: Ints) -> Floats:
        """Predicted latency of several plans, [S, N] -> [N]."""
        assert self._latency is not None
        assert self._timed is not None
        return self._latency.milliseconds(self._timed.kept(depths))


def _arrays(terms: Sequence[Term], empty: int) -> tuple[Ints, Ints]:
    """Terms as coefficient [T] and factor positions [T, widest], padded with the empty product."""
    width = max((len(t.factors) for t in terms), default=0)
    factors = np.full((len(terms), width), empty, dtype=np.int64)
    for row, term in zip(factors, terms, strict=True):
        row[: len(term.factors)] = term.factors
    return np.array([t.coefficient for t in terms], dtype=np.int64), factors


def metrics_of(spaces: Spaces) -> tuple[Metric, ...]:
    """What the plans of these spaces cost: experts only where there are some."""
    experts = any(space.kind == "expert" for space in spaces)
    return METRICS + (("bytes",) if spaces.costs.bytes else ()) + (("experts",) if experts else ())


def predict(
    spaces: Spaces, removed: Mapping[str, Sequence[int]], latency: LatencyTable | None = None
) -> dict[str, float]:
    """What is kept of every metric when these units are removed from each space."""
    orders, depths = [], []
    for space in spaces:
        gone = np.asarray(removed.get(space.name, ()), dtype=np.int64)
        orders.append(np.concatenate([gone, np.setdiff1d(np.arange(space.size), gone)]))
        depths.append(gone.size)
    table = CostTable(spaces, orders, latency)
    depth = np.array(depths, dtype=np.int64)
    return {metric: table.totals(metric, depth) for metric in table.metrics}
