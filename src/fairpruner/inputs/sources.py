"""Models by name.

A name is such as "timm:resnet18", "torchvision:resnet50", "hf:folder", "package.module:factory" or
"path/to/file.py:factory".
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import reduce
from importlib.machinery import SourceFileLoader
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fairpruner.core.reading import check_regular
from fairpruner.errors import FairprunerError, unknown
from fairpruner.inputs import hugging_face
from fairpruner.inputs.weights import load_weights

Factory = Callable[[], nn.Module]
Transform = Callable[[Any], torch.Tensor]  # a PIL image -> [3, H, W]
Normalisation = tuple[tuple[float, ...], tuple[float, ...]]  # mean and std, per channel

PRETRAINED = "pretrained"  # as the name of a weights file: the weights that the library offers
FILES = count(1)  # the numbers of the Python files that were run


@dataclass(frozen=True)
class Zoo:
    """A library of named models."""

    names: Callable[[ModuleType], Iterable[str]]
    build: Callable[[ModuleType, str, bool], nn.Module]  # library, name, pretrained
    # The preprocessing that the weights were trained with.
    transform: Callable[[ModuleType, str, nn.Module], Transform]


def _timm_transform(timm: ModuleType, name: str, model: nn.Module) -> Transform:
    data = importlib.import_module("timm.data")
    transform: Transform = data.create_transform(**data.resolve_model_data_config(model))
    return transform


def _torchvision_transform(torchvision: ModuleType, name: str, model: nn.Module) -> Transform:
    transform: Transform = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    return transform


ZOOS = {
    "timm": Zoo(
        names=lambda timm: timm.list_models(),
        build=lambda timm, name, pretrained: timm.create_model(name, pretrained=pretrained),
        transform=_timm_transform,
    ),
    "torchvision": Zoo(
        names=lambda torchvision: torchvision.models.list_models(),
        build=lambda torchvision, name, pretrained: torchvision.models.get_model(
            name, weights="DEFAULT" if pretrained else None
        ),
        transform=_torchvision_transform,
    ),
}
LIBRARIES = (*ZOOS, hugging_face.PREFIX)


def load_model(source: str, weights: str | Path | None = None) -> nn.Module:
    """The model that a source names, with weights from a .safetensors, .pt or .pth file.

    The weights "pretrained" are those that the library offers; "hf:" models have them by default.

    >>> load_model("torch.nn:Identity")
    Identity()
    """
    if weights == PRETRAINED or (weights is None and hugging_face.is_source(source)):
        return _build(source, pretrained=True)
    model = _build(source)
    if weights is not None:
        load_weights(model, Path(weights))
    return model


def factory_of(source: str) -> Factory:
    """A function that builds the model that a source names, with the weights that it starts from.

    >>> factory_of("torch.nn:Identity")()
    Identity()
    """
    return lambda: _build(source)


def is_zoo(source: str) -> bool:
    """Whether a source names a model of timm or torchvision, whose weights are random unless given."""
    return source.partition(":")[0] in ZOOS


def transform_of(source: str, model: nn.Module) -> Transform | None:
    """The preprocessing that a library prescribes for its model; None for a user's model."""
    library, _, name = source.partition(":")
    if library == hugging_face.PREFIX:
        return hugging_face.transform_of(hugging_face.place_of(source))
    return ZOOS[library].transform(_import_zoo(library), name, model) if library in ZOOS else None


def normalisation_of(source: str, model: nn.Module) -> Normalisation | None:
    """The mean and std per channel that a library prescribes for its model; None for a user's model.

    They are computed from what the library's preprocessing makes of a black and of a white image, because
    every library stores them in another way.
    """
    try:
        transform = transform_of(source, model)
        if transform is None:
            return None
        from PIL import Image  # a requirement of every such library

        images = [transform(Image.new("RGB", (256, 256), colour)) for colour in ("black", "white")]
        # [3] each; the median, because a library may pad the image
        black, white = (image.double().flatten(1).median(1).values for image in images)
    except Exception as error:  # a library may prescribe nothing for a model, or no images
        raise FairprunerError(
            f"The mean and std of {source} are not known ({error}): give --mean and --std."
        ) from error
    std = 1 / (white - black)
    return tuple((-black * std).tolist()), tuple(std.tolist())


def example_for(source: str, model: nn.Module) -> Any:
    """An example for a model of a library, as the library prescribes; None for a user's model."""
    if hugging_face.is_source(source):
        return hugging_face.example_for(model)
    transform = transform_of(source, model)
    if transform is None:
        return None
    from PIL import Image  # a requirement of every such library

    try:
        return transform(Image.new("RGB", (256, 256)))[None]
    except Exception as error:  # models of videos, for example, take no image
        raise FairprunerError(
            f"The input shape of {source} is not known: give it, such as 3,224,224."
        ) from error


def _build(source: str, pretrained: bool = False) -> nn.Module:
    """The model that a source names."""
    library, _, name = source.partition(":")
    if library == hugging_face.PREFIX:
        place = hugging_face.place_of(source)
        return hugging_face.pretrained(place) if pretrained else hugging_face.architecture(place)
    if pretrained and library not in ZOOS:
        raise FairprunerError(
            f"Source {source!r} offers no weights: {PRETRAINED!r} works with {', '.join(LIBRARIES)};"
            " give a weights file."
        )
    build = (
        _zoo_factory(library, name, pretrained)
        if library in ZOOS
        else resolve(source, (f"{library}:name" for library in LIBRARIES))
    )
    if not callable(build):
        raise FairprunerError(
            f"Source {source!r} is a {type(build).__name__}, expected a function that builds a model."
        )
    try:
        with importable_from(source):
            model = build()
    except Exception as error:
        raise FairprunerError(
            f"Source {source!r} did not build a model: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise FairprunerError(
            f"Source {source!r} built a {type(model).__name__}, expected a torch.nn.Module."
        )
    return model


def _zoo_factory(library: str, name: str, pretrained: bool) -> Factory:
    zoo, module = ZOOS[library], _import_zoo(library)
    names = set(zoo.names(module))
    if name.partition(".")[0] not in names:  # timm appends the weights' tag after a dot
        close = get_close_matches(name, names, n=1)
        raise FairprunerError(
            f"{library} has no model {name!r}{f': did you mean {close[0]!r}?' if close else '.'}"
        )
    return lambda: zoo.build(module, name, pretrained)


def _import_zoo(library: str) -> ModuleType:
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        raise FairprunerError(
            f"Source {library!r} needs a package that is not installed ({error.name}): pip install"
            f" 'fairpruner[{library}]'."
        ) from error
    except Exception as error:  # a build for another version of torch fails in many ways
        raise FairprunerError(
            f"{library} is installed but does not import ({error}): install the build that fits torch"
            f" {torch.__version__}."
        ) from error


def resolve(source: str, others: Iterable[str] = ()) -> Any:
    """The object that "package.module:name" or "path/to/file.py:name" names; an error lists other forms too.

    >>> resolve("math:pi")
    3.141592653589793
    """
    place, _, name = source.rpartition(":")
    if not place or not name:
        forms = ", ".join((*others, "package.module:function or path/to/file.py:function"))
        raise FairprunerError(f"Source {source!r} names no function: expected {forms}.")
    try:
        with importable_from(source):
            module = _run_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except FairprunerError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise FairprunerError(
            f"Source {source!r}: {place} does not import: {type(error).__name__}: {error}"
        ) from error
    try:
        return reduce(getattr, name.split("."), module)
    except AttributeError:
        raise unknown(
            f"function of {place}",
            name,
            [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")],
        ) from None


def _run_file(path: Path) -> ModuleType:
    """A Python file as a module with its own name in sys.modules, where dataclasses look it up."""
    check_regular(path)
    # A new name each time, so that files of the same name, and a file that changed, stay apart.
    name = f"{path.stem}_file_{next(FILES)}"
    loader = SourceFileLoader(name, str(path))
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


@contextmanager
def importable_from(source: str) -> Iterator[None]:
    """Inside, modules beside a source's file, or in the working folder, can be imported."""
    place = source.rpartition(":")[0]
    folder = str(Path(place).resolve().parent if place.endswith(".py") else Path.cwd())
    added = folder not in sys.path
    if added:
        sys.path.insert(0, folder)
    try:
        yield
    finally:
        if added and folder in sys.path:
            sys.path.remove(folder)
