"""Numbers that were measured on models, from a mapping or a JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fairpruner.errors import FairprunerError

Measured = Mapping[
    str, Mapping[str, float]
]  # model -> number -> value: {"cut": {"accuracy": 0.91, "flops": 62e6}}


def measured_from(source: Measured | str | Path) -> Measured:
    """Plain numbers by model, out of a mapping or a JSON file of one.

    >>> measured_from({"cut": {"accuracy": np.float64(0.5)}})
    {'cut': {'accuracy': 0.5}}
    """
    found = read_json(source) if isinstance(source, (str, Path)) else source
    if not isinstance(found, Mapping) or not all(isinstance(numbers, Mapping) for numbers in found.values()):
        raise FairprunerError(
            f'Measured is {str(found)[:80]!r}, expected numbers by model: {{"cut": {{"accuracy": 0.91,'
            ' "flops": 62e6}}.'
        )
    return {
        model: {
            name: value.item() if isinstance(value, np.generic) else value for name, value in numbers.items()
        }
        for model, numbers in found.items()
    }


def check_measured(measured: Measured) -> None:
    """Refuse what is no finite number."""
    for model, numbers in measured.items():
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise FairprunerError(
                    f"Measured {name!r} of {model!r} is {value!r}, expected a finite number: leave out what"
                    " was not measured."
                )


def read_json(path: str | Path) -> Any:
    """The content of a JSON file."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FairprunerError(f"Cannot read {path}: {error}.") from error
    except ValueError as error:
        raise FairprunerError(f"{path} is no JSON file, or only a part of one: {error}.") from error
