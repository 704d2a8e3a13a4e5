"""Residual blocks as units of one space: removing a block equals adding zero to its stream.

To remove a block, the modules that compute its branch are replaced by stand-ins without weights. The last
stand-in returns zeros. The others return their input, so that the zeros have the shape of the stream. A
module that holds only blocks is replaced by one that returns its input if all of its blocks are removed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from fairpruner.core.spaces import matches
from fairpruner.core.units import Replacement, Role, Slice, StandIn, UnitSpace
from fairpruner.discovery.residual import Graph, ModuleCall, Residual, residual_graph
from fairpruner.discovery.verify import verify
from fairpruner.models.experts import expert_lists

BLOCKS = "blocks"  # the name of the space


@dataclass(frozen=True, eq=False)
class _Block:
    """A residual block that was found: the modules that compute its branch, and what silences it."""

    name: str
    residual: Residual
    region: frozenset[int]
    ending: frozenset[str]
    replaced: tuple[Replacement, ...]
    holder: ModuleCall  # the innermost call of a module in which the sum is computed
    reason: str = ""  # why it cannot be removed


def block_space(
    model: nn.Module, examples: Sequence[Any], skip: Sequence[str] = ()
) -> tuple[UnitSpace | None, dict[str, str]]:
    """The space of all residual blocks that can be removed, or none, and name -> reason for the others."""
    graph = residual_graph(model, examples[0])
    blocks = _blocks(graph, model)
    left_out = {block.name: block.reason for block in blocks if block.reason}
    patterns = (skip,) if isinstance(skip, str) else tuple(skip)
    left_out |= {
        b.name: "skipped by the caller" for b in blocks if not b.reason and matches(b.name, patterns)
    }
    spaces = {b.name: _space([b], [], model, b.name) for b in blocks if b.name not in left_out}
    left_out |= verify(model, examples, list(spaces.values()))[1]
    sound = [block for block in blocks if block.name not in left_out]
    if len(sound) < 2:
        return None, {**left_out, **{b.name: "it is the only residual block, and one is kept" for b in sound}}
    return _space(sound, _holders(sound, graph, model), model, BLOCKS), left_out


def _blocks(graph: Graph, model: nn.Module) -> list[_Block]:
    """Every residual block that has weights, in the order of the forward pass."""
    times = Counter(call.path for call in graph.calls)
    found: list[_Block] = []
    for residual in graph.residuals():
        ending = _with_twins(graph.ending(residual.branch) or frozenset(), model)
        region = frozenset(graph.region(residual))
        if not ending or not graph.parameters_of(set(region)):
            continue  # a sum of an activation function or of a norm, not of a block
        if any(block.residual.total in region for block in found):
            continue  # it holds other blocks, which are units already
        found.append(_block(residual, region, ending, graph, model, times))
    return found


def _with_twins(names: frozenset[str], model: nn.Module) -> frozenset[str]:
    """Parameters, and those at the same place in the other experts of a list, which may not have run."""
    found = set(names)
    for path in expert_lists(model):
        own = [name.removeprefix(f"{path}.") for name in names if name.startswith(f"{path}.")]
        places = {name.partition(".")[2] for name in own}  # without the number of the expert
        count = len(list(model.get_submodule(path).children()))
        found |= {f"{path}.{number}.{place}" for number in range(count) for place in places}
    return frozenset(found)


def _block(
    residual: Residual,
    region: frozenset[int],
    ending: frozenset[str],
    graph: Graph,
    model: nn.Module,
    times: Mapping[str, int],
) -> _Block:
    holder = min(
        (call for call in graph.calls if call.start <= residual.total < call.stop),
        key=lambda call: (call.stop - call.start, -call.path.count(".")),
    )
    calls = _outermost([call for call in graph.calls if _argument(call, residual, region) is not None])
    calls.sort(key=lambda call: (call.stop, call.start))
    # Activation functions are often one module that is called in many places. They need no stand-in.
    calls = [call for call in calls if times[call.path] == 1 or _parameters(model, [call.path])]
    replaced = [_replacement(call, _argument(call, residual, region), "input") for call in calls]
    if replaced:
        replaced[-1] = replace(replaced[-1], by="zeros")
    if times[holder.path] == 1 and _is_whole(
        holder, [residual], graph, model, graph.parameters_of(set(region))
    ):
        calls = [holder]
        replaced = [_replacement(holder, _given(holder, residual.stream), "input")]
    name = replaced[-1].module if replaced else f"{holder.path}@{residual.total}"
    block = _Block(name, residual, region, ending, tuple(replaced), holder)
    return replace(block, reason=_obstacle(block, calls, graph, model, times))


def _replacement(call: ModuleCall, argument: int | str | None, by: StandIn) -> Replacement:
    assert argument is not None  # the call was chosen for it
    return Replacement(call.path, (0,), by, argument, call.outputs)


def _obstacle(
    block: _Block, calls: Sequence[ModuleCall], graph: Graph, model: nn.Module, times: Mapping[str, int]
) -> str:
    """Why a block cannot be removed by replacing these modules; "" if it can."""
    if not calls:
        return "no module computes what it adds, so none can be replaced"
    paths = [call.path for call in calls]
    if any(times[path] > 1 for path in paths):
        return "its modules are called several times in one forward pass"
    inside = _parameters(model, paths)
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    if any(not shared <= inside for shared in names.values() if shared & inside):
        return "it shares weights with other modules"
    if not block.ending <= inside:
        return "what silences it lies outside of the modules that compute it"
    outside = [
        number
        for number in block.region
        if graph.nodes[number].multiplies and not any(c.start <= number < c.stop for c in calls)
    ]
    return "it multiplies outside of the modules that can be replaced" if outside else ""


def _argument(call: ModuleCall, residual: Residual, region: frozenset[int]) -> int | str | None:
    """The argument through which a call reads the branch so far, if it also returns a part of the branch."""
    if call.output not in region:
        return None
    known = region | {residual.stream}
    return next((key for key, number in call.inputs.items() if number in known), None)


def _given(call: ModuleCall, stream: int) -> int | str | None:
    return next((key for key, number in call.inputs.items() if number == stream), None)


def _outermost(calls: Sequence[ModuleCall]) -> list[ModuleCall]:
    """The calls that were not made inside another of these calls."""

    def inside(inner: ModuleCall, outer: ModuleCall) -> bool:
        return (
            inner.path.startswith(f"{outer.path}.") and outer.start <= inner.start <= inner.stop <= outer.stop
        )

    return [call for call in calls if not any(inside(call, other) for other in calls)]


def _is_whole(
    holder: ModuleCall, residuals: Sequence[Residual], graph: Graph, model: nn.Module, read: Iterable[str]
) -> bool:
    """Whether a call does nothing but add these blocks to its input.

    It takes the stream of the first block, returns the sum of the last one, possibly through operations
    without weights, and has no parameters except those that the blocks read.
    """
    last = residuals[-1].total
    if _given(holder, residuals[0].stream) is None or holder.output is None or holder.output < last:
        return False
    if not _parameters(model, [holder.path]) <= set(read):
        return False
    after = graph.ancestors(holder.output, last)
    if last not in after:
        return False
    for number in after - {last}:
        parents = [p for p in graph.nodes[number].parents if graph.nodes[p].activation]
        if graph.parameters_of({number}) or not set(parents) <= after:
            return False
    return True


def _holders(blocks: Sequence[_Block], graph: Graph, model: nn.Module) -> list[Replacement]:
    """The modules that hold several blocks and nothing else, such as the layers of a transformer."""
    by_path: dict[str, list[int]] = {}
    for unit, block in enumerate(blocks):
        if all(part.module != block.holder.path for part in block.replaced):
            by_path.setdefault(block.holder.path, []).append(unit)
    found = []
    for path, units in by_path.items():
        holder = blocks[units[0]].holder
        inside = _parameters(model, [part.module for unit in units for part in blocks[unit].replaced])
        argument = _given(holder, blocks[units[0]].residual.stream)
        residuals = [blocks[unit].residual for unit in units]
        if argument is not None and _is_whole(holder, residuals, graph, model, inside):
            found.append(Replacement(path, tuple(units), "input", argument, holder.outputs))
    return found


def _space(
    blocks: Sequence[_Block], holders: Sequence[Replacement], model: nn.Module, name: str
) -> UnitSpace:
    """Some blocks as the units of one space."""
    slices: list[Slice] = []
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for unit, block in enumerate(blocks):
        inside = tuple(f"{part.module}." for part in block.replaced)
        for tensor, values in tensors:
            if tensor.startswith(inside) and values.ndim:
                role: Role = "add" if tensor in block.ending else "write" if values.ndim > 1 else "carry"
                slices.append(Slice(tensor, 0, np.full(values.shape[0], unit, dtype=np.int64), role))
    replaced = [replace(part, units=(unit,)) for unit, block in enumerate(blocks) for part in block.replaced]
    return UnitSpace(name, "block", len(blocks), tuple(slices), replaced=(*replaced, *holders))


def _parameters(model: nn.Module, paths: Sequence[str]) -> set[str]:
    """The names of all parameters at or below some modules."""
    inside = tuple(f"{path}." for path in paths)
    return {name for name, _ in model.named_parameters(remove_duplicate=False) if name.startswith(inside)}
