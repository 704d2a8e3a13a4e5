"""A pruned model on disk: one folder with its plan, its tensors, a report of its numbers and a README.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fairpruner.core.marks import kind_of
from fairpruner.core.plan import Plan, check_plan
from fairpruner.core.sealed import VERSION, Json, digest, read_tensors, readable, write_tensors
from fairpruner.core.writing import written_whole
from fairpruner.errors import FairprunerError
from fairpruner.files import MODEL, PLAN, REPORT
from fairpruner.files.pretrained_files import CONFIG, PRETRAINED_FILES, write_pretrained_files
from fairpruner.files.removed_layers import without_removed_layers
from fairpruner.files.shards import SHARD, parse_size, write_shards
from fairpruner.inputs.checkpoint_layout import as_in_files
from fairpruner.inputs.hugging_face import is_model, is_source, pretrained
from fairpruner.inputs.shard_index import INDEX, shard_files
from fairpruner.inputs.sources import factory_of
from fairpruner.inputs.weights import fits
from fairpruner.models.counting import count_params
from fairpruner.models.narrowing import kept_indices, laid_out_as, lost_by, replaced_modules
from fairpruner.models.supported import check_supported
from fairpruner.models.torch_private import unsaved_buffers
from fairpruner.surgery import cut

README = "README.md"
SHARD_SIZE = "5GB"
ALIGNMENT = 64  # bytes; torch allocates memory at multiples of this address


def save(
    small: nn.Module,
    plan: Plan,
    folder: str | Path,
    *,
    build: str | None = None,
    max_shard_size: str | int = SHARD_SIZE,
    force: bool = False,
) -> None:
    """Write a cut model to a new folder: plan.json, model.safetensors, report.json and README.md.

    The README explains how to load the model; `build` is the source of the original architecture, such as
    "timm:resnet18", that it names. For a Hugging Face model, the folder also has the files that
    `transformers` reads: a configuration, tensors in files of at most `max_shard_size`, and the tokenizer if
    `build` is an "hf:" source. `force` replaces a folder that `save` wrote before.

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
    check_supported(small)
    check_plan(plan)
    _check_is_cut(small, plan)
    small = without_removed_layers(small) if is_model(small) else small
    state = _state(small)
    with new_folder(folder, force=force) as temporary:
        write_documents(small, plan, temporary, build)
        if is_model(small):
            write_shards(
                temporary,
                _storable(as_in_files(small, state)).items(),
                seal(plan),
                parse_size(max_shard_size),
            )
        else:
            write_tensors(temporary / MODEL, "model", seal(plan), _storable(state))


def load(
    folder: str | Path, build: Callable[[], nn.Module] | str | None = None, *, example: Any = None
) -> nn.Module:
    """Rebuild a saved model, bit for bit and in eval mode.

    The original architecture is built, cut by the saved plan, and filled with the saved tensors. `build` is a
    function or a source string that builds it, with any weights. A Hugging Face model needs no `build`,
    because the folder has its configuration. Dtypes come from the file; non-persistent buffers, plain
    attributes and requires_grad come from the model that is built. `example` is used as by `cut`. See `save`
    for an example.
    """
    folder = Path(folder)
    plan = Plan.load(folder / PLAN)
    files = shard_files(folder) or [folder / MODEL]
    if (folder / CONFIG).is_file():
        expected = seal(plan)
        parts = [_read(file, expected, folder) for file in files]
        original = (
            None if build is None or (isinstance(build, str) and is_source(build)) else type(_built(build))
        )
        model = pretrained(str(folder), original)
        for content, tensors in parts:
            # A streamed folder has the dtypes of the original files; its configuration names the right one.
            if "streamed" not in content:
                _restore_types(model, tensors)
        return _apart_from_files(model)
    if build is None:
        raise FairprunerError(
            f"Folder {folder} does not hold the original architecture: give build=, a function that builds it"
            " or a source such as 'timm:resnet18'."
        )
    small = cut(_built(build), plan, example=example)
    _fill(small, _read(folder / MODEL, seal(plan), folder)[1], folder / MODEL)
    return _apart_from_files(small).eval()


@contextmanager
def new_folder(folder: str | Path, *, force: bool) -> Iterator[Path]:
    """Yields a temporary folder, which is renamed to `folder` once everything is written.

    A `folder` that exists and is not empty is refused. With `force` it is replaced if `save` wrote it.
    """
    folder = Path(folder)
    _check_room(folder, force)
    with written_whole(folder, over_folder=force) as temporary:
        temporary.mkdir()
        yield temporary
        _check_room(folder, force)  # again, because writing may take hours


def _check_room(folder: Path, force: bool) -> None:
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not force:
        raise FairprunerError(
            f"Folder {folder} already exists and is not empty: choose another name, or remove it first."
        )
    check_replaceable(folder)


def check_replaceable(folder: Path) -> None:
    """Refuse to replace a folder that `save` did not write, or to which other files were added."""
    advice = "so it is not replaced: choose another name, or remove it yourself."
    if kind_of(folder / PLAN) != "plan":
        raise FairprunerError(f"Folder {folder} holds no {PLAN} of fairpruner, {advice}")
    for entry in sorted(folder.iterdir()):
        known = entry.name in {PLAN, REPORT, README, INDEX, *PRETRAINED_FILES}
        tensors = entry.name == MODEL or SHARD.fullmatch(entry.name) is not None
        if entry.is_symlink() or not (known or (tensors and kind_of(entry) == "model")):
            raise FairprunerError(
                f"Folder {folder} holds {entry.name}, which is not part of a pruned model, {advice}"
            )


def write_documents(small: nn.Module, plan: Plan, folder: Path, build: str | None) -> None:
    """Write every file of the folder except the tensors; of the model's tensors, only the shapes are used."""
    plan.save(folder / PLAN)
    (folder / REPORT).write_text(readable(_report(small, plan)) + "\n", encoding="utf-8")
    served = write_pretrained_files(small, plan, folder, build) if is_model(small) else None
    (folder / README).write_text(_readme(small, plan, build, served), encoding="utf-8")


def seal(plan: Plan) -> Json:
    """Metadata for the files of tensors: a digest of the plan that they belong to."""
    return {"plan": digest(plan.to_json())}


def _restore_types(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give each tensor its saved dtype; transformers gives all tensors the one dtype of the configuration."""
    for name, target in _state(model).items():
        if name in tensors and tensors[name].dtype != target.dtype:
            target.data = tensors[name].clone()


def _apart_from_files(model: nn.Module) -> nn.Module:
    """Copy the tensors that are views of a file at an address that torch would not have chosen.

    The last bits of a sum depend on the alignment of the memory.
    """
    for tensor in _state(model).values():
        if tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()
    return model


def _read(file: Path, expected: Json, folder: Path) -> tuple[Json, dict[str, torch.Tensor]]:
    """The metadata and the tensors of a file, refused if it was written for another plan."""
    content, tensors = read_tensors(file, "model")
    if content.get("plan") != expected["plan"]:
        raise FairprunerError(
            f"{PLAN} and {file.name} of folder {folder} do not belong together: restore the files of one"
            " call of save."
        )
    return content, tensors


def _built(build: Callable[[], nn.Module] | str) -> nn.Module:
    if isinstance(build, nn.Module):
        raise FairprunerError(
            f"build is a {type(build).__name__}, expected a function that makes one, or a source such as"
            " 'timm:resnet18': give for example build=lambda: model."
        )
    try:
        model = (factory_of(build) if isinstance(build, str) else build)()
    except FairprunerError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise FairprunerError(
            f"build={build!r} did not build a model: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise FairprunerError(
            f"build returned a {type(model).__name__}, expected the original architecture as a"
            " torch.nn.Module."
        )
    return model


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name; a shared one once, under its first name.

    A class may leave some out of its state dict, or rename them there.
    """
    extra = [name for name in model.state_dict() if name.endswith("_extra_state")]
    if extra:
        raise FairprunerError(
            f"{type(model).__name__} has state that is not a tensor ({', '.join(extra[:3])}), which cannot be"
            " saved without pickle: remove it from the state dict."
        )
    unsaved = unsaved_buffers(model)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in unsaved}
    return {**dict(model.named_parameters()), **buffers}


def _storable(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors on the CPU; no two share memory, because safetensors refuses that."""
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
    wrong = sorted(state.keys() ^ tensors.keys()) or [
        name for name in state if not fits(tensors[name], state[name])
    ]
    if wrong:
        raise FairprunerError(
            f"{path} does not fit the plan's model in {len(wrong)} tensors ({', '.join(wrong[:3])}): build"
            " the architecture that was pruned."
        )
    for name, target in state.items():
        # In place, so that tied parameters stay tied; in the same memory order, so that sums are equal.
        target.data = laid_out_as(target, tensors[name].to(target.device))


def _check_is_cut(model: nn.Module, plan: Plan) -> None:
    """Refuse a model whose shapes are not those that the plan leaves."""
    shapes = {
        name: list(tensor.shape)
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
    }
    shapes |= {
        name: [len(module)] for name, module in model.named_modules() if isinstance(module, nn.ModuleList)
    }  # the number of experts in a list
    expected = kept_indices(lost_by(model, plan.spaces), plan.removed)
    gone = tuple(f"{part.module}." for part in replaced_modules(plan.spaces, plan.removed))
    lists = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and name in expected
    )
    for name, by_dim in expected.items():
        if name.startswith((*lists, *gone)):
            continue  # the modules of a shortened list have new numbers; a removed block has no tensors
        found = shapes.get(name)
        for dim, kept in by_dim.items():
            if found is None or len(found) <= dim or found[dim] != len(kept):
                raise FairprunerError(
                    f"The model to save is not the cut of this plan: {name} has the shape {found}, and the"
                    f" plan keeps {len(kept)} along dim {dim}. Save the model that cut(model, plan) returned."
                )


def _report(small: nn.Module, plan: Plan) -> Json:
    content, kept = plan.to_json(), plan.kept
    spaces = [{"name": s.name, "kind": s.kind, "size": s.size, "kept": kept[s.name]} for s in plan.spaces]
    facts = {key: content[key] for key in ("rule", "alpha", "exact", "original", "predicted")}
    return {
        "format": "fairpruner report",
        "version": VERSION,
        **facts,
        "measured": {"params": count_params(small)},
        "spaces": spaces,
    }


def _readme(small: nn.Module, plan: Plan, build: str | None, served: str | None) -> str:
    source = (
        json.dumps(build)
        if build
        else "build_original  # a function that returns the original architecture, with any weights"
    )
    arguments = f", build={source}" if served is None else ""
    rows = "\n".join(
        f"| {metric} | {plan.original[metric]:,} | {plan.predicted[metric]:,} | {plan.share(metric):.1%} |"
        for metric in plan.predicted
    )
    return f"""# {type(small).__name__}, pruned with fairpruner

| | original | kept | share |
|---|---|---|---|
{rows}

FLOPs are multiply-accumulates; bytes are those of the parameters. `{PLAN}` lists the removed units, `{MODEL}`
holds the remaining tensors, and `{REPORT}` has the numbers above and those of each space.

```python
import fairpruner as fp

model = fp.load("path/to/this/folder"{arguments})
```
{served or ""}"""
