"""Which modules run in a forward pass, and what they return: this shows in which module a cut goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fairpruner.models.torch_private import hooked_modules, is_transformed

Summary = tuple[torch.Size, float]  # shape and sum of magnitudes of an output


@dataclass
class Visits:
    """The modules that a forward pass has entered and not left, and a summary of what the others returned."""

    entered: list[str] = field(default_factory=list)
    returned: list[tuple[str, Summary]] = field(default_factory=list)

    @property
    def running(self) -> str | None:
        """The innermost module that was entered and not left: after an exception, the one that raised it."""
        return self.entered[-1] if self.entered else None


@contextmanager
def watching_modules(model: nn.Module, visits: Visits) -> Iterator[None]:
    """Record the visits of a forward pass through global hooks, so that the model gets none."""
    paths = {id(module): path for path, module in model.named_modules()}

    def enter(module: nn.Module, args: Any) -> None:
        if id(module) in paths:
            visits.entered.append(paths[id(module)])

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if id(module) in paths:
            visits.entered.pop()
            # Inside torch.vmap, an output has no numbers that Python could read.
            if isinstance(output, torch.Tensor) and output.is_floating_point() and not is_transformed(output):
                total = float(output.detach().abs().sum())
                visits.returned.append((paths[id(module)], (output.shape, total)))

    with hooked_modules(enter, leave):
        yield


def first_difference(a: Visits, b: Visits, tolerance: float) -> str | None:
    """The path of the first module that returned different numbers of the same shape in two passes."""
    for (path, (shape, total)), (other_path, (other_shape, other_total)) in zip(
        a.returned, b.returned, strict=False
    ):
        if path != other_path:
            return None
        if shape == other_shape and abs(total - other_total) > tolerance * abs(total):
            return path
    return None
