"""Whether a copy of a model stands alone: a cut is a copy, and must neither use nor change the original.

A function that is set on an instance (`model.forward = …`, a hook), a weak reference or a global variable may
lead to modules or tensors of the original. `copy.deepcopy` copies none of these, so the copy still uses the
original.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fairpruner.discovery.check import Check, cast, outputs
from fairpruner.discovery.failing import first_line, raise_if_out_of_memory
from fairpruner.discovery.watching import Visits
from fairpruner.errors import FairprunerError
from fairpruner.models.torch_private import TorchDispatchMode, tree_flatten

STEP = (
    "Copies share functions, weak references and global variables with the original: let every module use"
    " only what it holds itself."
)


def check_separate(check: Check) -> None:
    """Refuse a model of which a copy uses tensors, or changes attributes, of the original."""
    model, copy = check.model, check.whole()
    uses = _Uses(model)
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    for position, example in enumerate(check.examples):
        try:
            with uses:
                outputs(copy, cast(example, torch.float32), Visits())
        except Exception as error:  # noqa: PERF203 (the user's code may raise anything in another type)
            raise_if_out_of_memory(error, model)
            if not check.runs(None, position):
                raise FairprunerError(
                    f"A copy of {type(model).__name__} with random weights cannot run, so that no cut can be"
                    f" checked: {first_line(error)}. If it takes inputs of a special kind alone, give one by"
                    " example=."
                ) from error
    if uses.found:
        raise FairprunerError(
            f"A copy of {type(model).__name__} uses {', '.join(sorted(uses.found)[:3])} of the original, so"
            f" it cannot be cut. {STEP}"
        )
    for path, module in model.named_modules():
        name = _changed(before.get(path, {}), vars(module))
        if name is not None:
            raise FairprunerError(
                f"A copy of {type(model).__name__} sets {f'{path}.{name}'.lstrip('.')} of the original, so it"
                f" cannot be cut. {STEP}"
            )


def _changed(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    return next((name for name in now if name not in before or now[name] is not before[name]), None)


class _Uses(TorchDispatchMode):
    """Notes the names of a model's tensors that operations use."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {_memory(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for value in tree_flatten((args, kwargs))[0]:
            if isinstance(value, torch.Tensor) and _memory(value) in self._names:
                self.found.add(self._names[_memory(value)])
        return func(*args, **(kwargs or {}))


def _memory(tensor: torch.Tensor) -> int:
    """What identifies a tensor: the address of its numbers, or its id if it has none."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
    return tensor.data_ptr() if plain and tensor.numel() and not tensor.is_meta else id(tensor)
