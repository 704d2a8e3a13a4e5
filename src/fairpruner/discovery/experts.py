"""Routed experts while a model is traced: which axes count them, which of them ran, and with what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fairpruner.core.units import UnitSpace


class ExpertLists:
    """The experts of the given spaces.

    Experts that are modules are in an `nn.ModuleList`. In slices, the path of this list is used like the name
    of a tensor whose dimension 0 counts the modules.
    """

    def __init__(self, model: nn.Module, spaces: Sequence[UnitSpace] = ()) -> None:
        self.axes = {(part.tensor, part.dim) for space in spaces for part in space.slices}
        self.lists = {
            name: list(module.children()) for name, module in model.named_modules() if (name, 0) in self.axes
        }
        # Parameters at the same place in all experts of a list, which are cut to the same shape.
        self.groups_of_twins: list[tuple[nn.Parameter, ...]] = [
            twins
            for listed in self.lists.values()
            for twins in zip(*(expert.parameters() for expert in listed), strict=True)
        ]
        self.twins = {id(p): twins for twins in self.groups_of_twins for p in twins}
        self._places = {
            id(expert): (name, number)
            for name, listed in self.lists.items()
            for number, expert in enumerate(listed)
        }
        self._inputs: dict[tuple[str, int], Any] = {}
        self._rows: dict[tuple[str, int], int] = {}  # that each expert was called with

    def entered(self, module: nn.Module, inputs: Any) -> None:
        """Note that a module was called with these inputs."""
        if id(module) in self._places and inputs:
            place = self._places[id(module)]
            self._inputs[place] = inputs[0]
            rows = inputs[0].shape[:-1].numel() if isinstance(inputs[0], Tensor) else 0
            self._rows[place] = self._rows.get(place, 0) + rows

    def running(self, modules: Sequence[nn.Module]) -> tuple[str, int] | None:
        """The list and the number of the expert among the running modules."""
        return next((self._places[id(m)] for m in modules if id(m) in self._places), None)

    def all_see_all(self, name: str) -> bool:
        """Whether every expert of a list was called with the same tensor, that is, with all tokens.

        Then removing an expert saves its work. If each token is sent to some experts only, the others take
        over the tokens of a removed expert, and no work is saved.
        """
        inputs = [self._inputs.get((name, number)) for number in range(len(self.lists[name]))]
        return inputs[0] is not None and all(x is inputs[0] for x in inputs)

    def rows(self, name: str) -> list[int]:
        """How many rows each expert of a list was called with."""
        return [self._rows.get((name, number), 0) for number in range(len(self.lists[name]))]
