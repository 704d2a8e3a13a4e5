"""From classes of ids to spaces of units, what was left out, and the cost of any plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import nn

from fairpruner.core.arrays import Ints
from fairpruner.core.spaces import CostModel, Count, Factor, Kind, Role, Slice, Term, UnitSpace
from fairpruner.discovery.attributes import head_counts
from fairpruner.discovery.ids import Classes, Use
from fairpruner.discovery.trace import Counted, Trace


def assemble(trace: Trace, model: nn.Module) -> tuple[list[UnitSpace], dict[str, str]]:
    """Spaces found, and name -> reason for what was written but cannot be removed."""
    classes = trace.classes
    dims = np.repeat(np.arange(len(classes.slots)), [s.size for s in classes.slots])  # slot of each id
    roots = classes.roots[1:]  # without NONE
    written = classes.use[roots] & (Use.WRITE | Use.ROUTED) == Use.WRITE
    signature = _signatures(classes, dims, roots)
    spaces: list[UnitSpace] = []
    left_out: dict[str, str] = {}
    names: dict[str, int] = {}
    # Families in the order of their first producer, so that spaces stand as the data flows.
    families = _families(classes, dims, roots, written, signature)
    for members in families:
        producer = _producer(classes, dims, members)
        name = _module_of(classes.slots[producer].tensor)
        names[name] = names.get(name, 0) + 1
        if names[name] > 1:
            name = f"{name}#{names[name]}"
        reason = _why_not(classes, members)
        if reason:
            left_out[name] = reason
        else:
            spaces.append(_space(name, classes, dims, members, producer, trace.counted, model))
    return spaces, left_out


def as_data_flows(spaces: Iterable[UnitSpace], trace: Trace) -> list[UnitSpace]:
    """Spaces in the order in which the forward pass first met what writes them."""
    met = {(slot.tensor, slot.dim): position for position, slot in enumerate(trace.classes.slots)}
    return sorted(
        spaces,
        key=lambda space: min(
            met.get((s.tensor, s.dim), len(met)) for s in space.slices_of("write") or space.slices
        ),
    )


def _signatures(classes: Classes, dims: Ints, roots: Ints) -> Ints:
    """A number for each id: equal for classes that own parts of exactly the same slots."""
    pairs = np.unique(np.stack([roots, dims], axis=1), axis=0)
    token = np.random.default_rng(0).integers(1, 2**62, size=len(classes.slots))
    total = np.zeros(classes.roots.size, dtype=np.int64)
    np.add.at(total, pairs[:, 0], token[pairs[:, 1]])  # wraps around: a hash of the set of slots
    locked = classes.lock[np.arange(classes.roots.size)]
    total += locked * 7919  # what is fixed for another reason is another family
    return total[roots]


def _families(classes: Classes, dims: Ints, roots: Ints, written: np.ndarray, signature: Ints) -> list[Ints]:
    """Ids (minus one) of each family of classes that some weight writes, in the order of their producers."""
    positions = np.flatnonzero(written)
    order = positions[np.argsort(signature[positions], kind="stable")]
    cuts = np.flatnonzero(np.diff(signature[order])) + 1
    families = [f for f in np.split(order, cuts) if f.size]
    return sorted(families, key=lambda members: _producer(classes, dims, members))


def _producer(classes: Classes, dims: Ints, members: Ints) -> int:
    """The first slot that writes the family; slots are numbered as the forward pass met them."""
    writers = members[classes.own_use[members + 1] & Use.WRITE != 0]
    return int(dims[writers].min())


def _module_of(tensor: str) -> str:
    return (
        tensor.split(".parametrizations.")[0]
        if ".parametrizations." in tensor
        else tensor.rpartition(".")[0] or tensor
    )


def _why_not(classes: Classes, members: Ints) -> str:
    roots = np.unique(classes.roots[members + 1])
    lock = int(classes.lock[roots[0]])
    if lock:
        return classes.reasons[lock]
    if not (classes.use[roots[0]] & Use.READ):
        return "no weight reads it"
    if roots.size == 1:
        return "a norm, a softmax or a shared size makes all its indices one unit"
    return ""


def _space(
    name: str,
    classes: Classes,
    dims: Ints,
    members: Ints,
    producer: int,
    counted: Sequence[Counted],
    model: nn.Module,
) -> UnitSpace:
    ids = members + 1
    lead = ids[dims[members] == producer]
    representatives, first = np.unique(classes.roots[lead], return_index=True)
    order = representatives[np.argsort(first)]  # by their first index in the producer
    units = np.full(classes.roots.size, -1, dtype=np.int64)
    units[order] = np.arange(order.size)
    slices = []
    for position in np.unique(dims[members]):
        slot = classes.slots[position]
        span = np.arange(slot.start, slot.start + slot.size)
        owner = np.where(np.isin(span, ids), units[classes.roots[span]], -1)
        used = int(np.bitwise_or.reduce(classes.own_use[span[owner >= 0]]))
        role: Role = "read" if used & Use.READ else "write" if used & Use.WRITE else "carry"
        slices.append((int(classes.last[span].max()), Slice(slot.tensor, slot.dim, owner, role)))
    slices.sort(key=lambda item: item[0])
    counts = tuple(
        Count(c.module, c.attribute, owner)
        for c in counted
        if ((owner := units[classes.roots[c.ids]]) >= 0).any()
    )
    space = UnitSpace(
        name,
        _kind(classes, ids, model, classes.slots[producer].tensor),
        order.size,
        tuple(s for _, s in slices),
        counts,
    )
    return replace(space, counts=(*counts, *head_counts(space, model))) if space.kind == "head" else space


def _kind(classes: Classes, ids: Ints, model: nn.Module, producer: str) -> Kind:
    if classes.use[classes.roots[ids[0]]] & Use.HEAD:
        return "head"
    fused = any(
        slot.tensor == producer and classes.own_use[slot.start] & Use.ROUTED for slot in classes.slots
    )  # matrices of all experts
    return "channel" if model.get_parameter(producer).ndim > 2 and not fused else "hidden"


class Accountant:
    """Turns parameter shapes and traced work into cost terms over shared factors."""

    def __init__(self, classes: Classes, spaces: Sequence[UnitSpace]) -> None:
        self._factors: dict[tuple[int, bytes], int] = {}
        self.factors: list[Factor] = []
        self._spaces = spaces
        self._space = np.full(classes.roots.size, -1, dtype=np.int64)  # of each id
        self._unit = np.full(classes.roots.size, -1, dtype=np.int64)
        starts = {(slot.tensor, slot.dim): slot.start for slot in classes.slots}
        for number, space in enumerate(spaces):
            for part in space.slices:
                if (part.tensor, part.dim) not in starts:
                    continue  # a buffer, which costs nothing
                ids = starts[part.tensor, part.dim] + np.flatnonzero(part.owner >= 0)
                self._space[classes.roots[ids]] = number
                self._unit[classes.roots[ids]] = part.owner[part.owner >= 0]
        self._roots = classes.roots

    def term(self, total: int, axes: Sequence[Ints]) -> Term:
        """A cost that is `total` now and shrinks with each axis' ids."""
        factors = []
        for ids in axes:
            owners = self._space[self._roots[ids]]
            if ids.size and (owners >= 0).any():
                factors.append(self._factor(ids, owners))
                total, rest = divmod(total, ids.size)
                if rest:
                    raise AssertionError(
                        f"a cost of {total * ids.size + rest} is no multiple of its axis of {ids.size}"
                    )
        return Term(total, tuple(factors))

    def _factor(self, ids: Ints, owners: Ints) -> int:
        units = self._unit[self._roots[ids]]
        key = (ids.size, np.sort(owners * (1 << 32) + units).tobytes())
        if key not in self._factors:
            owned: Mapping[str, Ints] = {
                self._spaces[s].name: np.bincount(units[owners == s], minlength=self._spaces[s].size)
                for s in np.unique(owners[owners >= 0])
            }
            self._factors[key] = len(self.factors)
            self.factors.append(Factor(ids.size, owned))
        return self._factors[key]


def cost_model(trace: Trace, spaces: Sequence[UnitSpace], model: nn.Module) -> CostModel:
    """Params and FLOPs of every plan over these spaces."""
    accountant = Accountant(trace.classes, spaces)
    axes: dict[str, list[Ints]] = {}
    modules = dict(model.named_modules())
    for slot in trace.classes.slots:
        span = np.arange(slot.start, slot.start + slot.size)
        axes.setdefault(slot.tensor, []).append(span)
        for number, expert in (
            modules[slot.tensor].named_children() if slot.tensor in modules else ()
        ):  # all that a listed expert holds goes with it
            for name, _ in expert.named_parameters():
                axes.setdefault(f"{slot.tensor}.{number}.{name}", []).append(span[[int(number)]])
    sizes = [(p, axes.get(name, ())) for name, p in model.named_parameters()]
    params = [accountant.term(p.numel(), spans) for p, spans in sizes]
    held = [accountant.term(p.numel() * p.element_size(), spans) for p, spans in sizes]
    flops = [accountant.term(work.macs, work.axes) for work in trace.work]
    return CostModel(tuple(accountant.factors), _merged(params), _merged(flops), _merged(held))


def _merged(terms: Sequence[Term]) -> tuple[Term, ...]:
    """Terms over the same factors added up."""
    totals: dict[tuple[int, ...], int] = {}
    for term in terms:
        key = tuple(sorted(term.factors))
        totals[key] = totals.get(key, 0) + term.coefficient
    return tuple(Term(coefficient, factors) for factors, coefficient in totals.items())
