"""Weights files: .safetensors, or checkpoints of torch that hold nothing but tensors."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fairpruner.core.tensor_files import read_all
from fairpruner.errors import FairprunerError, unknown


def load_weights(model: nn.Module, path: Path) -> None:
    """Copy a checkpoint into the model, refused unless names and shapes are those of the model."""
    found = _read_weights(path)
    expected = model.state_dict(keep_vars=True)
    # A tied tensor may be stored under only one of its names.
    filled = {id(expected[name]) for name in found if name in expected}
    problems = {
        "missing": [
            name for name, tensor in expected.items() if name not in found and id(tensor) not in filled
        ],
        "unexpected": [name for name in found if name not in expected],
        "of another shape or kind": [
            f"{n} {t.dtype}{list(t.shape)} for {expected[n].dtype}{list(expected[n].shape)}"
            for n, t in found.items()
            if n in expected and not fits(t, expected[n])
        ],
    }
    if any(problems.values()):
        listed = "; ".join(
            f"{len(names)} {what} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
            for what, names in problems.items()
            if names
        )
        raise FairprunerError(
            f"Weights {path} do not fit {type(model).__name__}: {listed}.{_prefix_hint(found, expected)}"
        )
    model.load_state_dict(found, strict=False)


def _prefix_hint(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """A sentence on the prefix of all stored names, such as "module.", if the model's names lack it."""
    first = next(iter(found), "")
    for name in expected:
        prefix = first.removesuffix(name)
        if first == prefix + name and prefix.endswith(".") and all(n.startswith(prefix) for n in found):
            return (
                f" Every stored name begins with {prefix!r}, which the model's names do not: save"
                f" {{name.removeprefix({prefix!r}): tensor for name, tensor in weights.items()}} instead."
            )
    return ""


def fits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a stored tensor can replace a model's tensor: same shape, and same kind of numbers."""
    kinds = [(t.is_floating_point(), t.is_complex(), t.dtype == torch.bool) for t in (found, expected)]
    return found.shape == expected.shape and kinds[0] == kinds[1]


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a weights file by name."""
    if not path.is_file():  # also refuses pipes and devices
        raise FairprunerError(f"No weights file {path}: give a .safetensors, .pt or .pth file.")
    readers: dict[str, Callable[[Path], Any]] = {
        ".safetensors": lambda file: read_all(file)[1],
        ".pt": _read_checkpoint,
        ".pth": _read_checkpoint,
    }
    if path.suffix not in readers:
        raise unknown("kind of weights file", path.suffix, readers)
    try:
        content = readers[path.suffix](path)
    except pickle.UnpicklingError as error:
        raise FairprunerError(
            f"Weights {path} hold more than tensors, which could run code, or the file is damaged: save"
            " model.state_dict() instead."
        ) from error
    except FairprunerError:
        raise
    except Exception as error:  # torch.load may raise anything on a file that is not a checkpoint
        reason = f"{type(error).__name__}: {str(error) or 'the file is empty or damaged'}"
        raise FairprunerError(f"Weights {path} cannot be read: {reason}") from error
    for wrapper in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in content.items()
    ):
        wrappers = _wrappers(content)
        step = f" Save the value of {wrappers[0]!r} alone; it holds tensors." if wrappers else ""
        raise FairprunerError(
            f"Weights {path} hold no state_dict: expected a mapping of names to tensors, alone or under"
            f" 'state_dict' or 'model'.{step}"
        )
    return dict(content)


def _wrappers(content: Any) -> list[str]:
    """The names under which a checkpoint holds mappings of names to tensors."""
    return [
        str(name)
        for name, value in (content.items() if isinstance(content, Mapping) else ())
        if isinstance(value, Mapping) and value and all(isinstance(t, torch.Tensor) for t in value.values())
    ]


def _read_checkpoint(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)
