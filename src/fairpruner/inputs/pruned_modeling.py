"""A pruned model for transformers: the original class, resized to the sizes under "pruned" in config.json.

`fairpruner` copies this file into the folder of a pruned model that an ordinary configuration cannot
describe. It needs only torch and transformers.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from fairpruner.models.constant_experts import Constants, leave_constants
from fairpruner.models.removed import remove


def pruned(original: Any) -> Any:
    """A subclass of the same name that resizes itself to `config.pruned` when it is built."""

    class Pruned(original):  # type: ignore[misc]  # a class of transformers, which ships no types
        unpruned = original

        def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(config, *arguments, **options)
            resize(self, config.pruned)

        @classmethod
        def is_custom_code(cls) -> bool:
            """False, so that transformers converts the tensors of files as for the original class."""
            return False

    Pruned.__name__ = Pruned.__qualname__ = original.__name__
    return Pruned


def resize(model: Any, sizes: Any) -> None:
    """Give a model the sizes of a pruned one.

    Modules in `sizes["removed"]` are replaced by modules without weights, experts in `sizes["constants"]` get
    constants for removed ones, tensors are shortened to the shapes in `sizes["tensors"]`, and the attributes
    in `sizes["modules"]` are set.
    """
    for part in sizes.get("removed", ()):
        remove(model.get_submodule(part["module"]), part["by"], part["argument"], part["outputs"])
    for path in sizes.get("constants", ()):
        removed, width = sizes["tensors"][f"{path}.constants.values"]
        (experts,) = sizes["tensors"][f"{path}.constants.number"]
        leave_constants(model.get_submodule(path), Constants(experts, removed, width))
    missing = sizes["tensors"].keys() - model.state_dict().keys()
    if missing:
        raise ValueError(
            f"{type(model).__name__} has no {min(missing)} in the transformers installed here: this folder"
            f" was written with {model.config.transformers_version}."
        )
    for name, shape in sizes["tensors"].items():
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        old = getattr(module, attribute)
        new = old.detach()[tuple(slice(length) for length in shape)].clone()
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
        setattr(module, attribute, new)
    for path, attributes in sizes["modules"].items():
        module = model.get_submodule(path)
        for attribute, value in attributes.items():
            holder, _, name = attribute.rpartition(".")
            if holder:  # a number of the module's configuration, which other modules share
                setattr(module, holder, copy.copy(getattr(module, holder)))
            target = getattr(module, holder) if holder else module
            fresh = tuple(value) if isinstance(value, list) else value
            _check_number(target, name, fresh)
            setattr(target, name, fresh)


def _check_number(target: Any, name: str, fresh: Any) -> None:
    """Refuse to set anything but numbers, or anything that is not a number now, such as a method."""
    held = vars(target).get(name, None if hasattr(target, name) else fresh)
    kinds = [{type(n) for n in (v if isinstance(v, (tuple, list)) else (v,))} for v in (held, fresh)]
    if kinds[0] != kinds[1] or kinds[1] not in ({int}, {float}):
        raise ValueError(
            f"config.json sets {name} of a {type(target).__name__} to {str(fresh)[:60]}, expected an"
            " attribute that holds such a number."
        )
