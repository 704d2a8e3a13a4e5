"""Files on disk: safetensors for tensors, JSON for the rest, never pickle; every file is sealed with a
digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fairpruner.errors import FairprunerError

Json = dict[str, Any]
VERSION = 1  # of every file written here
WIDTH = 120  # of a line of a readable file


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """A sibling to write a file or a folder to: it takes the name `path` only when all is written, and is
    gone if anything fails.
    """
    path = Path(os.path.abspath(path))
    temporary = path.parent / f".{path.name}.{uuid4().hex[:8]}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            os.replace(temporary, path)
        finally:
            if temporary.is_dir():
                shutil.rmtree(temporary)
            else:
                temporary.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise FairprunerError(f"Cannot write {path}: {error}. Choose a place that can be written.") from error


def write_json(path: str | Path, kind: str, content: Json) -> None:
    """Write one readable, sealed JSON file."""
    with written_whole(path) as temporary:
        temporary.write_text(readable(_sealed(kind, content)) + "\n", encoding="utf-8")


def write_tensors(path: Path, kind: str, content: Json, tensors: Mapping[str, torch.Tensor]) -> None:
    path.touch()
    mode = path.stat().st_mode  # safetensors would leave a file that only its owner can read
    save_file(
        dict(tensors), path, metadata={"format": "pt", "fairpruner": compact(_sealed(kind, content, tensors))}
    )
    path.chmod(mode)


def read_tensors(path: Path, kind: str) -> tuple[Json, dict[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("fairpruner")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except OSError as error:
        raise FairprunerError(f"Cannot read {path}: {error}.") from error
    except SafetensorError as error:
        raise FairprunerError(f"{path} is no safetensors file, or only a part of one: {error}.") from error
    return _opened(text or "{}", path, kind, tensors), tensors


def _sealed(kind: str, content: Json, tensors: Mapping[str, torch.Tensor] | None = None) -> Json:
    return {"format": f"fairpruner {kind}", "version": VERSION, **content, "digest": digest(content, tensors)}


def read_json(path: str | Path, kind: str) -> Json:
    """The content of a sealed JSON file of one kind."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FairprunerError(f"Cannot read {path}: {error}.") from error
    return _opened(text, path, kind)


def _opened(text: str, path: Path, kind: str, tensors: Mapping[str, torch.Tensor] | None = None) -> Json:
    """The content of a file, once it is known to be ours, of this kind, not newer and not altered."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise FairprunerError(f"{path} is no JSON file, or only a part of one: {error}.") from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != f"fairpruner {kind}":
        raise FairprunerError(
            f"{path} holds {found or 'nothing that fairpruner wrote'}, expected a fairpruner {kind} file."
        )
    version = content.get("version")
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        raise FairprunerError(
            f"{path} has format version {version}, this fairpruner reads up to version {VERSION}: upgrade"
            " fairpruner."
        )
    body = {key: value for key, value in content.items() if key not in ("format", "version", "digest")}
    if content.get("digest") not in ((None, digest(body)) if tensors is None else (digest(body, tensors),)):
        advice = "restore it" + (", or delete its digest if the change is yours." if tensors is None else ".")
        raise FairprunerError(
            f"{path} was altered after it was written, its digest does not fit its content: {advice}"
        )
    return dict(content)


@contextmanager
def understanding(path: str | Path) -> Iterator[None]:
    """Turn a failure to make sense of a file's content into one sentence that names the file."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, FairprunerError) as error:
        detail = str(error) if isinstance(error, FairprunerError) else f"{type(error).__name__}: {error}"
        raise FairprunerError(f"The content of {path} does not make sense. {detail}") from error


def digest(content: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None) -> str:
    """SHA-256 over JSON content, whatever its spacing and key order, and over the bits of tensors.

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
    """JSON over several lines, with lists of numbers and all that fits within 120 columns on one.

    >>> print(readable({"removed": {"conv1": [3, 1]}}))
    {"removed": {"conv1": [3, 1]}}
    """
    flat = compact(value)
    children = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if len(indent) + len(flat) <= WIDTH or not any(isinstance(child, (dict, list)) for child in children):
        return flat
    inner = indent + "  "
    keys = [f"{compact(str(key))}: " for key in value] if isinstance(value, dict) else [""] * len(value)
    lines = ",\n".join(
        f"{inner}{key}{readable(child, inner)}" for key, child in zip(keys, children, strict=True)
    )
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{lines}\n{indent}{closing}"
