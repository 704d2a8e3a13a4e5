"""Scores and plans on disk: safetensors for tensors, JSON for the rest, never pickle; every file is sealed with a digest."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import index
from pathlib import Path
from uuid import uuid4

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import FairprunerError
from ..latency import LatencyTable
from ..types import Plan, Scores
from .encoding import Json, compact, digest, latency_from_json, latency_to_json, plan_from_json, plan_to_json, readable, spaces_from_json, spaces_to_json

VERSION = 1  # of every file written here
SIGNALS = ("removals", "protections", "halves")  # the arrays of a Scores
PLAN, MODEL, REPORT = "plan.json", "model.safetensors", "report.json"  # of a pruned model's folder


def save_scores(scores: Scores, path: str | Path) -> None:
    """Write scores to one .safetensors file: arrays as float64 tensors, the rest as JSON in its metadata."""
    tensors = {
        _key(group, signal, space): torch.from_numpy(np.ascontiguousarray(values))
        for group in SIGNALS
        for signal, by_space in getattr(scores, group).items()
        for space, values in by_space.items()
    }
    signals = {group: list(getattr(scores, group)) for group in SIGNALS}  # the first of each is the active one
    content = {"samples": scores.samples, "settings": dict(scores.settings), "signals": signals, "spaces": spaces_to_json(scores.spaces)}
    with written_whole(path) as temporary:
        write_tensors(temporary, "scores", content, tensors)


def load_scores(path: str | Path) -> Scores:
    """Read what `save_scores` wrote, bit for bit."""
    content, tensors = read_tensors(Path(path), "scores")
    with _understanding(path):
        spaces = spaces_from_json(content["spaces"])
        arrays = {
            group: {
                signal: {name: tensors[_key(group, signal, name)].numpy() for name in spaces.names if _key(group, signal, name) in tensors}
                for signal in signals
            }
            for group, signals in content["signals"].items()
        }
        return Scores(spaces=spaces, samples=index(content["samples"]), settings=content["settings"], **arrays)


def _key(group: str, signal: str, space: str) -> str:
    return f"{group}/{signal}/{space}"


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan to one readable JSON file, which is enough for `cut`."""
    with written_whole(path) as temporary:
        write_plan(plan, temporary)


def load_plan(path: str | Path) -> Plan:
    """Read a plan; one without a digest was written or edited by hand, and what it costs is worked out anew."""
    content = _read_json(Path(path), "plan")
    with _understanding(path):
        return plan_from_json(content, edited=content.get("digest") is None)


def save_latency(table: LatencyTable, path: str | Path) -> None:
    """Write a latency table to one readable JSON file."""
    with written_whole(path) as temporary:
        temporary.write_text(readable(_sealed("latency table", latency_to_json(table))) + "\n", encoding="utf-8")


def load_latency(path: str | Path) -> LatencyTable:
    """Read what `save_latency` wrote."""
    content = _read_json(Path(path), "latency table")
    with _understanding(path):
        return latency_from_json(content)


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """A sibling to write a file or a folder to: it takes the name `path` only when all is written, and is gone if anything fails."""
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


def write_plan(plan: Plan, path: Path) -> None:
    path.write_text(readable(_sealed("plan", plan_to_json(plan))) + "\n", encoding="utf-8")


def write_tensors(path: Path, kind: str, content: Json, tensors: Mapping[str, torch.Tensor]) -> None:
    path.touch()
    mode = path.stat().st_mode  # safetensors would leave a file that only its owner can read
    save_file(dict(tensors), path, metadata={"format": "pt", "fairpruner": compact(_sealed(kind, content, tensors))})
    path.chmod(mode)


def _sealed(kind: str, content: Json, tensors: Mapping[str, torch.Tensor] | None = None) -> Json:
    return {"format": f"fairpruner {kind}", "version": VERSION, **content, "digest": digest(content, tensors)}


def _read_json(path: Path, kind: str) -> Json:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FairprunerError(f"Cannot read {path}: {error}.") from error
    return _opened(text, path, kind)


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


def _opened(text: str, path: Path, kind: str, tensors: Mapping[str, torch.Tensor] | None = None) -> Json:
    """The content of a file, once it is known to be ours, of this kind, not newer and not altered."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise FairprunerError(f"{path} is no JSON file, or only a part of one: {error}.") from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != f"fairpruner {kind}":
        raise FairprunerError(f"{path} holds {found or 'nothing that fairpruner wrote'}, expected a fairpruner {kind} file.")
    version = content.get("version")
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        raise FairprunerError(f"{path} has format version {version}, this fairpruner reads up to version {VERSION}: upgrade fairpruner.")
    body = {key: value for key, value in content.items() if key not in ("format", "version", "digest")}
    if content.get("digest") not in ((None, digest(body)) if tensors is None else (digest(body, tensors),)):
        advice = "restore it" + (", or delete its digest if the change is yours." if tensors is None else ".")
        raise FairprunerError(f"{path} was altered after it was written, its digest does not fit its content: {advice}")
    return dict(content)


@contextmanager
def _understanding(path: str | Path) -> Iterator[None]:
    """Turn a failure to make sense of a file's content into one sentence that names the file."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, FairprunerError) as error:
        detail = str(error) if isinstance(error, FairprunerError) else f"{type(error).__name__}: {error}"
        raise FairprunerError(f"The content of {path} does not make sense. {detail}") from error
