"""Sealed files: safetensors for tensors, JSON for the rest, never pickle; a digest shows any change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fairpruner.core.reading import parse_json, read_text
from fairpruner.core.tensor_files import read_all, save_tensors
from fairpruner.core.writing import written_whole
from fairpruner.errors import FairprunerError

Json = dict[str, Any]
VERSION = 1  # of every file written here
WIDTH = 120  # of a line of a readable file


def write_json(path: str | Path, kind: str, content: Json) -> None:
    """Write one readable, sealed JSON file."""
    with written_whole(path) as temporary:
        temporary.write_text(readable(_sealed(kind, content)) + "\n", encoding="utf-8")


def write_tensors(path: Path, kind: str, content: Json, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write one sealed safetensors file; the same values give the same bytes."""
    save_tensors(path, tensors, {"fairpruner": compact(_sealed(kind, content, tensors)), "format": "pt"})


def read_tensors(path: Path, kind: str) -> tuple[Json, dict[str, torch.Tensor]]:
    """The content and the tensors of a sealed safetensors file of one kind."""
    metadata, tensors = read_all(path)
    return _opened(metadata.get("fairpruner", "{}"), path, kind, tensors), tensors


def _sealed(kind: str, content: Json, tensors: Mapping[str, torch.Tensor] | None = None) -> Json:
    """The content with its kind, its version and its digest."""
    return {"format": f"fairpruner {kind}", "version": VERSION, **content, "digest": digest(content, tensors)}


def read_json(path: str | Path, kind: str) -> Json:
    """The content of a sealed JSON file of one kind."""
    return _opened(read_text(path), Path(path), kind)


def _opened(text: str, path: Path, kind: str, tensors: Mapping[str, torch.Tensor] | None = None) -> Json:
    """The content of a file, once it is known to be ours, of this kind, not newer and not altered."""
    content = parse_json(text, path)
    found = content.get("format") if isinstance(content, dict) else None
    shown = str(found or "nothing that fairpruner wrote")[:80]
    if found != f"fairpruner {kind}":
        raise FairprunerError(f"{path} holds {shown}, expected a fairpruner {kind} file.")
    version = content.get("version")
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        raise FairprunerError(
            f"{path} has format version {str(version)[:20]}, this fairpruner reads up to version {VERSION}:"
            " upgrade fairpruner."
        )
    body = {key: value for key, value in content.items() if key not in ("format", "version", "digest")}
    found_digest = content.get("digest")
    editable = tensors is None  # a JSON file without a digest was written or edited by hand
    if found_digest != digest(body, tensors) and not (editable and found_digest is None):
        advice = "restore it" + (", or delete its digest if the change is yours." if editable else ".")
        raise FairprunerError(
            f"{path} was altered after it was written, its digest does not fit its content: {advice}"
        )
    return dict(content)


def digest(content: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None) -> str:
    """SHA-256 of JSON content, independent of spacing and key order, and of the bits of tensors.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    state = hashlib.sha256(compact(content, sort_keys=True).encode())
    for name, tensor in sorted((tensors or {}).items()):
        state.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        state.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def compact(value: Any, *, sort_keys: bool = False) -> str:
    """JSON on one line."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=sort_keys)
    except (TypeError, ValueError) as error:
        raise FairprunerError(
            f"Only text, finite numbers, lists and mappings can be saved as JSON: {error}."
        ) from error


def readable(value: Any, indent: str = "") -> str:
    """JSON over several lines; a list of numbers, or what fits into 120 columns, is one line.

    >>> print(readable({"removed": {"conv1": [3, 1]}}))
    {"removed": {"conv1": [3, 1]}}
    """
    flat = compact(value)
    children = list(value.values()) if isinstance(value, dict) else []
    children = value if isinstance(value, list) else children
    if len(indent) + len(flat) <= WIDTH or not any(isinstance(child, (dict, list)) for child in children):
        return flat
    inner = indent + "  "
    keys = [f"{compact(str(key))}: " for key in value] if isinstance(value, dict) else [""] * len(value)
    lines = ",\n".join(
        f"{inner}{key}{readable(child, inner)}" for key, child in zip(keys, children, strict=True)
    )
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{lines}\n{indent}{closing}"
