"""Checks of a command's output, made before any work: it is writable, and nothing else is overwritten."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from fairpruner.core.marks import kind_of
from fairpruner.core.writing import is_at_or_below, remove_abandoned
from fairpruner.errors import FairprunerError
from fairpruner.files import PLAN
from fairpruner.files.folders import check_replaceable
from fairpruner.inputs.hugging_face import is_source, place_of

MODEL_FOLDER = "pruned model"


def check_output(path: Path, kind: str, *sources: str | Path | None, force: bool) -> None:
    """Refuse an output that would overwrite a source, or anything but an earlier output of the same kind.

    `sources` are the command's other arguments that may name a file or folder: models, weights, data, plans.
    """
    real = Path(os.path.realpath(path))
    nearest = next(parent for parent in real.parents if parent.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        raise FairprunerError(
            f"Cannot write {path}: {nearest} is not a folder, or it is not writable. Choose another place."
        )
    remove_abandoned(real.parent)
    for source in (place for given in sources for place in _places(given)):
        if is_at_or_below(source, path):
            raise FairprunerError(
                f"{path} is or holds {source}, which this command reads or writes: choose another output."
            )
    if not real.exists() or (real.is_dir() and kind == MODEL_FOLDER and not any(real.iterdir())):
        return
    if not force:
        raise FairprunerError(
            f"{path} already exists: choose another name, or replace it with --force if fairpruner wrote it."
        )
    _check_replaceable(real, kind)


def check_checkpoints(folder: Path | None, *sources: str | Path | None) -> None:
    """Refuse checkpoints in a folder that a command reads, or in that of a pruned model."""
    if folder is None:
        return
    taken = (folder / PLAN).exists() or any(
        is_at_or_below(source, folder) and is_at_or_below(folder, source)
        for given in sources
        for source in _places(given)
    )
    if taken:
        raise FairprunerError(
            f"--checkpoints {folder} is a folder that this command reads, or holds a pruned model: choose"
            " another one."
        )


def _check_replaceable(path: Path, kind: str) -> None:
    """Refuse to replace anything but an output of this kind that fairpruner wrote."""
    if kind == MODEL_FOLDER and path.is_dir():
        check_replaceable(path)
        return
    found = kind_of(path)
    if found != kind:
        raise FairprunerError(
            f"{path} is not a {kind} that fairpruner wrote, so --force does not replace it: choose another"
            " name, or remove it yourself."
        )
    if kind_of(path.parent / "model.safetensors") == "model" and path.name == PLAN:
        raise FairprunerError(f"{path} belongs to the pruned model in its folder: choose another name.")


def _places(given: str | Path | None) -> Iterator[Path]:
    """The files and folders that an argument may name: itself, or the part before or after its colon."""
    if isinstance(given, Path):
        yield given
    elif given is not None:
        texts = (place_of(given),) if is_source(given) else (given, given.rpartition(":")[0])
        yield from (Path(text) for text in texts if text and Path(text).exists())
