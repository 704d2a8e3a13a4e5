"""One operation of the forward pass, as a rule sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten

from fairpruner.discovery.ids import Ids, Use
from fairpruner.discovery.shadow import EMPTY, Algebra, Layer, Shadow

if TYPE_CHECKING:
    from fairpruner.discovery.trace import Tracer


@dataclass(frozen=True, eq=False)
class Call:
    """An operation, its arguments and its real result."""

    tracer: Tracer
    func: Any
    args: Any
    kwargs: Any
    out: Any

    @cached_property
    def name(self) -> str:
        return str(self.func._overloadpacket.__name__)

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        return [t for t in tree_flatten((self.args, self.kwargs))[0] if isinstance(t, torch.Tensor)]

    @cached_property
    def results(self) -> list[torch.Tensor]:
        return [
            t
            for t in (self.out if isinstance(self.out, (tuple, list)) else [self.out])
            if isinstance(t, torch.Tensor)
        ]

    @property
    def result(self) -> torch.Tensor:
        return self.results[0]

    @property
    def algebra(self) -> Algebra:
        return self.tracer.algebra

    @property
    def ids(self) -> Ids:
        return self.tracer.ids

    def option(self, position: int, name: str, default: Any = None) -> Any:
        """An argument given by position or by name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def shadow(self, tensor: Any) -> Shadow:
        return self.tracer.shadow(tensor)

    def put(self, layers: Sequence[Layer], weight: bool = False, result: torch.Tensor | None = None) -> None:
        """Give the result its shadow."""
        self.tracer.put(self.result if result is None else result, Shadow(tuple(layers), weight))

    def touch(self, *operands: Shadow) -> None:
        """Note that these weights were used now."""
        for operand in operands:
            for layer in operand.layers if operand.weight else ():
                self.algebra.mark(layer, Use.TOUCHED)

    def along(self, parameter: Any, dim: int, ndim: int) -> Shadow:
        """A vector parameter's or statistic's ids, lying along one dimension of an activation."""
        if parameter is None:
            return EMPTY
        known = self.shadow(parameter)
        shadow = known if known.layers else self.tracer.slots_of(parameter)
        shape = [-1 if d == dim else 1 for d in range(ndim)]
        return Shadow(tuple(layer.reshape(shape) for layer in shadow.layers), weight=True)

    def lock(self, reason: str) -> None:
        """Nothing that goes into this operation may be removed."""
        for tensor in self.tensors:
            self.algebra.lock(self.shadow(tensor), reason)


# A rule gives the results their shadows, and returns the layers whose lengths the operation's cost is
# proportional to.
Rule = Callable[[Call], "tuple[Layer, ...] | None"]


def unknown(call: Call) -> None:
    """Nothing is known of this operation: what it touches stays."""
    call.lock(f"passes through {call.name}, which fairpruner has no rule for")


def fresh(call: Call) -> None:
    """A new constant that only takes its shape from a tensor, or a number read from one: no unit goes
    into it.
    """
