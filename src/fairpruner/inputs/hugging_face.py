"""Models of Hugging Face: "hf:folder-or-name" becomes a model, its tokenizer, its image preprocessing or
an example to trace it with.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fairpruner.errors import FairprunerError
from fairpruner.inputs.pruned_modeling import pruned
from fairpruner.inputs.shard_index import check_indexes
from fairpruner.models.attention import STAND_INS
from fairpruner.models.transformers_private import classes_of

PREFIX = "hf"
# What a configuration may ask for: all that lies in transformers and torch.
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
SIDE = 224  # of an image, where a configuration does not tell


def is_source(source: str) -> bool:
    """Whether a source names a model of Hugging Face."""
    return source.partition(":")[0] == PREFIX


def place_of(source: str) -> str:
    """The folder or hub name behind "hf:"."""
    return source.partition(":")[2]


def is_model(model: nn.Module) -> bool:
    """Whether a model is of `transformers`, told without importing it."""
    return "transformers" in sys.modules and isinstance(model, _transformers().PreTrainedModel)


def architecture(place: str) -> nn.Module:
    """The model that a configuration (a folder's, a hub name's or a file) describes, with random weights."""
    with _loading(place):
        config = configuration(place)
        return _plain(_class(config, place)(config)).eval()


def pretrained(place: str, original: type[nn.Module] | None = None) -> nn.Module:
    """The model with the weights that lie beside its configuration; `original` is its class, where
    transformers does not have it.
    """
    check_indexes(Path(place))
    with _loading(place):
        config = configuration(place)
        return _plain(
            _class(config, place, original).from_pretrained(place, config=config, **_options(place))
        )


def configuration(place: str) -> Any:
    """The configuration of a folder or a hub name."""
    with _loading(place):
        config = _transformers().AutoConfig.from_pretrained(place, **_options(place))
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for name in ("_attn_implementation", "_experts_implementation"):
            _check_implementation(getattr(part, name, None), place)
    return config


def _check_implementation(name: Any, place: str) -> None:
    """Refuse a configuration that would have transformers fetch code for its attention and run it."""
    if name is not None and name not in IMPLEMENTATIONS:
        raise FairprunerError(
            f"The configuration of {place} asks for {str(name)[:80]!r}, code that would be fetched from"
            " elsewhere and run: remove attn_implementation and experts_implementation from its config.json."
        )


def tokenizer_of(place: str) -> Any:
    """The model's tokenizer, made to fill batches up on the right: then positions count from the first
    real token in every model.

    One that has no padding token fills up with its end token, which the attention mask hides.
    """
    with _loading(place):
        tokenizer = _lone_tokenizer(place) or _transformers().AutoTokenizer.from_pretrained(
            place, **_options(place)
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer


def _lone_tokenizer(place: str) -> Any:
    """What a tokenizer.json without settings beside it says; by the model's family transformers would put
    other rules in its place.
    """
    file, settings = (local_file(place, name) for name in ("tokenizer.json", "tokenizer_config.json"))
    if file is None or settings is not None:
        return None
    tokenizer, end = (
        _transformers().PreTrainedTokenizerFast(tokenizer_file=file),
        configuration(place).eos_token_id,
    )
    if isinstance(end, int):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    return tokenizer


def transform_of(place: str) -> Callable[[Any], torch.Tensor]:
    """The preprocessing of a vision model: a PIL image -> [3, H, W]."""
    with _loading(place):
        processor = _transformers().AutoImageProcessor.from_pretrained(place, **_options(place))
    return lambda image: processor(image, return_tensors="pt")["pixel_values"][0]


def example_for(model: Any) -> dict[str, torch.Tensor]:
    """Something to call a model with: a few tokens, or an image of the size its configuration tells."""
    if model.main_input_name == "pixel_values":
        config = getattr(model.config, "vision_config", model.config)
        return {
            "pixel_values": torch.rand(
                1, getattr(config, "num_channels", 3), *2 * [getattr(config, "image_size", SIDE)]
            )
        }
    return dict(model.dummy_inputs)


def local_file(place: str, name: str) -> str | None:
    """Where a file of a folder or of a hub name that was fetched before lies, None if it has none."""
    try:
        path: str = _transformers().utils.cached_file(place, name, local_files_only=True)
    except OSError:  # how transformers says so
        return None
    return path


def is_causal(model: nn.Module) -> bool:
    """Whether a model predicts the next token."""
    names = (
        importlib.import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if is_model(model)
        else {}
    )
    return type(model).__name__ in names.values()


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
    return {name for value in values for name in ((value,) if isinstance(value, str) else value)}


def _class(config: Any, place: str, original: Any = None) -> Any:
    """The class that a configuration names, ready for the sizes of a pruned model."""
    names = config.architectures or ["AutoModel"]
    found = original or getattr(_transformers(), names[0], None)
    if found is None:
        raise FairprunerError(
            f"{place} is a {names[0]}, which transformers does not have: give build= a function that"
            " builds it."
        )
    found = found if config.architectures else type(found.from_config(config))
    return pruned(found) if hasattr(config, "pruned") else found


def _plain(model: Any) -> nn.Module:
    """A model of the original class, as a cut makes it: what the sizes of a pruned one were read from has
    done its work.
    """
    model.__class__ = getattr(type(model), "unpruned", type(model))
    for path in getattr(model.config, "pruned", {"modules": {}})["modules"]:
        module = model.get_submodule(path)
        module.__class__ = STAND_INS.get(type(module), type(module))
    for name in ("pruned", "auto_map"):
        model.config.__dict__.pop(name, None)
    return model  # type: ignore[no-any-return]


def _options(place: str) -> dict[str, Any]:
    return {"local_files_only": Path(place).exists(), "trust_remote_code": False}


@contextmanager
def _loading(place: str) -> Iterator[None]:
    """No progress bar where there is no terminal, and a failure of transformers told in one sentence; its
    message may have many.
    """
    logging = _transformers().utils.logging
    hidden = logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    try:
        if hidden:
            logging.disable_progress_bar()
        yield
    except FairprunerError:
        raise
    except Exception as error:
        what = (
            "cannot be loaded"
            if Path(place).exists()
            else "is no folder here, and as a hub name it cannot be fetched"
        )
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
