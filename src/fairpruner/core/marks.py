"""Marks in the files that fairpruner wrote: `--force` replaces only files with such a mark."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fairpruner.core.reading import parse_json, read_text
from fairpruner.errors import FairprunerError

PAGE, FIGURE, DATA, WEIGHTS = "page", "figure", "data", "weights"  # kinds of files that are not sealed
MEASUREMENT = "measurement"
ARRAY = "fairpruner.npy"  # in an .npz file, holds the mark
EDGE = 64 * 1024  # bytes at the beginning and at the end of a page or figure, where its mark is


def mark(kind: str) -> str:
    """The text that a file of this kind holds."""
    return f"fairpruner {kind}"


def kind_of(path: Path) -> str | None:
    """The kind of a file that fairpruner wrote, such as "plan" or "scores"; None for any other file."""
    if not path.is_file():
        return None
    try:
        found = _found(path) or ""
    except (OSError, ValueError, SafetensorError, zipfile.BadZipFile, FairprunerError):
        return None
    return found.removeprefix("fairpruner ") if found.startswith("fairpruner ") else None


def _found(path: Path) -> str | None:
    """The mark in a file, if it has one."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="numpy") as file:
            return _format(json.loads((file.metadata() or {}).get("fairpruner", "{}")))
    if path.suffix == ".npz":
        with zipfile.ZipFile(path) as archive:
            return mark(DATA) if ARRAY in archive.namelist() else None
    if path.suffix == ".json":
        return _format(parse_json(read_text(path), path))
    content = path.read_bytes() if path.stat().st_size <= 2 * EDGE else _edges(path)
    return next((mark(kind) for kind in (PAGE, FIGURE) if mark(kind).encode() in content), None)


def _format(content: Any) -> str | None:
    found = content.get("format") if isinstance(content, dict) else None
    return found if isinstance(found, str) else None


def _edges(path: Path) -> bytes:
    """The first and the last bytes of a file."""
    with path.open("rb") as file:
        start = file.read(EDGE)
        file.seek(-EDGE, 2)
        return start + file.read()
