"""The check of some spaces in the module around them alone, which costs a fraction of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fairpruner.core.units import UnitSpace
from fairpruner.discovery.check import Check, Failure, cast, outputs
from fairpruner.discovery.failing import raise_if_out_of_memory
from fairpruner.discovery.heads import common_path
from fairpruner.discovery.watching import Visits
from fairpruner.models.calling import copied, in_eval_mode, output_tensors


def check_nearby(check: Check, spaces: Sequence[UnitSpace]) -> Check:
    """A check in the innermost module that holds all slices and counts of some spaces, called as a pass of
    the whole model calls it. It is the check of the whole model if there is no such module.

    A failure there is final. What passes there must still be checked in the whole model.
    """
    path = _around(spaces)
    for example in check.examples if path and _is_small(check.model, path) else ():
        found, given = _call_of(check, path, example)
        if found and _is_small(check.model, found):
            inside = [_inside(space, found) for space in spaces]
            # Choices for one space have one name, and one is checked at a time.
            unique = list({space.name: space for space in inside}.values())
            return _CheckInside(check.model.get_submodule(found), given, unique, path=found)
    return check


class _CheckInside(Check):
    """A check of one module, with the arguments of one of its calls."""

    def __init__(
        self, module: nn.Module, given: tuple[Any, Any], spaces: Sequence[UnitSpace], *, path: str
    ) -> None:
        super().__init__(module, [given], spaces)
        self._path = path

    def failure(self, spaces: Sequence[UnitSpace], *, rounds: int | None = None) -> Failure | None:
        return super().failure([_inside(space, self._path) for space in spaces], rounds=rounds)

    def _outputs(self, model: nn.Module, inputs: Any, visits: Visits) -> list[torch.Tensor]:
        """Of several outputs the first: others, such as weights for each head, may change with a cut."""
        positional, named = copied(inputs)
        with in_eval_mode(model), torch.no_grad():
            return list(output_tensors(model(*positional, **named)))[:1]


class _Reached(Exception):
    """The pass has come to the module that was looked for."""


def _call_of(check: Check, path: str, example: Any) -> tuple[str, tuple[Any, Any]]:
    """The innermost module at or above `path`, but the model itself, that a pass calls, and with what."""
    model = check.whole()
    calls: dict[str, tuple[Any, Any]] = {}
    parts = path.split(".")
    handles = []
    for length in range(1, len(parts) + 1):
        above = ".".join(parts[:length])

        def note(module: nn.Module, positional: Any, named: Any, above: str = above) -> None:
            calls.setdefault(above, copied((positional, named)))
            if above == path:
                raise _Reached

        handles.append(model.get_submodule(above).register_forward_pre_hook(note, with_kwargs=True))
    try:
        outputs(model, cast(example, torch.float32), Visits())
    except _Reached:
        pass
    except Exception as error:  # the user's code may raise anything in another type
        raise_if_out_of_memory(error, check.model)
        return "", ((), {})
    finally:
        for handle in handles:
            handle.remove()
    innermost = max(calls, key=len, default="")
    return innermost, calls.get(innermost, ((), {}))


def _is_small(model: nn.Module, path: str) -> bool:
    """Whether a module holds less than half of the model's parameters: then running it alone saves time."""
    part = sum(p.numel() for p in model.get_submodule(path).parameters())
    return 2 * part < sum(p.numel() for p in model.parameters())


def _around(spaces: Sequence[UnitSpace]) -> str:
    """The path of the innermost module that holds all slices and counts of some spaces."""
    holders = [part.tensor.rpartition(".")[0] for space in spaces for part in space.slices]
    return common_path([*holders, *(count.module for space in spaces for count in space.counts)])


def _inside(space: UnitSpace, path: str) -> UnitSpace:
    """The space with the names that its parts have inside a module."""
    return replace(
        space,
        slices=tuple(replace(part, tensor=part.tensor.removeprefix(f"{path}.")) for part in space.slices),
        counts=tuple(
            replace(count, module=count.module.removeprefix(path).lstrip(".")) for count in space.counts
        ),
    )
