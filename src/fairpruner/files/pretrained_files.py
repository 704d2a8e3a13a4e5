"""What a saved model of Hugging Face has beside its tensors: its configuration, how it generates, its
tokenizer.

A configuration holds one number for all blocks. Where all of them lost equally many units, the new
numbers are written, and the folder is like any other; a model built from them proves it. Otherwise the
configuration lists the sizes of what differs, and a file of code beside it lets `transformers` build
that.
"""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from fairpruner.core.plan import Plan
from fairpruner.core.writing import is_at_or_below
from fairpruner.errors import FairprunerWarning
from fairpruner.files.removed_layers import removed_modules
from fairpruner.files.shrunk_config import EXPERTS, shrunk
from fairpruner.inputs import pruned_modeling
from fairpruner.inputs.hugging_face import auto_classes, is_source, local_file, place_of
from fairpruner.models import removed
from fairpruner.models.attention import STAND_INS
from fairpruner.models.code_names import names_in_code
from fairpruner.models.counts import IN_CONFIG
from fairpruner.models.narrow_heads import NarrowHeads

CONFIG, GENERATION, CODE = "config.json", "generation_config.json", "modeling_pruned.py"
PREPROCESSING_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "preprocessor_config.json",
    "processor_config.json",
)
PRETRAINED_FILES = {CONFIG, GENERATION, CODE, *PREPROCESSING_FILES}

BESIDE_SCALING = (
    "rope_theta",
    "partial_rotary_factor",
)  # in "rope_parameters" since transformers 5, before that beside "rope_scaling"


def write_pretrained_files(small: Any, plan: Plan, folder: Path, source: str | None) -> str:
    """Write all that belongs beside the tensors; returns the part of a README.md that tells who can load
    the folder.
    """
    original = getattr(type(small), "unpruned", type(small))
    config = _config_of(small, original)
    guess = shrunk(config, plan)
    obstacle = _obstacle(small, original, guess, plan)
    if obstacle is None:
        write_config(guess, folder / CONFIG)
        served = ANYWHERE.format(name=original.__name__)
    else:
        served = _write_code(small, original, config, plan, folder, obstacle)
    if small.can_generate():
        small.generation_config.to_json_file(folder / GENERATION)
    if source is not None and is_source(source):
        copy_files(place_of(source), PREPROCESSING_FILES, folder)
    return served


def _write_code(small: Any, original: Any, config: Any, plan: Plan, folder: Path, obstacle: str) -> str:
    """A configuration that lists what differs from the original, and the code that builds it."""
    config.pruned = _differences(small, _built(original, config), plan)
    standing_in = any(
        type(module) in STAND_INS.values() or isinstance(module, NarrowHeads) for module in small.modules()
    )  # classes of fairpruner, not of transformers
    autos = [] if standing_in else auto_classes(original)
    if autos:
        config.auto_map = {auto: f"{Path(CODE).stem}.{original.__name__}" for auto in autos}
    write_config(config, folder / CONFIG)
    if not autos:
        return NOWHERE.format(obstacle=obstacle)
    code = _code()
    closing = (
        f"\n\nimport transformers  # noqa: E402\n\n{original.__name__} ="
        f" pruned(transformers.{original.__name__})\n"
    )
    (folder / CODE).write_text(code + closing, encoding="utf-8")
    return WITH_CODE.format(auto=autos[0], obstacle=obstacle)


def _code() -> str:
    """The source of the modules that build a pruned model, as one file that needs no fairpruner."""
    first, second = (Path(m.__file__ or "").read_text(encoding="utf-8") for m in (removed, pruned_modeling))
    lines = [
        line for line in second.splitlines() if not line.startswith(("from __future__", "from fairpruner"))
    ]
    return first + "\n\n" + "\n".join(lines) + "\n"


ANYWHERE = """
Every block keeps the same numbers, so this is a folder like any other of its architecture. `transformers`
loads it by itself: `{name}.from_pretrained("path/to/this/folder")`. So do other programs that read such
folders: vLLM, SGLang, the converters of llama.cpp.
"""

WITH_CODE = """
Blocks keep different numbers ({obstacle}).
`transformers` loads them with the code in `modeling_pruned.py`, where fairpruner need not be installed:
`{auto}.from_pretrained("path/to/this/folder", trust_remote_code=True)`.
vLLM, SGLang and the converters of llama.cpp want equal blocks: a plan of `rule="uniform"` gives a folder that
they can load.
"""

NOWHERE = """
Only fairpruner can load this folder: {obstacle}, and `transformers` has no class for that.
"""


def write_config(config: Any, file: Path) -> None:
    """Write a configuration so that versions of `transformers` from before and since 5 read the same in
    it.
    """
    fields = _with_older_names(config, json.loads(config.to_json_string()))
    file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _with_older_names(config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration, some also by the names they had before transformers 5: where those
    lack, earlier versions take defaults without a word.
    """
    older = {
        name: fields[now] for name, now in config.attribute_map.items() if name in EXPERTS and now in fields
    }
    if "dtype" in fields:
        older["torch_dtype"] = fields["dtype"]
    rope = fields.get("rope_parameters") or {}
    if "rope_theta" in rope:  # else there are several, one for each kind of attention
        older |= {name: rope[name] for name in BESIDE_SCALING if name in rope}
        scaling = {name: value for name, value in rope.items() if name not in BESIDE_SCALING}
        older["rope_scaling"] = None if rope["rope_type"] == "default" else scaling
    parts = {
        name: _with_older_names(getattr(config, name), fields[name])
        for name in config.sub_configs
        if isinstance(fields.get(name), dict)
    }
    return {**older, **fields, **parts}


def _built(original: Any, config: Any) -> Any:
    """The class as the configuration describes it when it is read again, without memory for its tensors."""
    with TemporaryDirectory() as folder:
        write_config(config, Path(folder) / CONFIG)
        again = type(config).from_json_file(Path(folder) / CONFIG)
    with torch.device("meta"):
        return original(again)


def _differences(small: nn.Module, built: nn.Module, plan: Plan) -> dict[str, Any]:
    """Tensors of another shape, and the whole-number attributes that differ in what holds them or is
    counted by the plan. An attribute that the code of its module never mentions makes no difference.
    """
    shapes = {name: list(tensor.shape) for name, tensor in built.state_dict().items()}
    tensors = {
        name: list(tensor.shape)
        for name, tensor in small.state_dict().items()
        if list(tensor.shape) != shapes.get(name)
    }
    holders = {name.rsplit(".", depth)[0] for name in tensors for depth in range(1, name.count(".") + 1)}
    # Paths without the numbers of layers, because layers may have moved up.
    counting = {(_unnumbered(c.module), c.attribute) for space in plan.spaces for c in space.counts}
    counted = {
        (path, name)
        for path, module in small.named_modules()
        for name, _ in _sizes(module)
        if (_unnumbered(path), name) in counting
    }
    modules = {}
    for path in sorted(holders | {path for path, _ in counted}):
        before = dict(_sizes(built.get_submodule(path)))
        used = names_in_code(type(small.get_submodule(path)))
        changed = {
            name: value
            for name, value in _sizes(small.get_submodule(path))
            if value != before.get(name) and (used is None or name in used or (path, name) in counted)
        }
        if changed:
            modules[path] = changed
    if any(space.kind == "stream" and plan.removed[space.name] for space in plan.spaces):
        for path, module in small.named_modules():
            rescaled = _other_fractions(module, built.get_submodule(path))
            if rescaled:
                modules.setdefault(path, {}).update(rescaled)
    gone = removed_modules(small)
    return {"tensors": tensors, "modules": modules, **({"removed": gone} if gone else {})}


def _unnumbered(path: str) -> str:
    """A module's path without the numbers in it."""
    return re.sub(r"\d+", "#", path)


def _other_fractions(module: nn.Module, built: nn.Module) -> dict[str, float]:
    """The fractions that a module holds, such as the epsilon of a norm, where another module has others."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, float) and not math.isclose(value, vars(built).get(name, value), rel_tol=1e-9)
    }


def _sizes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The whole numbers that a module holds, and those of its configuration."""
    yield from ((name, value) for name, value in vars(module).items() if _is_size(value))
    config = vars(module).get("config")
    yield from (
        (f"{IN_CONFIG}{name}", value)
        for name, value in getattr(config, "__dict__", {}).items()
        if _is_size(value)
    )


def _is_size(value: Any) -> bool:
    """Whether it is a whole number, or several."""
    return type(value) is int or (
        type(value) is tuple and len(value) > 0 and all(type(item) is int for item in value)
    )


def _config_of(small: Any, original: Any) -> Any:
    config = copy.deepcopy(small.config)
    for name in ("pruned", "auto_map"):  # of a model that was pruned before
        config.__dict__.pop(name, None)
    config.architectures = [original.__name__]
    if small.device.type != "meta":
        setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", small.dtype)
    return config


def _obstacle(small: Any, original: Any, config: Any, plan: Plan) -> str | None:
    """Build the class from the configuration, and name the first thing that differs from the cut model."""
    try:
        built = _built(original, config)
    except Exception as error:
        return (
            f"no configuration gives its sizes ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        )
    found = _differences(small, built, plan)
    for part in found.get("removed", ()):
        return f"its block {part['module']} is removed from a layer that stays"
    for name, shape in found["tensors"].items():
        nearest = built.state_dict().get(name)
        return (
            f"a configuration holds one number for all blocks, and with the nearest one {name} would be"
            f" {None if nearest is None else list(nearest.shape)} instead of {shape}"
        )
    for path, attributes in found["modules"].items():
        name, value = next(iter(attributes.items()))
        return (
            f"with the nearest configuration {path}.{name} would be"
            f" {getattr(built.get_submodule(path), name, None)} instead of {value}"
        )
    return None


def copy_files(place: str, names: Iterable[str], folder: Path) -> None:
    """Copy some files of a model's folder or hub name; a symbolic link that leads out of the folder may lead
    to anything, and is not followed.
    """
    for name in names:
        file = local_file(place, name)
        if file is None:
            continue
        if Path(place).is_dir() and not is_at_or_below(file, place):
            warnings.warn(
                f"{file} is a symbolic link that leads out of its folder, and was not copied: copy what it"
                " leads to yourself if it belongs to the model.",
                FairprunerWarning,
                stacklevel=2,
            )
            continue
        shutil.copyfile(file, folder / name)
