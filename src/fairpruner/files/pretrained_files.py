"""The files of a saved Hugging Face model besides its tensors: configuration, generation settings, tokenizer.

A configuration has one number for all blocks. If all blocks keep the same number of units, the configuration
gets the new numbers, and `transformers` loads the folder like any other. A model is built from this
configuration to prove it. If blocks keep different numbers, the configuration lists every size that differs,
and a Python file in the folder lets `transformers` build such a model.
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
from fairpruner.models import constant_experts, removed
from fairpruner.models.attention import FEWER_HEADS
from fairpruner.models.code_names import names_in_code
from fairpruner.models.constant_experts import ConstantExperts
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
)  # transformers 5 has them inside "rope_parameters", earlier versions beside "rope_scaling"


def write_pretrained_files(small: Any, plan: Plan, folder: Path, source: str | None) -> str:
    """Write these files; returns the part of the README.md on the programs that can load the folder."""
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
    """Write a configuration that lists every size that differs from the original, and the code for it."""
    config.pruned = _differences(small, _built(original, config), plan)
    standing_in = any(
        type(module) in FEWER_HEADS.values() or isinstance(module, NarrowHeads) for module in small.modules()
    )  # classes of fairpruner, which transformers cannot import
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
    first, *others = (
        Path(m.__file__ or "").read_text(encoding="utf-8")
        for m in (removed, constant_experts, pruned_modeling)
    )
    lines = [
        line
        for other in others
        for line in ["", "", *other.splitlines()]
        if not line.startswith(("from __future__", "from fairpruner"))
    ]
    return first + "\n".join(lines) + "\n"


ANYWHERE = """
All blocks keep the same numbers of units, so this is an ordinary folder of its architecture. `transformers`
loads it without fairpruner: `{name}.from_pretrained("path/to/this/folder")`. So do other programs that read
such folders: vLLM, SGLang, and the converters of llama.cpp.
"""

WITH_CODE = """
An ordinary configuration cannot describe this model: {obstacle}.
`transformers` loads it with the code in `modeling_pruned.py`, without fairpruner:
`{auto}.from_pretrained("path/to/this/folder", trust_remote_code=True)`.
vLLM, SGLang and the converters of llama.cpp need an ordinary configuration: a plan with `rule="uniform"`, not
repaired by `constants`, gives a folder that they can load.
"""

NOWHERE = """
Only fairpruner can load this folder: {obstacle}, and `transformers` has no class for such a model.
"""


def write_config(config: Any, file: Path) -> None:
    """Write a configuration that transformers 5 and earlier versions read in the same way."""
    fields = _with_older_names(config, json.loads(config.to_json_string()))
    file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _with_older_names(config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration, and copies of some under the names they had before transformers 5.

    Without these names, earlier versions silently use their defaults.
    """
    older = {
        name: fields[now] for name, now in config.attribute_map.items() if name in EXPERTS and now in fields
    }
    if "dtype" in fields:
        older["torch_dtype"] = fields["dtype"]
    rope = fields.get("rope_parameters") or {}
    if "rope_theta" in rope:  # otherwise there is one set of parameters for each kind of attention
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
    """The model of a configuration that was written to a file and read again, on the meta device."""
    with TemporaryDirectory() as folder:
        write_config(config, Path(folder) / CONFIG)
        again = type(config).from_json_file(Path(folder) / CONFIG)
    with torch.device("meta"):
        return original(again)


def _differences(small: nn.Module, built: nn.Module, plan: Plan) -> dict[str, Any]:
    """How the cut model differs from one that was built from a configuration.

    `tensors` has the shapes that differ, `modules` the attributes that differ, `removed` the modules that the
    cut replaced by modules without weights, and `constants` the experts that left constants behind.
    """
    shapes = {name: list(tensor.shape) for name, tensor in built.state_dict().items()}
    tensors = {
        name: list(tensor.shape)
        for name, tensor in small.state_dict().items()
        if list(tensor.shape) != shapes.get(name)
    }
    modules = _other_sizes(small, built, tensors.keys() & shapes.keys(), plan)
    if any(space.kind == "stream" and plan.removed[space.name] for space in plan.spaces):
        for path, module in small.named_modules():
            rescaled = _other_fractions(module, built.get_submodule(path))
            if rescaled:
                modules.setdefault(path, {}).update(rescaled)
    rare = {
        "removed": removed_modules(small),
        "constants": [path for path, m in small.named_modules() if isinstance(m, ConstantExperts)],
    }
    return {"tensors": tensors, "modules": modules, **{name: found for name, found in rare.items() if found}}


def _other_sizes(
    small: nn.Module, built: nn.Module, tensors: Iterable[str], plan: Plan
) -> dict[str, dict[str, Any]]:
    """Module path -> the whole-number attributes that differ from those of the built model.

    Two kinds of attributes can matter: those that the plan counts units with, and those of modules that
    hold `tensors`, the names of tensors with other shapes, if the code of their module mentions them.
    """
    holders = {name.rsplit(".", depth)[0] for name in tensors for depth in range(1, name.count(".") + 1)}
    # Paths are compared without the numbers of layers, because removed layers change these numbers.
    counting = {(_unnumbered(c.module), c.attribute) for space in plan.spaces for c in space.counts}
    counted = {
        (path, name)
        for path, module in small.named_modules()
        for name, _ in _sizes(module)
        if (_unnumbered(path), name) in counting
    }
    found = {}
    for path in sorted(holders | {path for path, _ in counted}):
        module = small.get_submodule(path)
        before, mentioned = dict(_sizes(built.get_submodule(path))), names_in_code(type(module))
        changed = {
            name: value
            for name, value in _sizes(module)
            if value != before.get(name)
            and (mentioned is None or name in mentioned or (path, name) in counted)
        }
        if changed:
            found[path] = changed
    return found


def _unnumbered(path: str) -> str:
    """A module's path with # for each number in it."""
    return re.sub(r"\d+", "#", path)


def _other_fractions(module: nn.Module, built: nn.Module) -> dict[str, float]:
    """The float attributes of a module, such as the epsilon of a norm, that differ in the built module."""
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
    """Whether a value is a whole number, or a tuple of whole numbers."""
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
    """The first difference between the cut model and the model of this configuration; None if they agree."""
    try:
        built = _built(original, config)
    except Exception as error:
        return (
            "transformers cannot build a model of its sizes"
            f" ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        )
    found = _differences(small, built, plan)
    for part in found.get("removed", ()):
        return f"the block {part['module']} is removed and the rest of its layer is kept"
    for path in found.get("constants", ()):
        return f"experts that were removed from {path} left constants behind"
    for name, shape in found["tensors"].items():
        nearest = built.state_dict().get(name)
        return (
            f"a configuration has one number for all blocks, and with the nearest numbers {name} would have"
            f" the shape {None if nearest is None else list(nearest.shape)} instead of {shape}"
        )
    for path, attributes in found["modules"].items():
        name, value = next(iter(attributes.items()))
        return (
            f"with the nearest configuration, {path}.{name} would be"
            f" {getattr(built.get_submodule(path), name, None)} instead of {value}"
        )
    return None


def copy_files(place: str, names: Iterable[str], folder: Path) -> None:
    """Copy some files of a model's folder or hub name.

    A symbolic link to a place outside of the folder is not followed, because it may name any file.
    """
    for name in names:
        file = local_file(place, name)
        if file is None:
            continue
        if Path(place).is_dir() and not is_at_or_below(file, place):
            warnings.warn(
                f"{file} was not copied, because it is a symbolic link to a place outside of its folder: copy"
                " its target yourself if it belongs to the model.",
                FairprunerWarning,
                stacklevel=2,
            )
            continue
        shutil.copyfile(file, folder / name)
