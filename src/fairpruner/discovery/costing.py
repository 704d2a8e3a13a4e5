"""What every plan over the spaces costs: parameters, bytes and FLOPs as terms over shared factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import nn

from fairpruner.core.arrays import Ints
from fairpruner.core.cost_model import CostModel, Factor, Term
from fairpruner.core.units import UnitSpace
from fairpruner.discovery.ids import Partition, Usage
from fairpruner.discovery.trace import Trace
from fairpruner.models.caching import CachedLayer
from fairpruner.models.counting import embedding_tables
from fairpruner.models.experts import expert_blocks


class TermBuilder:
    """Makes terms from the lengths of axes; axes whose indices belong to the same units share one factor."""

    def __init__(self, partition: Partition, spaces: Sequence[UnitSpace]) -> None:
        self.factors: list[Factor] = []
        self._positions: dict[tuple[int, bytes], int] = {}  # of factors
        self._spaces = [space for space in spaces if space.kind != "block"]
        self._blocks = {
            part.module: (space, part.units[0])
            for space in spaces
            for part in space.replaced
            if len(part.units) == 1
        }  # path -> the block that takes the module with it
        self._space = np.full(partition.roots.size, -1, dtype=np.int64)  # of each id
        self._unit = np.full(partition.roots.size, -1, dtype=np.int64)
        starts = {(axis.tensor, axis.dim): axis.start for axis in partition.axes}
        for number, space in enumerate(self._spaces):
            for part in space.slices:
                if (part.tensor, part.dim) not in starts:
                    continue  # a buffer, which costs nothing
                ids = starts[part.tensor, part.dim] + np.flatnonzero(part.owner >= 0)
                self._space[partition.roots[ids]] = number
                self._unit[partition.roots[ids]] = part.owner[part.owner >= 0]
        self._roots = partition.roots

    def term(self, total: int, axes: Sequence[Ints], place: str) -> Term:
        """A cost that is `total` for the whole model and proportional to the kept ids of each axis.

        It is zero if the residual block around `place`, the path of a module or parameter, is removed.
        """
        factors = self._block_factor(place)
        for ids in axes:
            owners = self._space[self._roots[ids]]
            if ids.size and (owners >= 0).any():
                factors.append(self._factor(ids, owners))
                total, rest = divmod(total, ids.size)
                if rest:
                    raise AssertionError(
                        f"a cost of {total * ids.size + rest} is not a multiple of its axis of {ids.size}"
                    )
        return Term(total, tuple(factors))

    def cached(self, layer: CachedLayer) -> Term:
        """The bytes that an attention caches for one token, proportional to its heads."""
        block = self._block_factor(layer.module)
        for space in self._spaces:
            inside = any(part.tensor.startswith(f"{layer.module}.") for part in space.slices)
            if space.kind == "head" and inside and layer.bytes % space.size == 0:
                return Term(layer.bytes // space.size, (self._whole(space), *block))
        return Term(layer.bytes, tuple(block))

    def _whole(self, space: UnitSpace) -> int:
        """The position of a factor that is the number of kept units of a space."""
        key = (space.size, f"{space.name} units".encode())
        if key not in self._positions:
            self._positions[key] = len(self.factors)
            self.factors.append(Factor(space.size, {space.name: np.ones(space.size, dtype=np.int64)}))
        return self._positions[key]

    def _block_factor(self, place: str) -> list[int]:
        """The position of a factor that is 1 if the block around a place is kept; empty without a block."""
        while place and place not in self._blocks:
            place = place.rpartition(".")[0]
        if not place:
            return []
        space, unit = self._blocks[place]
        key = (1, f"{space.name} {unit}".encode())
        if key not in self._positions:
            self._positions[key] = len(self.factors)
            self.factors.append(Factor(1, {space.name: (np.arange(space.size) == unit).astype(np.int64)}))
        return [self._positions[key]]

    def _factor(self, ids: Ints, owners: Ints) -> int:
        units = self._unit[self._roots[ids]]
        key = (ids.size, np.sort(owners * (1 << 32) + units).tobytes())
        if key not in self._positions:
            owned: Mapping[str, Ints] = {
                self._spaces[s].name: np.bincount(units[owners == s], minlength=self._spaces[s].size)
                for s in np.unique(owners[owners >= 0])
            }
            self._positions[key] = len(self.factors)
            self.factors.append(Factor(ids.size, owned))
        return self._positions[key]


def operation_terms(trace: Trace, spaces: Sequence[UnitSpace]) -> tuple[list[Factor], list[Term]]:
    """The MACs of every operation, in the order of the forward pass."""
    builder = TermBuilder(trace.partition, spaces)
    return builder.factors, [builder.term(cost.macs, cost.axes, cost.module) for cost in trace.costs]


def cost_model(
    trace: Trace, spaces: Sequence[UnitSpace], model: nn.Module, cached: Sequence[CachedLayer] = ()
) -> CostModel:
    """Parameters, bytes and FLOPs of every plan over these spaces.

    Where the model has them, also inner and active parameters, and the bytes of its cache of keys and values.
    """
    builder = TermBuilder(trace.partition, spaces)
    axes = _parameter_axes(trace, model)
    sizes = [(p, axes.get(name, ()), name) for name, p in model.named_parameters()]
    params = [builder.term(p.numel(), ids, name) for p, ids, name in sizes]
    held = [builder.term(p.numel() * p.element_size(), ids, name) for p, ids, name in sizes]
    flops = [builder.term(cost.macs, cost.axes, cost.module) for cost in trace.costs]
    outer = embedding_tables(model)
    more = {
        "inner_params": [
            builder.term(p.numel(), ids, name) for p, ids, name in sizes if outer and id(p) not in outer
        ],
        "active_params": _active_params(builder, trace.partition, model, axes),
        "cache_bytes": [builder.cached(layer) for layer in cached],
    }
    return CostModel(
        tuple(builder.factors),
        _merged(params),
        _merged(flops),
        _merged(held),
        {metric: _merged(terms) for metric, terms in more.items() if terms},
    )


def _active_params(
    builder: TermBuilder, partition: Partition, model: nn.Module, axes: Mapping[str, Sequence[Ints]]
) -> list[Term]:
    """The parameters that one token uses: of each block, only as many experts as the token is sent to.

    Empty for models without experts, or if it is not known how many experts a token uses.
    """
    blocks = expert_blocks(model)
    if not blocks or any(block.top_k is None for block in blocks):
        return []
    terms = []
    for name, parameter in model.named_parameters():
        total, ids = parameter.numel(), axes.get(name, ())
        block = next((b for b in blocks if name.startswith(f"{b.experts}.")), None)
        if block is not None:
            assert block.top_k is not None
            inside = name.removeprefix(f"{block.experts}.").partition(".")
            if inside[1] and inside[0] != "0":
                continue  # the experts of a list have equal sizes: the first one stands for all
            total = total * block.top_k if inside[1] else total // block.size * block.top_k
            ids = [own for own in ids if not (partition.own_usage[own] & Usage.ROUTED).any()]
        terms.append(builder.term(total, ids, name))
    return terms


def _parameter_axes(trace: Trace, model: nn.Module) -> dict[str, list[Ints]]:
    """Parameter name -> the ids along each of its dimensions; in a list of experts, also the expert's id."""
    axes: dict[str, list[Ints]] = {}
    modules = dict(model.named_modules())
    for axis in trace.partition.axes:
        axes.setdefault(axis.tensor, []).append(axis.ids)
        if axis.tensor in modules:
            for number, expert in modules[axis.tensor].named_children():
                for name, _ in expert.named_parameters():
                    axes.setdefault(f"{axis.tensor}.{number}.{name}", []).append(axis.ids[[int(number)]])
    return axes


def _merged(terms: Sequence[Term]) -> tuple[Term, ...]:
    """The same terms; those over the same factors are added up."""
    totals: dict[tuple[int, ...], int] = {}
    for term in terms:
        key = tuple(sorted(term.factors))
        totals[key] = totals.get(key, 0) + term.coefficient
    return tuple(Term(coefficient, factors) for factors, coefficient in totals.items())
