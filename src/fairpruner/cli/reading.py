"""The options of all commands that read data, and how data is read with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from fairpruner.cli.common import BatchSize, parse_floats, parse_names
from fairpruner.errors import FairprunerError
from fairpruner.inputs.datasets import Preprocessing, Sampling, class_names, load_data
from fairpruner.inputs.hugging_face import is_source, place_of, tokenizer_of
from fairpruner.inputs.sources import Normalisation, normalisation_of, transform_of
from fairpruner.inputs.text import Columns, is_rows, load_text

Data = typer.Option(
    help=(
        "A folder of class subfolders of images, which become RGB; an .npz with x and y; a .jsonl, .csv or"
        " .parquet of texts, also with .xz; or package.module:FUNCTION or file.py:FUNCTION that returns"
        " batches."
    )
)
Size = Annotated[
    int | None, typer.Option(help="Images: height and width in pixels, after resizing and a centre crop.")
]
TextColumn = Annotated[str, typer.Option(help="Texts: the column of the text, or two columns a,b for pairs.")]
Length = Annotated[int, typer.Option(help="Texts: the most tokens of one text.")]


@dataclass(frozen=True)
class DataOptions:
    """How the data of one command is read."""

    samples: Annotated[
        int | None,
        typer.Option(
            help=(
                "Use this many samples, evenly from the classes; all by default. A function's batches are"
                " taken whole until this many samples are reached."
            )
        ),
    ] = None
    batch_size: BatchSize = 64
    size: Size = None
    mean: Annotated[
        str | None,
        typer.Option(
            help=(
                "Images and uint8 arrays: mean per channel, of values in [0, 1]. By default, images get that"
                " of the model's library, and all else 0."
            )
        ),
    ] = None
    std: Annotated[
        str | None,
        typer.Option(
            help=(
                "Images and uint8 arrays: standard deviation per channel. By default, images get that of the"
                " model's library, and all else 1."
            )
        ),
    ] = None
    text_column: TextColumn = "text"
    label_column: Annotated[
        str | None, typer.Option(help="Texts: the column of the class; a language model needs none.")
    ] = None
    length: Length = 128
    seed: Annotated[int, typer.Option(help="The seed of all random choices.")] = 0

    def read(self, source: str, net: nn.Module, data: str) -> Iterable[Any]:
        """The batches of some data.

        Images are preprocessed as the model's library prescribes. If one of size, mean and std is given,
        only mean and std are taken from the library, unless given. Texts are tokenised by the model's
        tokenizer.
        """
        sampling = Sampling(self.samples, self.batch_size, self.seed)
        if is_rows(data):
            return self._texts(source, net, data, sampling)
        if Path(data).is_dir() and (self.size, self.mean, self.std) == (None, None, None):
            return load_data(data, sampling, Preprocessing(), transform=transform_of(source, net))
        return load_data(data, sampling, self._preprocessing(source, net, data))

    def _preprocessing(self, source: str, net: nn.Module, data: str) -> Preprocessing:
        """The preprocessing by these options, with the library's mean and std for images if not given."""
        mean, std = (
            None if text is None else parse_floats(text, option)
            for text, option in ((self.mean, "--mean"), (self.std, "--std"))
        )
        usual: Normalisation = ((0.0,), (1.0,))
        if Path(data).is_dir() and (mean is None or std is None):
            usual = normalisation_of(source, net) or usual
        return Preprocessing(self.size, mean or usual[0], std or usual[1])

    def _texts(self, source: str, net: Any, data: str, sampling: Sampling) -> Iterable[Any]:
        if not is_source(source):
            raise FairprunerError(
                f"Data {data} is text, but {source} has no tokenizer: give a Hugging Face model, hf:FOLDER."
            )
        tokenizer = tokenizer_of(place_of(source))
        # A classifier made from a language model uses this id to find the last real token.
        if net.config.pad_token_id is None:
            net.config.pad_token_id = tokenizer.pad_token_id
        columns = Columns(parse_names(self.text_column), self.label_column, self.length)
        return load_text(data, tokenizer, sampling, columns, classes=net.config.label2id)


CALIBRATION, TRAINING = DataOptions(), DataOptions(batch_size=256)

IMAGES, ARRAYS, TEXTS, BATCHES = "images", "arrays", "texts", "batches"
# Field of DataOptions -> the kinds of data that it applies to; the other fields apply to all kinds.
APPLIES = {
    "batch_size": (IMAGES, ARRAYS, TEXTS),
    "size": (IMAGES,),
    "mean": (IMAGES, ARRAYS),
    "std": (IMAGES, ARRAYS),
    "text_column": (TEXTS,),
    "label_column": (TEXTS,),
    "length": (TEXTS,),
}
SOURCES = ("data", "train", "validation")  # the parameters of a command that name data


def _kind_of(data: str) -> str | None:
    """Whether some data holds images, arrays or texts, or is a function of batches; None if it is neither."""
    if is_rows(data):
        return TEXTS
    if Path(data).is_dir():
        return IMAGES
    if Path(data).suffix == ".npz":
        return ARRAYS
    return BATCHES if ":" in data else None


def check_used(options: DataOptions, usual: DataOptions, sources: Sequence[str]) -> None:
    """Refuse options that apply to none of the data, and image folders whose labels would differ."""
    values, defaults = asdict(options), asdict(usual)
    given = [name for name, value in values.items() if value != defaults[name]]
    if given and not sources:
        named = ", ".join(map(_option, given))
        raise FairprunerError(
            f"Found {named} without --data, so there is nothing to read: give --data, or leave out {named}."
        )
    found = [_kind_of(source) for source in sources]
    kinds = {kind for kind in found if kind is not None}
    for name in given if None not in found else ():  # data of no kind is refused when it is read
        applies = APPLIES.get(name, tuple(kinds))
        if not kinds.intersection(applies):
            raise FairprunerError(
                f"{_option(name)} applies to {' and '.join(applies)}, and {' and '.join(sources)}"
                f" {'gives' if len(sources) == 1 else 'give'} {' and '.join(sorted(kinds))}: leave it out."
            )
    folders = [source for source in sources if _kind_of(source) == IMAGES]
    for folder in folders[1:]:
        odd = sorted({*class_names(Path(folder))} ^ {*class_names(Path(folders[0]))})
        if odd:
            raise FairprunerError(
                f"Only one of the folders {folders[0]} and {folder} has the class subfolder {odd[0]}, so a"
                " class would have two labels: give both the same subfolders; some may be empty."
            )


def _option(name: str) -> str:
    """The option of a field."""
    return f"--{name.replace('_', '-')}"


def reads_data(command: Callable[..., None]) -> Callable[..., None]:
    """The command with one option for each field of its parameter `data_options`, with that default."""
    own = inspect.signature(command, eval_str=True).parameters
    options = inspect.signature(DataOptions, eval_str=True).parameters
    defaults = asdict(own["data_options"].default)

    @wraps(command)
    def expanded(**given: Any) -> None:
        data_options = DataOptions(**{name: given.pop(name) for name in options})
        sources = [given[name] for name in SOURCES if given.get(name) is not None]
        check_used(data_options, own["data_options"].default, sources)
        command(data_options=data_options, **given)

    parameters: list[inspect.Parameter] = []
    for name, parameter in own.items():
        if name == "data_options":
            parameters += [option.replace(default=defaults[option.name]) for option in options.values()]
        else:
            parameters.append(parameter)
    expanded.__signature__ = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in parameters])  # type: ignore[attr-defined]
    return expanded
