"""Checks of a Hugging Face folder before a model is built from it: its configuration can declare any size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fairpruner.core.reading import read_plain_json
from fairpruner.core.tensor_files import open_tensors
from fairpruner.errors import FairprunerError
from fairpruner.inputs.shard_index import shard_files

# A part of a setting's name -> the largest number; the largest models have a hundredth. Each such number is
# one of modules or of entries in a list, and building them takes time.
MOST = {"layers": 10_000, "depth": 10_000, "blocks": 10_000, "experts": 100_000, "labels": 10_000_000}


def check_numbers(place: Path) -> None:
    """Refuse a configuration that asks for more layers, experts or labels than any model has."""
    file = place / "config.json" if place.is_dir() else place
    for name, number in _numbers("", read_plain_json(file)) if file.is_file() else ():
        most = next((most for word, most in MOST.items() if word in name), None)
        if most is not None and number > most:
            raise FairprunerError(f"{name} of {file} is {number:.6g}, expected at most {most:,}.")


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Every number of a configuration with the name of its setting."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(key, item)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(name, item)
    elif type(value) in (int, float):
        yield name, value


def check_files_suffice(model: nn.Module, place: Path) -> None:
    """Refuse files with fewer numbers than a model on the device "meta" has parameters.

    transformers would allocate the rest, and fill it with random numbers.
    """
    files = shard_files(place)
    if not files or getattr(model.config, "quantization_config", None) is not None:
        return  # pickled or packed weights, which are not counted here
    held = 0
    for file in files:
        with open_tensors(file) as opened:
            held += sum(torch.Size(opened.shape(name)).numel() for name in opened.names)
    needed = sum(parameter.numel() for parameter in model.parameters())
    if held < needed:
        raise FairprunerError(
            f"The files of {place} hold {held:,} numbers, and its configuration needs {needed:,} for"
            f" {type(model).__name__}: give the complete folder of the model."
        )


def check_none_missing(model: nn.Module, missing: Any, place: str) -> None:
    """Refuse a model of which some weights were not in the files, and are random numbers."""
    names = sorted(missing)
    if names:
        raise FairprunerError(
            f"{len(names)} weights of {type(model).__name__} are missing in {place}"
            f" ({', '.join(names[:3])}), so they would be random: give the complete folder of the model, or"
            " load it yourself and pass it to the functions of fairpruner."
        )
