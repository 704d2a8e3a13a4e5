"""All that fairpruner uses of transformers beyond its documented interface, in one place.

A release of transformers may change any of it. `tests/test_private_interfaces.py` names each of these, so
that such a change shows there first. Nothing here imports transformers before it is called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fairpruner.errors import FairprunerError

ONE_BY_ONE = "eager"  # the implementation that runs experts one after the other
OURS = "fairpruner"  # the name under which our own implementation is registered


@contextmanager
def experts_run_by(implementation: str, configs: Iterable[Any]) -> Iterator[None]:
    """Inside, the models of these configurations run their fused experts in another way."""
    known = {id(config): config for config in configs if hasattr(config, "_experts_implementation")}
    before = [(config, config._experts_implementation) for config in known.values()]
    try:
        for config, _ in before:
            config._experts_implementation = implementation
        yield
    finally:
        for config, found in before:
            config._experts_implementation = found


@contextmanager
def experts_implementation(run: Callable[..., Tensor]) -> Iterator[str]:
    """Inside, transformers knows `run` as a way to call fused experts; the yielded name selects it."""
    ways = importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
    ways[OURS] = run
    try:
        yield OURS
    finally:
        del ways[OURS]


def apply_gate(experts: Any, up: Tensor) -> Tensor:
    """The activations of gated experts from their joined gate and up projections, [P, 2 I] -> [P, I]."""
    gated: Tensor = experts._apply_gate(up)
    return gated


def model_loading() -> Any:
    """The module that turns the tensors of files into those of a model."""
    try:
        return importlib.import_module("transformers.core_model_loading")
    except ModuleNotFoundError as error:
        raise FairprunerError(
            "Cutting files without loading the model needs transformers 5: pip install -U 'transformers>=5'."
        ) from error


def conversions_for(model: nn.Module) -> list[Any]:
    """The renamings and conversions that the files of a model's class may need."""
    mapping = importlib.import_module("transformers.conversion_mapping")
    found: list[Any] = mapping.get_model_conversion_mapping(model)
    return found


def used_conversions(model: Any) -> Any:
    """The conversions that transformers used to load a model; None if the model has no note of them."""
    return getattr(model, "_weight_conversions", None)


def note_conversions(model: Any, conversions: Any) -> None:
    """Note on a model which conversions its files need."""
    model._weight_conversions = conversions


def classes_of(auto_class: Any) -> Iterator[Any]:
    """The names of the classes that an Auto class of transformers builds, some of them in tuples."""
    mapping = getattr(auto_class, "_model_mapping", None)
    if mapping is not None:
        yield from mapping._model_mapping.values()


def compute_buffers(model: Any) -> None:
    """Give the buffers of a model on the meta device that no file holds the numbers that its code computes.

    They are tables such as the frequencies of rotary positions. Parameters stay on the meta device.
    """
    whole = importlib.import_module("transformers").PreTrainedModel
    owners = {path: module for path, module in model.named_modules() if isinstance(module, whole)}
    for path, module in model.named_modules():
        lost = {name: b for name, b in module.named_buffers(recurse=False) if b is not None and b.is_meta}
        for name, buffer in lost.items():
            module._buffers[name] = torch.empty_like(buffer, device="cpu").fill_(
                torch.nan if buffer.is_floating_point() else 0
            )
        if lost:
            nearest = max((own for own in owners if f"{path}.".startswith(f"{own}.") or not own), key=len)
            owners[nearest]._init_weights(module)
            wrong = next((name for name in lost if module._buffers[name].isnan().any()), None)
            if wrong is not None:
                raise FairprunerError(
                    f"The table {path}.{wrong} of {type(model).__name__} is neither in its files nor computed"
                    " when it is loaded: load the model, and leave out --stream."
                )
