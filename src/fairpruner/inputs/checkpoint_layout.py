"""The layout of a Hugging Face model in its files, which may differ from the layout in memory.

Tensors may have other names in files, and files may store experts one by one that the model holds as one
tensor. transformers 5 converts between both layouts. Its conversions are applied here to one part at a time.
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
    """Some tensors of the files, and the conversion that makes tensors of the model from them."""

    target: str  # the first tensor of the model that results
    conversion: Any  # an object of transformers, which does not hold tensors yet
    # (name in the files, the pattern of the conversion that this name matches)
    sources: list[tuple[str, str]] = field(default_factory=list)

    @property
    def stacks(self) -> bool:
        """Whether the conversion first stacks one tensor per expert along dimension 0."""
        operations: list[Any] = getattr(self.conversion, "operations", [])  # a renaming has none
        return any(type(first).__name__ == "MergeModulelist" and first.dim == 0 for first in operations[:1])

    def positions(self) -> Iterable[tuple[int, str, str]]:
        """(position, name, pattern) of every source; positions count the sources of one pattern.

        If experts are stacked, the position is the number of the expert.
        """
        seen: dict[str, int] = {}
        for name, pattern in self.sources:
            position = seen[pattern] = seen.get(pattern, -1) + 1
            yield position, name, pattern

    def convert(self, model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> State:
        """The model's tensors, from (pattern, tensor) pairs in the order of `sources`."""
        conversion = copy.deepcopy(self.conversion)
        for pattern, tensor in tensors:
            conversion.add_tensor(self.target, pattern, pattern, tensor)
        made = conversion.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def parts_of(model: Any, names: Collection[str]) -> list[ConvertedTensors]:
    """The conversions with which `transformers` would load tensors of these names into the model.

    Names that it would not load are left out. The conversions are noted on the model, for `as_in_files`.
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
    """The tensors of a model in the layout of files; before version 5, `transformers` has only one layout."""
    try:
        revert: Callable[[Any, State], State] = model_loading().revert_weight_conversion
    except FairprunerError:
        return state
    used = used_conversions(model)
    try:
        # If no conversion was needed to load the model, its files had the layout of memory. Other programs
        # only read the common layout of files, so None lets transformers choose the conversions.
        note_conversions(model, used or None)
        return revert(model, state)
    finally:
        note_conversions(model, used)
