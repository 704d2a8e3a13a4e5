"""What a saved model of Hugging Face has beside its tensors: its configuration, how it generates, its tokenizer.

A configuration holds one number for all blocks. Where all of them lost equally many units, the new numbers are written, so
that `transformers` can load the folder by itself; a model built from them proves it.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .hugging_face import is_source, local_file, place_of
from .types import Plan

CONFIG, ORIGINAL_CONFIG, GENERATION = "config.json", "original_config.json", "generation_config.json"
PREPROCESSING_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "preprocessor_config.json",
    "processor_config.json",
)
PRETRAINED_FILES = {CONFIG, ORIGINAL_CONFIG, GENERATION, *PREPROCESSING_FILES}

# What configurations call the number of hidden units of a block, and the number of its heads.
HIDDEN = ("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "hidden_dim", "n_inner")
HEADS = ("num_attention_heads", "num_key_value_heads", "encoder_attention_heads", "decoder_attention_heads")


def write_pretrained_files(small: Any, plan: Plan, folder: Path, source: str | None) -> str | None:
    """Write all that belongs beside the tensors; returns why `transformers` alone cannot load the folder, None where it can.

    The configuration of the original architecture is in `original_config.json` where `config.json` tells the new sizes.
    """
    original = _config_of(small)
    shrunk = _shrunk(original, plan)
    obstacle = _obstacle(small, shrunk, plan)
    (original if obstacle else shrunk).to_json_file(folder / CONFIG)
    if obstacle is None:
        original.to_json_file(folder / ORIGINAL_CONFIG)
    if small.can_generate():
        small.generation_config.to_json_file(folder / GENERATION)
    if source is not None and is_source(source):
        _copy_preprocessing(place_of(source), folder)
    return obstacle


def config_file(folder: Path) -> Path | None:
    """The configuration of the original architecture in the folder of a pruned model, None if it is not of Hugging Face."""
    return next((folder / name for name in (ORIGINAL_CONFIG, CONFIG) if (folder / name).is_file()), None)


def _config_of(small: Any) -> Any:
    config = copy.deepcopy(small.config)
    config.architectures = [type(small).__name__]
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", small.dtype)
    return config


def _shrunk(config: Any, plan: Plan) -> Any:
    """The configuration with the new numbers wherever an old number is that of a space; whether they fit is for `_obstacle` to say."""
    kept: dict[str, dict[int, int]] = {"head": {}, "hidden": {}}
    for space in plan.spaces:
        kept.setdefault(space.kind, {})[space.size] = space.size - plan.depths[space.name]
    config = copy.deepcopy(config)
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        for name in _own_names(part, HIDDEN):
            width = getattr(part, name) or 4 * part.hidden_size  # GPT-2's default
            if width in kept["hidden"]:
                setattr(part, name, kept["hidden"][width])
        heads = {name: getattr(part, name) for name in _own_names(part, HEADS)}
        head_dim = getattr(part, "head_dim", None) or getattr(part, "hidden_size", 0) // getattr(part, "num_attention_heads", 1)
        for name, count in heads.items():
            units = heads.get("num_key_value_heads") or count  # one unit is a key-value head with its query heads
            if units in kept["head"] and kept["head"][units] < units:
                setattr(part, name, count * kept["head"][units] // units)
                part.head_dim = head_dim
    return config


def _own_names(config: Any, names: tuple[str, ...]) -> Iterator[str]:
    """Those of the names that a configuration has, each of its numbers once: some go by two names."""
    return iter(dict.fromkeys(config.attribute_map.get(name, name) for name in names if hasattr(config, name)))


def _obstacle(small: Any, config: Any, plan: Plan) -> str | None:
    """Build the class from the configuration as it would be read again, and name the first thing that differs from the cut model."""
    try:
        again = type(config).from_dict(json.loads(config.to_json_string()))
        with torch.device("meta"):
            built = type(small)(again)
    except Exception as error:
        return f"no configuration gives its sizes ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    shapes = {name: list(tensor.shape) for name, tensor in built.state_dict().items()}
    for name, tensor in small.state_dict().items():
        if shapes.get(name) != list(tensor.shape):
            return (
                f"a configuration holds one number for all blocks, and with the nearest one {name} would be {shapes.get(name)} instead of {list(tensor.shape)}"
            )
    for count in (count for space in plan.spaces for count in space.counts):
        expected, found = (getattr(model.get_submodule(count.module), count.attribute, None) for model in (small, built))
        if expected != found:
            return f"with the nearest configuration {count.module}.{count.attribute} would be {found} instead of {expected}"
    return None


def _copy_preprocessing(place: str, folder: Path) -> None:
    for name in PREPROCESSING_FILES:
        file = local_file(place, name)
        if file is not None:
            shutil.copyfile(file, folder / name)
