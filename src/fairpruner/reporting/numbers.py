"""Measured numbers of models, from a mapping or a JSON file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fairpruner.core.marks import MEASUREMENT, mark
from fairpruner.core.reading import read_plain_json
from fairpruner.errors import FairprunerError

LARGEST = 1e300  # of a number; JSON allows whole numbers that no float can hold

# model -> name of a number -> value: {"cut": {"accuracy": 0.91, "flops": 62e6}}
NumbersByModel = Mapping[str, Mapping[str, float]]


def read_numbers(source: NumbersByModel | str | Path) -> NumbersByModel:
    """The numbers of each model as plain Python values, from a mapping or from a JSON file.

    The file may also be what `fairpruner measure --json` printed.

    >>> read_numbers({"cut": {"accuracy": np.float64(0.5)}})
    {'cut': {'accuracy': 0.5}}
    """
    found = read_plain_json(source) if isinstance(source, (str, Path)) else source
    if isinstance(found, Mapping) and found.get("format") == mark(MEASUREMENT):
        found = found.get("numbers")
    if not isinstance(found, Mapping) or not all(isinstance(numbers, Mapping) for numbers in found.values()):
        raise FairprunerError(
            f'measured is {str(found)[:80]!r}, expected numbers by model: {{"cut": {{"accuracy": 0.91,'
            ' "flops": 62e6}}.'
        )
    return {
        model: {name: _plain(value) for name, value in numbers.items()} for model, numbers in found.items()
    }


def _plain(value: float) -> float:
    """A number of numpy as one of Python."""
    return value.item() if isinstance(value, np.generic) else value


def check_numbers(measured: NumbersByModel) -> None:
    """Raise unless all values are finite numbers."""
    for model, numbers in measured.items():
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < LARGEST:
                raise FairprunerError(
                    f"The measured {name!r} of {model!r} is {str(value)[:60]}, expected a finite number:"
                    " leave out what was not measured."
                )
