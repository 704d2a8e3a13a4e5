"""What a model or a plan costs: params, FLOPs and units, counted and predicted exactly.

FLOPs are multiply-accumulates (MACs), as the pruning literature counts them: half of what
`torch.utils.flop_counter` prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from .calling import call, evaluating
from .types import CostModel, Ints, Metric, Spaces, Term


def count_params(model: nn.Module) -> int:
    """The number of parameters, shared ones once.

    >>> count_params(nn.Linear(3, 2))
    8
    """
    return sum(p.numel() for p in model.parameters())


def count_flops(model: nn.Module, example: Any) -> int:
    """MACs of one forward pass over the whole example, in eval mode.

    >>> count_flops(nn.Linear(3, 2), torch.zeros(1, 3))
    6
    """
    with evaluating(model), torch.no_grad(), FlopCounterMode(display=False) as counter:
        call(model, example)
    return int(counter.get_total_flops()) // 2


class CostTable:
    """Costs of every plan that removes a prefix of a fixed order of units in each space.

    `orders[s]` is the removal order of the s-th space, [J]; depths are given in the same order of spaces.
    """

    def __init__(self, spaces: Spaces, orders: Sequence[Ints]) -> None:
        self._sizes = np.array([space.size for space in spaces], dtype=np.int64)
        model = spaces.costs
        self._lengths = np.array([factor.size for factor in model.factors] + [1], dtype=np.int64)  # the last is the empty product
        # Nearly every unit of a space owns the same number of indices of an axis: one matrix does for those.
        self._slopes = np.zeros((len(self._lengths), len(spaces)), dtype=np.int64)
        self._ragged: list[tuple[int, int, Ints]] = []  # (factor, space, [J + 1] indices gone at each depth)
        position = {name: s for s, name in enumerate(spaces.names)}
        for f, factor in enumerate(model.factors):
            for name, owned in factor.owned.items():
                s = position[name]
                if (owned == owned[0]).all():
                    self._slopes[f, s] = owned[0]
                else:
                    self._ragged.append((f, s, np.concatenate([[0], np.cumsum(owned[orders[s]])])))
        self._terms = {"params": _arrays(model.params, len(model.factors)), "flops": _arrays(model.flops, len(model.factors))}

    def totals(self, metric: Metric, depths: Ints) -> int:
        """What is kept of a metric when `depths[s]` units go from the s-th space, [S] -> count."""
        if metric == "units":
            return int(self._sizes.sum() - depths.sum())
        kept = self._lengths - self._slopes @ depths
        for f, s, gone in self._ragged:
            kept[f] -= gone[depths[s]]
        coefficients, factors = self._terms[metric]
        return int((coefficients * kept[factors].prod(axis=1)).sum())


def _arrays(terms: Sequence[Term], empty: int) -> tuple[Ints, Ints]:
    """Terms as coefficient [T] and factor positions [T, widest], padded with the empty product."""
    width = max((len(t.factors) for t in terms), default=0)
    factors = np.full((len(terms), width), empty, dtype=np.int64)
    for row, term in zip(factors, terms, strict=True):
        row[: len(term.factors)] = term.factors
    return np.array([t.coefficient for t in terms], dtype=np.int64), factors


def predict(spaces: Spaces, removed: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Units, params and FLOPs kept when these units are removed from each space."""
    orders, depths = [], []
    for space in spaces:
        gone = np.asarray(removed.get(space.name, ()), dtype=np.int64)
        orders.append(np.concatenate([gone, np.setdiff1d(np.arange(space.size), gone)]))
        depths.append(gone.size)
    table = CostTable(spaces, orders)
    depth = np.array(depths, dtype=np.int64)
    return {"units": table.totals("units", depth), "params": table.totals("params", depth), "flops": table.totals("flops", depth)}


__all__ = ["CostModel", "CostTable", "count_flops", "count_params", "predict"]
