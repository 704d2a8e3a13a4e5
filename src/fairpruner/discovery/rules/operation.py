"""One operation of the forward pass, as a rule sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fairpruner.discovery.ids import Ids, Usage
from fairpruner.discovery.recorder import Recorder
from fairpruner.discovery.shadow import EMPTY, Algebra, IdMap, Shadow
from fairpruner.models.torch_private import operation_name, tree_flatten


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation, its arguments and its real result."""

    recorder: Recorder
    func: Any
    args: Any
    kwargs: Any
    out: Any

    @cached_property
    def name(self) -> str:
        return operation_name(self.func)

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        return [t for t in tree_flatten((self.args, self.kwargs))[0] if isinstance(t, torch.Tensor)]

    @cached_property
    def results(self) -> list[torch.Tensor]:
        outputs = self.out if isinstance(self.out, (tuple, list)) else [self.out]
        return [t for t in outputs if isinstance(t, torch.Tensor)]

    @property
    def result(self) -> torch.Tensor:
        return self.results[0]

    @property
    def algebra(self) -> Algebra:
        return self.recorder.algebra

    @property
    def ids(self) -> Ids:
        return self.recorder.ids

    def option(self, position: int, name: str, default: Any = None) -> Any:
        """An argument given by position or by name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def shadow(self, tensor: Any, *, buffers: bool = False) -> Shadow:
        return self.recorder.shadow(tensor, buffers=buffers)

    def put(self, maps: Sequence[IdMap], weight: bool = False, result: torch.Tensor | None = None) -> None:
        """Give a result its shadow; the first one if none is named."""
        self.recorder.put(self.result if result is None else result, Shadow(tuple(maps), weight))

    def touch(self, *operands: Shadow) -> None:
        """Note that these weights were used now."""
        for operand in operands:
            for idmap in operand.maps if operand.weight else ():
                self.algebra.mark(idmap, Usage.TOUCHED)

    def along(self, vector: Any, dim: int, ndim: int) -> Shadow:
        """The shadow of a vector parameter or statistic, lying along one dimension of an activation."""
        if vector is None:
            return EMPTY
        shape = [-1 if d == dim else 1 for d in range(ndim)]
        maps = self.shadow(vector, buffers=True).maps
        return Shadow(tuple(idmap.reshape(shape) for idmap in maps), weight=True)

    def lock(self, reason: str) -> None:
        """Forbid the removal of everything that enters this operation."""
        for tensor in self.tensors:
            self.algebra.lock(self.shadow(tensor), reason)


# A rule gives the results their shadows. It returns the maps whose lengths the operation's cost is
# proportional to.
Rule = Callable[[Operation], "tuple[IdMap, ...] | None"]


def no_rule(op: Operation) -> None:
    """An operation without a rule: nothing that enters it can be removed."""
    op.lock(f"passes through {op.name}, which fairpruner has no rule for")


def fresh(op: Operation) -> None:
    """A constant that only has the shape of a tensor: it holds no units."""


def number(op: Operation) -> None:
    """A number that Python code reads from a tensor."""
    for tensor in op.tensors:
        op.algebra.lock_as_number(op.shadow(tensor))
