"""Checks that a model is the cut of another one by a plan, from the shapes of their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from fairpruner.core.plan import Plan
from fairpruner.errors import FairprunerError
from fairpruner.models.narrowing import kept_indices, lost_by, replaced_modules
from fairpruner.repair.tensors import tensors_by_name


@dataclass(frozen=True, eq=False)
class Shapes:
    """The shapes of the original's tensors."""

    by_name: Mapping[str, Sequence[int]]
    lists: Sequence[str]  # its module lists

    @staticmethod
    def of(model: nn.Module) -> Shapes:
        """The shapes of a model."""
        lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        return Shapes({name: tuple(t.shape) for name, t in tensors_by_name(model).items()}, lists)

    def check_cut(self, small: nn.Module, plan: Plan) -> None:
        """Refuse a model that does not have the shapes of the original's cut by this plan."""
        kept, found = kept_indices(lost_by(small, plan.spaces), plan.removed), tensors_by_name(small)
        gone = tuple(f"{part.module}." for part in replaced_modules(plan.spaces, plan.removed))
        shortened = tuple(f"{name}." for name in self.lists if name in kept)
        for name, shape in self.by_name.items():
            if name.startswith((*shortened, *gone)):
                continue  # the modules of a shortened list have new numbers; a removed block has no tensors
            left = kept.get(name, {})
            expected = [len(left[dim]) if dim in left else size for dim, size in enumerate(shape)]
            actual = list(found[name].shape) if name in found else None
            if actual != expected:
                raise FairprunerError(
                    f"The model to repair is not the cut of this plan: {name} has the shape {actual},"
                    f" expected {expected}. Give fp.cut(model, plan)."
                )
