"""How a model of Hugging Face lies in its files: under other names than in the model, or experts one by
one that the model holds as one tensor.

Since version 5 `transformers` converts on the way from files to model and back. What it does there is
asked of it, part by part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from fairpruner.errors import FairprunerError
from fairpruner.models.transformers_private import (
    conversions_for,
    model_loading,
    note_conversions,
    used_conversions,
)

State = dict[str, torch.Tensor]


@dataclass
class ConvertedTensors:
    """Some tensors of the files and the conversion that makes of them one or a few tensors of the model."""

    target: str  # the first tensor of the model that it makes
    conversion: Any  # of transformers; holds no tensors yet
    sources: list[tuple[str, str]] = field(
        default_factory=list
    )  # name in the files, and the pattern of the conversion that it fits

    @property
    def stacks(self) -> bool:
        """Whether it begins by stacking one tensor per expert along the first dimension."""
        operations: list[Any] = getattr(self.conversion, "operations", [])  # a renaming has none
        return any(type(first).__name__ == "MergeModulelist" and first.dim == 0 for first in operations[:1])

    def positions(self) -> Iterable[tuple[int, str, str]]:
        """Every source with its position among those of its pattern: the number of its expert, where they
        are stacked.
        """
        seen: dict[str, int] = {}
        for name, pattern in self.sources:
            position = seen[pattern] = seen.get(pattern, -1) + 1
            yield position, name, pattern

    def convert(self, model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> State:
        """The model's tensors, of (pattern, tensor) pairs in the order of `sources`."""
        conversion = copy.deepcopy(self.conversion)
        for pattern, tensor in tensors:
            conversion.add_tensor(self.target, pattern, pattern, tensor)
        made = conversion.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def parts_of(model: Any, names: Collection[str]) -> list[ConvertedTensors]:
    """How the tensors of files become those of a model, as `transformers` would load them; names that it
    would not use are left out.

    Notes on the model which conversions its files need, for `as_in_files`.
    """
    loading, mapping = model_loading(), conversions_for(model)
    renamings = [t for t in mapping if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in mapping if isinstance(t, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known = model.state_dict()
    parts: dict[str, ConvertedTensors] = {}
    for name in sorted(names, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(
            name, renamings, converters, model.base_model_prefix, known
        )
        if target not in known and name in known:
            target, pattern = name, None
        if target not in known:
            continue
        fresh = by_pattern[pattern] if pattern else loading.WeightRenaming(name, target)
        parts.setdefault(target, ConvertedTensors(target, fresh)).sources.append((name, pattern or name))
    note_conversions(model, [t for t in mapping if t.was_used()])
    return list(parts.values())


def as_in_files(model: Any, state: State) -> State:
    """The tensors of a model as its files hold them: the reverse of what loading does, in `transformers`
    before version 5 nothing.
    """
    try:
        revert: Callable[[Any, State], State] = model_loading().revert_weight_conversion
    except FairprunerError:
        return state
    used = used_conversions(model)
    try:
        # Files in the model's own layout needed none; other programs know only the common one.
        note_conversions(model, used or None)
        return revert(model, state)
    finally:
        note_conversions(model, used)
