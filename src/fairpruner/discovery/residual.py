"""Residual sums in one forward pass: places where a branch is added to the stream it was computed from.

Every tensor that an operation makes is a *node*; its parents are the tensors that the operation read. A sum
is residual if one of its two operands, the *stream*, is an ancestor of the other, the *branch*. The *ending*
of a branch is the set of parameters that silence it: with zeros in them the branch adds zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fairpruner.models.calling import call_checked, evaluating, tensors_of
from fairpruner.models.recurrence import plain_recurrence
from fairpruner.models.torch_private import (
    TorchDispatchMode,
    as_products,
    flop_formula,
    hooked_modules,
    operation_name,
    tree_flatten,
)

SUMS = ("add", "add_")
# Operations whose result is zero where their first operand is zero.
_KEEP_ZERO = frozenset(
    name
    for line in (
        "view _unsafe_view reshape permute transpose t unsqueeze squeeze expand repeat clone _to_copy",
        "slice select split split_with_sizes unbind narrow index index_select alias detach as_strided",
        "view_as contiguous roll flip unfold constant_pad_nd lift_fresh native_dropout dropout neg div div_",
        "sum mean relu relu_ gelu silu tanh leaky_relu mish hardswish _adaptive_avg_pool2d avg_pool2d",
    )
    for name in line.split()
)
_COPIES = frozenset(("view", "permute", "transpose", "clone", "_to_copy", "alias"))
_NEW_ZEROS = frozenset(("zeros", "zeros_like", "new_zeros"))
_ADD_INTO = frozenset(("index_add", "index_add_", "index_put", "index_put_", "scatter_add", "scatter_add_"))
# Products, and the positions of their factors and of what is added to the product.
_PRODUCTS: Mapping[str, tuple[tuple[int, int], int | None]] = {
    "mm": ((0, 1), None),
    "bmm": ((0, 1), None),
    "addmm": ((1, 2), 0),
    "baddbmm": ((1, 2), 0),
    "convolution": ((0, 1), 2),
}
# Norms with a weight and a bias: the positions of both.
_NORMS: Mapping[str, tuple[int, int | None]] = {
    "native_batch_norm": (1, 2),
    "_native_batch_norm_legit_no_training": (1, 2),
    "cudnn_batch_norm": (1, 2),
    "native_layer_norm": (2, 3),
    "native_group_norm": (1, 2),
    "_fused_rms_norm": (2, None),
}


@dataclass(frozen=True, eq=False)
class Node:
    """A tensor that an operation made."""

    number: int
    name: str  # of the operation
    arguments: tuple[int | None, ...]  # the nodes of its arguments by position; None: not a tensor
    parents: tuple[int, ...]  # all nodes that it read
    parameter: str = ""  # the name, if it is a parameter or computed from one alone
    activation: bool = False  # whether it depends on the model's input
    multiplies: bool = False  # whether the operation costs FLOPs
    shape: torch.Size = field(default_factory=torch.Size)


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """One call of a module: the nodes made meanwhile are those with numbers in [start, stop)."""

    path: str
    start: int
    stop: int
    inputs: Mapping[int | str, int]  # argument -> node, for the tensors among the arguments
    output: int | None  # the node of the tensor returned, the first one of a tuple
    outputs: int  # the length of the tuple returned; 0 for a tensor


@dataclass(frozen=True)
class Residual:
    """A residual sum: the nodes of the stream, of the branch, and of their sum."""

    stream: int
    branch: int
    total: int


@dataclass
class Graph:
    """All nodes and calls of one forward pass."""

    nodes: list[Node] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    _endings: dict[int, frozenset[str] | None] = field(default_factory=dict)

    def residuals(self) -> list[Residual]:
        """Every sum of a stream with a branch that was computed from it, in the order of the forward pass."""
        found = []
        for node in self.nodes:
            if node.name not in SUMS or len(node.arguments) < 2 or not node.activation:
                continue
            first, second = node.arguments[:2]
            if first is None or second is None or self.nodes[first].shape != self.nodes[second].shape:
                continue
            pairs = ((first, second), (second, first))
            # The stream itself, or what it is merely a view of.
            streams = [*pairs, *((self._source(stream), branch) for stream, branch in pairs)]
            residual = next(((s, b) for s, b in streams if s != b and s in self.ancestors(b, s)), None)
            if residual is not None:
                found.append(Residual(*residual, node.number))
        return found

    def _source(self, number: int) -> int:
        """The tensor that a node is merely a view or a copy of."""
        while (node := self.nodes[number]).name in _COPIES:
            if not node.parents or not self.nodes[node.parents[0]].activation:
                break
            number = node.parents[0]
        return number

    def ancestors(self, number: int, oldest: int) -> set[int]:
        """The node itself and all that it was computed from, back to the node `oldest`."""
        seen, waiting = {number}, [number]
        while waiting:
            for parent in self.nodes[waiting.pop()].parents:
                if parent >= oldest and parent not in seen:
                    seen.add(parent)
                    waiting.append(parent)
        return seen

    def region(self, residual: Residual) -> set[int]:
        """The nodes of a branch: computed from the stream, and used to compute the branch."""
        before = self.ancestors(residual.branch, residual.stream)
        inside = {residual.stream}
        for number in sorted(before):
            if number != residual.stream and inside.intersection(self.nodes[number].parents):
                inside.add(number)
        return inside - {residual.stream}

    def parameters_of(self, numbers: set[int]) -> set[str]:
        """The parameters that some nodes read."""
        read = (self.nodes[parent] for number in numbers for parent in self.nodes[number].parents)
        return {node.parameter for node in read if node.parameter}

    def ending(self, number: int) -> frozenset[str] | None:
        """The parameters whose zeros make a node zero; None if it is not known which."""
        if number not in self._endings:
            self._endings[number] = None  # while it is looked for, so that long chains of sums end here
            self._endings[number] = self._found_ending(self.nodes[number])
        return self._endings[number]

    def _found_ending(self, node: Node) -> frozenset[str] | None:
        arguments = node.arguments
        if node.name in _NEW_ZEROS:
            return frozenset()
        if not node.activation:
            return frozenset({node.parameter}) if node.parameter else None
        if node.name in _PRODUCTS:
            (left, right), added = _PRODUCTS[node.name]
            product = self._first(n for n in (arguments[right], arguments[left]) if n is not None)
            rest = arguments[added] if added is not None and added < len(arguments) else None
            return product if rest is None else _both(product, self.ending(rest))
        if node.name in _NORMS:
            weight, bias = (None if p is None else arguments[p] for p in _NORMS[node.name])
            if weight is None:
                return None
            return self.ending(weight) if bias is None else _both(self.ending(weight), self.ending(bias))
        if node.name in ("mul", "mul_"):
            return self._first(sorted(node.parents, key=lambda parent: not self.nodes[parent].activation))
        if node.name in (*SUMS, "cat") or node.name in _ADD_INTO:
            given = [n for n in arguments if n is not None] or list(node.parents)
            total: frozenset[str] | None = frozenset()
            # What is added into a tensor comes last, after the indices.
            for number in [given[0], given[-1]] if node.name in _ADD_INTO else given:
                total = _both(total, self.ending(number))
            return total if len(given) > 1 else None
        if node.name in _KEEP_ZERO and arguments and arguments[0] is not None:
            return self.ending(arguments[0])
        return None

    def _first(self, numbers: Iterable[int]) -> frozenset[str] | None:
        """The ending of the first factor that has one; a product is zero if one factor is zero."""
        return next((found for n in numbers if (found := self.ending(n)) is not None), None)


def _both(a: frozenset[str] | None, b: frozenset[str] | None) -> frozenset[str] | None:
    return None if a is None or b is None else a | b


class _Recording(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = Graph()
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensor -> number of its node
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._buffers = {id(b) for b in model.buffers()}

    def number(self, tensor: torch.Tensor) -> int:
        """The node of a tensor. A tensor that no operation made is a parameter, a buffer or an input."""
        if tensor not in self._known:
            name = self._names.get(id(tensor), "")
            given = not name and id(tensor) not in self._buffers
            self._add(tensor, Node(len(self.graph.nodes), "", (), (), name, given, False, tensor.shape))
        found: int = self._known[tensor]
        return found

    def _add(self, tensor: torch.Tensor, node: Node) -> None:
        self.graph.nodes.append(node)
        self._known[tensor] = node.number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        products = as_products(func)
        if products is not None:
            with self:
                return products(*args, **kwargs)
        # An operation in place makes a new node of the same tensor, so arguments are numbered first.
        arguments = tuple(self.number(a) if isinstance(a, torch.Tensor) else None for a in args)
        read = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        parents = tuple(dict.fromkeys(self.number(t) for t in read))
        out = func(*args, **kwargs)
        name, nodes = operation_name(func), self.graph.nodes
        active = any(nodes[p].activation for p in parents)
        parameters = {nodes[p].parameter for p in parents} - {""}
        parameter = parameters.pop() if len(parameters) == 1 and not active else ""
        for result in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(result, torch.Tensor):
                self._add(
                    result,
                    Node(
                        len(nodes),
                        name,
                        arguments,
                        parents,
                        parameter,
                        active,
                        flop_formula(func) is not None,
                        result.shape,
                    ),
                )
        return out


def residual_graph(model: nn.Module, example: Any) -> Graph:
    """Run the model once on an example and record what each tensor was computed from."""
    recording = _Recording(model)
    with evaluating(model), torch.no_grad(), plain_recurrence(model), _watching(recording, model), recording:
        call_checked(model, example)
    return recording.graph


@contextmanager
def _watching(recording: _Recording, model: nn.Module) -> Iterator[None]:
    """Record the calls of modules through global hooks, so that the user's model gets none."""
    paths = {id(module): path for path, module in model.named_modules()}
    begun: list[tuple[int, dict[int | str, int]]] = []  # of the calls that have not ended: start and inputs

    def enter(module: nn.Module, args: Any) -> None:
        if id(module) in paths:
            inputs: dict[int | str, int] = {
                place: recording.number(a) for place, a in enumerate(args) if isinstance(a, torch.Tensor)
            }
            begun.append((len(recording.graph.nodes), inputs))

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if id(module) in paths:
            start, inputs = begun.pop()
            named = {key: recording.number(a) for key, a in kwargs.items() if isinstance(a, torch.Tensor)}
            # A tensor that was written to meanwhile has a newer node than the one that was given.
            inputs |= {key: number for key, number in named.items() if number < start}
            first = next(tensors_of(output), None)
            recording.graph.calls.append(
                ModuleCall(
                    paths[id(module)],
                    start,
                    len(recording.graph.nodes),
                    inputs,
                    None if first is None else recording.number(first),
                    len(output) if isinstance(output, (tuple, list)) else 0,
                )
            )

    with hooked_modules(enter, leave):
        yield
