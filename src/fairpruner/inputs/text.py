"""Texts: the rows of .jsonl, .csv or .parquet files, compressed or not, and tokenised batches of them."""

from __future__ import annotations

import csv
import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from fairpruner.core.arrays import Ints
from fairpruner.core.reading import parse_json
from fairpruner.errors import FairprunerError, FairprunerWarning, import_extra, unknown
from fairpruner.inputs.data_files import MOST_CLASSES, TEXT_LIMIT, decoded, read_bytes
from fairpruner.inputs.datasets import Sampling, draw_balanced

MOST_ROWS = 10**7
NUMBER = re.compile(r"[0-9]{1,18}")  # a class index as text
UNNAMED = re.compile(r"LABEL_[0-9]+")  # what transformers calls a class without a name
LISTED = 20  # classes in a warning

Row = Mapping[str, Any]
Tokenizer = Callable[..., Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Columns:
    """Which columns of a file hold the texts and their classes."""

    text: Sequence[str] = ("text",)  # two for pairs of texts
    label: str | None = None  # None: texts without classes
    length: int = 128  # the number of tokens after which a text is cut off

    def __post_init__(self) -> None:
        if not 1 <= len(self.text) <= 2:
            raise FairprunerError(
                f"The text columns are {list(self.text)}, expected one, or two for pairs of texts."
            )
        if self.length < 1:
            raise FairprunerError(f"length is {self.length}, expected at least 1 token.")


def load_text(
    path: str | Path,
    tokenizer: Tokenizer,
    sampling: Sampling,
    columns: Columns | None = None,
    *,
    classes: Mapping[str, int] | None = None,
) -> Iterable[dict[str, torch.Tensor]]:
    """Batches of tokens as dicts, with an attention mask, padded to the longest text of the batch.

    With a label column they also have `labels` [N]. Whole numbers and booleans are used as class indices.
    Words are looked up in `classes`. If these have no names, the words are numbered in sorted order, and a
    warning lists the numbers.
    """
    columns = columns or Columns()
    rows = read_rows(Path(path))
    texts = [
        tuple(_text(row, name, number, path) for name in columns.text) for number, row in enumerate(rows)
    ]
    labels = np.zeros(len(rows), dtype=np.int64)
    if columns.label is not None:
        labels = _labels([_cell(row, columns.label, path) for row in rows], classes or {}, path)
    settings = {"padding": True, "truncation": True, "max_length": columns.length, "return_tensors": "pt"}

    def tokenise(chosen: list[int]) -> dict[str, torch.Tensor]:
        parts = zip(*(texts[i] for i in chosen), strict=True)
        batch = dict(tokenizer(*map(list, parts), **settings))
        return batch if columns.label is None else {**batch, "labels": torch.from_numpy(labels[chosen])}

    positions: list[int] = draw_balanced(labels, sampling.samples, sampling.seed).tolist()
    # The dataset is the list of positions.
    return DataLoader(positions, sampling.batch_size, collate_fn=tokenise)  # type: ignore[arg-type]


def is_rows(path: str | Path) -> bool:
    """Whether `read_rows` can read a file of this name."""
    return _suffix(Path(path)) in READERS


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, each with named columns."""
    suffix = _suffix(path)
    if suffix not in READERS:
        raise unknown("kind of text file", suffix, READERS)
    try:
        rows = READERS[suffix](read_bytes(path), path)
    except FairprunerError:
        raise
    except Exception as error:  # the modules for .csv, .xz and .parquet raise many kinds of exceptions
        raise FairprunerError(f"Data {path} cannot be read: {type(error).__name__}: {error}.") from error
    if not rows:
        raise FairprunerError(f"Data {path} has no rows, expected at least one.")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise FairprunerError(
                f"Row {number} of {path} is a {type(row).__name__}, expected an object with named columns."
            )
    return rows


def _suffix(path: Path) -> str:
    """The ending of a file's name before ".xz"."""
    return path.with_suffix("").suffix if path.suffix == ".xz" else path.suffix


def _read_jsonl(content: bytes, path: Path) -> list[Any]:
    lines = enumerate(_lines(content), 1)
    return [_parse_line(line, number, path) for number, line in lines if line.strip()]


def _parse_line(line: str, number: int, path: Path) -> Any:
    try:
        return parse_json(line, path)
    except FairprunerError as error:
        cause: object = error.__cause__
        if isinstance(cause, json.JSONDecodeError):
            cause = f"{cause.msg} at character {cause.colno}"  # without "line 1"
        raise FairprunerError(f"Line {number} of {path} is not JSON: {cause}.") from error


def _read_csv(content: bytes, path: Path) -> list[Any]:
    reader = csv.DictReader(_lines(content))
    rows: list[Any] = list(reader)
    for number, row in enumerate(rows, 1):
        # A short row holds None for the columns that it lacks; a long one holds a list under None.
        if None in row or None in row.values():
            expected = len(reader.fieldnames or ())
            found = sum(isinstance(value, str) for value in row.values()) + len(row.get(None, ()))
            raise FairprunerError(
                f"Row {number} of {path} has {found} fields, expected {expected}: put texts with commas in"
                " quotes."
            )
    return rows


def _read_parquet(content: bytes, path: Path) -> list[Any]:
    parquet: Any = import_extra("pyarrow.parquet", "text", "Parquet files")
    file = parquet.ParquetFile(BytesIO(content))
    groups = (file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
    if file.metadata.num_rows > MOST_ROWS or sum(groups) > TEXT_LIMIT:
        raise FairprunerError(
            f"Data {path} has {file.metadata.num_rows:,} rows, expected at most {MOST_ROWS:,} in"
            f" {TEXT_LIMIT:,} bytes, unpacked: give a part of it."
        )
    rows: list[Any] = file.read().to_pylist()
    return rows


def _lines(content: bytes) -> StringIO:
    return StringIO(decoded(content), newline="")


READERS: dict[str, Callable[[bytes, Path], list[Any]]] = {
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _cell(row: Row, name: str, path: str | Path) -> Any:
    """The value of a row in a column."""
    if name not in row:
        raise unknown(f"column of {path}", name, [str(key) for key in row])
    return row[name]


def _text(row: Row, name: str, number: int, path: str | Path) -> str:
    value = _cell(row, name, path)
    if not isinstance(value, str):
        raise FairprunerError(
            f"Row {number + 1} of {path} has a {type(value).__name__} in column {name!r}, expected text."
        )
    return value


def _labels(values: Sequence[Any], classes: Mapping[str, int], path: str | Path) -> Ints:
    """A class index for every row, [n]."""
    if all(
        isinstance(value, int) or (isinstance(value, str) and NUMBER.fullmatch(value)) for value in values
    ):
        numbers = [int(value) for value in values]
        if not all(abs(number) < MOST_CLASSES for number in numbers):
            raise FairprunerError(f"Data {path} has labels beyond {MOST_CLASSES:,}, expected class indices.")
        return np.array(numbers)
    strange = [value for value in values if not isinstance(value, str)]
    if strange:
        raise FairprunerError(
            f"Data {path} has the label {repr(strange[0])[:60]} among others, expected whole numbers, or"
            " words in every row."
        )
    known = _numbered(sorted(set(values)), classes, path)
    return np.array([known[value] for value in values])


def _numbered(words: Sequence[str], classes: Mapping[str, int], path: str | Path) -> Mapping[str, int]:
    """The class index of every word."""
    strange = [word for word in words if word not in classes]
    if not strange:
        return classes
    if not all(UNNAMED.fullmatch(name) for name in classes):
        raise unknown(f"class of the model in {path}", strange[0], classes)
    numbers = {word: i for i, word in enumerate(words)}
    shown = ", ".join(f"{word[:40]} = {i}" for word, i in list(numbers.items())[:LISTED])
    warnings.warn(
        f"The model has no names for its classes, so the labels of {path} were numbered in sorted order:"
        f" {shown}{', …' if len(words) > LISTED else ''}. If the model has another order, give numbers.",
        FairprunerWarning,
        stacklevel=2,
    )
    return numbers
