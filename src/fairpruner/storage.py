"""Scores, plans and pruned models on disk: safetensors for tensors, JSON for the rest, never pickle."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import index
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from .costs import count_params
from .encoding import Json, compact, digest, plan_from_json, plan_to_json, readable, spaces_from_json, spaces_to_json
from .errors import FairprunerError
from .hugging_face import architecture, is_model
from .pretrained_files import PRETRAINED_FILES, config_file, write_pretrained_files
from .sources import factory_of
from .surgery import cut
from .types import METRICS, Plan, Scores

VERSION = 1  # of every file written here
SIGNALS = ("removals", "protections", "halves")  # the arrays of a Scores
PLAN, MODEL, REPORT, README = "plan.json", "model.safetensors", "report.json", "README.md"
FOLDER_FILES = {PLAN, MODEL, REPORT, README, *PRETRAINED_FILES}  # of a pruned model


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
        _write_plan(plan, temporary)


def load_plan(path: str | Path) -> Plan:
    """Read a plan; one without a digest was written or edited by hand, and what it costs is worked out anew."""
    content = _read_json(Path(path), "plan")
    with _understanding(path):
        return plan_from_json(content, edited=content.get("digest") is None)


def save(small: nn.Module, plan: Plan, folder: str | Path, *, build: str | None = None) -> None:
    """Write a cut model to a new folder: plan.json, model.safetensors, report.json and a README.md that says how to load it.

    `build` is the source of the original architecture ("timm:resnet18"), for that README. A model of Hugging Face gets its
    configuration too, and, if `build` is its "hf:" source, its tokenizer.

    >>> import fairpruner as fp, tempfile
    >>> def build(): return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> model = build()
    >>> plan = fp.Plan.removing(fp.discover(model, torch.zeros(1, 4)), {"0": (1, 5)})
    >>> small = fp.cut(model, plan)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fp.save(small, plan, folder)
    ...     again = fp.load(folder, build=build)
    >>> torch.equal(again[0].weight, small[0].weight)
    True
    """
    _check_is_cut(small, plan)
    folder = Path(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise FairprunerError(f"Folder {folder} already exists and is not empty: choose another name, or remove it first.")
    with written_whole(folder) as temporary:
        temporary.mkdir()
        _write_plan(plan, temporary / PLAN)
        write_tensors(temporary / MODEL, "model", {"plan": digest(plan_to_json(plan))}, _storable(_state(small)))
        (temporary / REPORT).write_text(readable(_report(small, plan)) + "\n", encoding="utf-8")
        (temporary / README).write_text(_readme(small, plan, _loading(small, plan, temporary, build)), encoding="utf-8")


def load(folder: str | Path, build: Callable[[], nn.Module] | str | None = None) -> nn.Module:
    """Rebuild a saved model, bit for bit and in eval mode: build the original architecture, cut it, fill in the saved tensors.

    `build` is a function or a source string; its weights do not matter. A model of Hugging Face can do without: its
    configuration lies in the folder. Non-persistent buffers and requires_grad come from what is built, dtypes from the file.
    See `save` for an example.
    """
    folder = Path(folder)
    plan = load_plan(folder / PLAN)
    content, tensors = read_tensors(folder / MODEL, "model")
    if content.get("plan") != digest(plan_to_json(plan)):
        raise FairprunerError(f"{PLAN} and {MODEL} of folder {folder} do not belong together: restore the two files that were saved at once.")
    model = _original(folder, build)
    if not isinstance(model, nn.Module):
        raise FairprunerError(f"build returned a {type(model).__name__}, expected the original architecture as a torch.nn.Module.")
    small = cut(model, plan)
    _fill(small, tensors, folder / MODEL)
    return small.eval()


def _original(folder: Path, build: Callable[[], nn.Module] | str | None) -> nn.Module:
    if build is not None:
        return (factory_of(build) if isinstance(build, str) else build)()
    config = config_file(folder)
    if config is None:
        raise FairprunerError(
            f"Folder {folder} does not say how to build the original architecture: give build=, a function or a source such as 'timm:resnet18'."
        )
    return architecture(str(config))


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name; a shared one once, under its first name."""
    kept = model.state_dict().keys()
    extra = [name for name in kept if name.endswith("_extra_state")]
    if extra:
        raise FairprunerError(f"{type(model).__name__} keeps state that is no tensor ({', '.join(extra[:3])}), which cannot be saved without pickle.")
    return {name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers()) if name in kept}


def _storable(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors on the CPU, each with memory of its own, as safetensors wants them."""
    memory: set[int] = set()
    stored = {}
    for name, tensor in state.items():
        tensor = tensor.detach().cpu().contiguous()
        pointer = tensor.untyped_storage().data_ptr()
        stored[name] = tensor.clone() if pointer in memory else tensor
        memory.add(pointer)
    return stored


def _fill(model: nn.Module, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    state = _state(model)
    wrong = sorted(state.keys() ^ tensors.keys()) or [name for name in state if state[name].shape != tensors[name].shape]
    if wrong:
        raise FairprunerError(f"{path} does not fit the plan's model in {len(wrong)} tensors ({', '.join(wrong[:3])}): build the architecture that was pruned.")
    for name, target in state.items():
        target.data = tensors[name].to(target.device)  # in place, so that what is tied stays tied


def _check_is_cut(model: nn.Module, plan: Plan) -> None:
    """Refuse to save a plan beside a model that it did not make."""
    removed: dict[tuple[str, int], Any] = {}  # (tensor, dim) -> [size of dim] whether the index goes
    for space in plan.spaces:
        for part in space.slices:
            gone = np.isin(part.owner, plan.removed[space.name])
            removed[part.tensor, part.dim] = removed.get((part.tensor, part.dim), False) | gone
    shapes = {name: list(tensor.shape) for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))}
    for (name, dim), gone in removed.items():
        kept, found = int((~gone).sum()), shapes.get(name)
        if found is None or len(found) <= dim or found[dim] != kept:
            raise FairprunerError(
                f"The model to save is not the plan's: it has {name} of shape {found}, the plan keeps {kept} along dim {dim}. Save what cut(model, plan) returned."
            )


def _report(small: nn.Module, plan: Plan) -> Json:
    content = plan_to_json(plan)
    spaces = [{"name": s.name, "kind": s.kind, "size": s.size, "kept": s.size - plan.depths[s.name]} for s in plan.spaces]
    facts = {key: content[key] for key in ("rule", "alpha", "exact", "original", "predicted")}
    return {"format": "fairpruner report", "version": VERSION, **facts, "measured": {"params": count_params(small)}, "spaces": spaces}


def _loading(small: nn.Module, plan: Plan, folder: Path, build: str | None) -> str:
    """The part of the README.md that tells how to load the model; writes what a model of Hugging Face needs for it."""
    if not is_model(small):
        source = json.dumps(build) if build else "build_original  # a function that returns the original architecture, with any weights"
        return LOADING.format(arguments=f", build={source}")
    obstacle = write_pretrained_files(small, plan, folder, build)
    alone = f"cannot load this folder: {obstacle}." if obstacle else f'loads it as well: `{type(small).__name__}.from_pretrained("path/to/this/folder")`.'
    return f"{LOADING.format(arguments='')}\nThe library `transformers` by itself {alone}\n"


def _readme(small: nn.Module, plan: Plan, loading: str) -> str:
    rows = "\n".join(f"| {metric} | {plan.original[metric]:,} | {plan.predicted[metric]:,} | {plan.share(metric):.1%} |" for metric in METRICS)
    return f"""# {type(small).__name__}, pruned with fairpruner

| | original | kept | share |
|---|---|---|---|
{rows}

FLOPs are multiply-accumulates. `{PLAN}` says which units went, `{MODEL}` holds what is left, `{REPORT}` the numbers above and those of each space.

{loading}"""


LOADING = """```python
import fairpruner as fp

model = fp.load("path/to/this/folder"{arguments})
```
"""


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


def _write_plan(plan: Plan, path: Path) -> None:
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
