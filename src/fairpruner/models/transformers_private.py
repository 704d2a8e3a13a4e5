"""All that fairpruner uses of transformers beyond its documented interface, in one place.

A release of transformers may change any of it. `tests/test_private_interfaces.py` names each of these, so
that such a change shows there first. Nothing here imports transformers before it is called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

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
