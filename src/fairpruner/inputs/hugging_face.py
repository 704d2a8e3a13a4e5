"""Models of Hugging Face by "hf:folder-or-name", with tokenizers, image preprocessing and examples."""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fairpruner.errors import FairprunerError
from fairpruner.inputs.declared import check_files_suffice, check_none_missing, check_numbers
from fairpruner.inputs.pruned_modeling import pruned
from fairpruner.inputs.shard_index import check_indexes
from fairpruner.models.counts import accept_counts
from fairpruner.models.transformers_private import classes_of

PREFIX = "hf"
# The implementations that a configuration may name; they are part of transformers and torch.
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
SIDE = 224  # of an image, if the configuration does not have it


def is_source(source: str) -> bool:
    """Whether a source names a model of Hugging Face."""
    return source.partition(":")[0] == PREFIX


def place_of(source: str) -> str:
    """The folder or hub name behind "hf:"; the shell does not replace a ~ after the colon."""
    place = source.partition(":")[2]
    return os.path.expanduser(place) if place.startswith("~") else place


def is_model(model: nn.Module) -> bool:
    """Whether a model is one of `transformers`; this does not import it."""
    return "transformers" in sys.modules and isinstance(model, _transformers().PreTrainedModel)


def architecture(place: str) -> nn.Module:
    """The model of a configuration, given as a folder, a hub name or a file, with random weights."""
    with _loading(place):
        config = configuration(place)
        return _plain(_class(config, place)(config)).eval()


def pretrained(place: str, original: type[nn.Module] | None = None) -> nn.Module:
    """The model with the weights beside its configuration.

    `original` is its class, if transformers does not have it.
    """
    check_indexes(Path(place))
    with _loading(place):
        config = configuration(place)
        kind = _class(config, place, original)
        with torch.device("meta"):
            check_files_suffice(kind(copy.deepcopy(config)), Path(place))
        made, found = kind.from_pretrained(place, config=config, output_loading_info=True, **_options(place))
        check_none_missing(made, found["missing_keys"], place)
        return _plain(made)


def configuration(place: str) -> Any:
    """The configuration of a folder or a hub name."""
    with _loading(place):
        check_numbers(Path(place))
        config = _transformers().AutoConfig.from_pretrained(place, **_options(place))
    for part in _with_parts(config):
        for name in ("_attn_implementation", "_experts_implementation"):
            _check_implementation(getattr(part, name, None), place)
    return config


def _with_parts(config: Any) -> Iterator[Any]:
    """A configuration, and those of the models inside its model."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        yield from _with_parts(getattr(config, name, None))


def _check_implementation(name: Any, place: str) -> None:
    """Refuse a configuration for which transformers would download code and run it."""
    if name is not None and name not in IMPLEMENTATIONS:
        raise FairprunerError(
            f"The configuration of {place} asks for {str(name)[:80]!r}, code that would be downloaded and"
            " run: remove attn_implementation and experts_implementation from its config.json."
        )


def tokenizer_of(place: str) -> Any:
    """The model's tokenizer, set to pad on the right, so that positions count from the first real token.

    A tokenizer without a padding token pads with its end token, which the attention mask hides.
    """
    with _loading(place):
        tokenizer = _lone_tokenizer(place)
        if tokenizer is None:
            tokenizer = _transformers().AutoTokenizer.from_pretrained(place, **_options(place))
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer


def _lone_tokenizer(place: str) -> Any:
    """The tokenizer of a tokenizer.json that has no tokenizer_config.json beside it.

    AutoTokenizer would replace its rules by those of the model's family.
    """
    file, settings = (local_file(place, name) for name in ("tokenizer.json", "tokenizer_config.json"))
    if file is None or settings is not None:
        return None
    tokenizer = _transformers().PreTrainedTokenizerFast(tokenizer_file=file)
    end = configuration(place).eos_token_id
    if isinstance(end, int):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    return tokenizer


def transform_of(place: str) -> Callable[[Any], torch.Tensor]:
    """The preprocessing of a vision model: a PIL image -> [3, H, W]."""
    with _loading(place):
        processor = _transformers().AutoImageProcessor.from_pretrained(place, **_options(place))
    return lambda image: processor(image, return_tensors="pt")["pixel_values"][0]


def example_for(model: Any) -> dict[str, torch.Tensor]:
    """An example for a model: a few tokens, or an image of the size in its configuration."""
    if model.main_input_name == "pixel_values":
        config = getattr(model.config, "vision_config", model.config)
        channels, side = getattr(config, "num_channels", 3), getattr(config, "image_size", SIDE)
        return {"pixel_values": torch.rand(1, channels, side, side)}
    return dict(model.dummy_inputs)


def local_file(place: str, name: str) -> str | None:
    """The path of a file of a folder, or of a hub name downloaded before; None if there is no such file."""
    try:
        path: str = _transformers().utils.cached_file(place, name, local_files_only=True)
    except OSError:  # transformers raises it for a file that does not exist
        return None
    return path


def is_causal(model: nn.Module) -> bool:
    """Whether a model predicts the next token."""
    if not is_model(model):
        return False
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    return type(model).__name__ in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def auto_classes(original: type[nn.Module]) -> list[str]:
    """The Auto classes of transformers that would build a class, such as AutoModelForCausalLM."""
    library = _transformers()
    found = [
        name
        for name in dir(library)
        if name.startswith("AutoModel") and original.__name__ in _flat(classes_of(getattr(library, name)))
    ]
    return sorted(found, key=lambda name: (name != "AutoModelForCausalLM", name))


def _flat(values: Any) -> set[str]:
    """Strings, and the strings in tuples."""
    return {name for value in values for name in ((value,) if isinstance(value, str) else value)}


def _class(config: Any, place: str, original: Any = None) -> Any:
    """The class that a configuration names, ready for the sizes of a pruned model."""
    library = _transformers()
    if not config.architectures and original is None:
        with torch.device("meta"):
            original = type(library.AutoModel.from_config(config))
    name = str((config.architectures or [""])[0])
    found = original or getattr(library, name, None)
    if not isinstance(found, type) or not issubclass(found, library.PreTrainedModel):
        raise FairprunerError(
            f"{place} is a {name[:80]!r}, which is no model of transformers: give build= a function that"
            " builds it."
        )
    return pruned(found) if hasattr(config, "pruned") else found


def _plain(model: Any) -> nn.Module:
    """The model with its original class, as `cut` would give it, without the settings that resized it."""
    model.__class__ = getattr(type(model), "unpruned", type(model))
    for path in getattr(model.config, "pruned", {"modules": {}})["modules"]:
        accept_counts(model.get_submodule(path))
    for name in ("pruned", "auto_map"):
        model.config.__dict__.pop(name, None)
    return model  # type: ignore[no-any-return]


def _options(place: str) -> dict[str, Any]:
    """Options of every call that loads from a place: folders are not looked up on the hub."""
    return {"local_files_only": Path(place).exists(), "trust_remote_code": False}


@contextmanager
def _loading(place: str) -> Iterator[None]:
    """Report a failure of transformers in one sentence, and show no progress bar without a terminal."""
    logging = _transformers().utils.logging
    hidden = logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    try:
        if hidden:
            logging.disable_progress_bar()
        yield
    except FairprunerError:
        raise
    except Exception as error:
        what = "cannot be loaded"
        if not Path(place).exists():
            what = "is not a folder here, and no model of this name can be downloaded from the hub"
        reason = " ".join(str(error).split())[:300]
        raise FairprunerError(
            f"Source '{PREFIX}:{place}' {what}: {type(error).__name__}: {reason}"
        ) from error
    finally:
        if hidden:
            logging.enable_progress_bar()


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise FairprunerError(
            f"Hugging Face models need a package that is not installed ({error.name}): pip install"
            f" 'fairpruner[{PREFIX}]'."
        ) from error
