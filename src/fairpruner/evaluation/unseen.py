"""Checks that evaluation data was not used for calibration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairpruner.errors import FairprunerError
from fairpruner.inputs.data_files import read_plain_text
from fairpruner.inputs.text import Row, read_rows

LONG = 80  # characters; a passage of this length is not in two texts by accident


def check_unseen(
    rows: Sequence[Row], columns: Sequence[str], path: str | Path, calibration: str | Path
) -> None:
    """Raise if a row of the calibration file contains all texts of an item, in any columns.

    The texts of an item are its values in `columns`.
    """
    seen = defaultdict(list)
    for row in read_rows(Path(calibration)):
        texts = {value for value in row.values() if isinstance(value, str)}
        for text in texts:
            seen[text].append(texts)
    known = sum(
        any(all(row[column] in texts for column in columns) for texts in seen[row[columns[0]]])
        for row in rows
    )
    if known:
        raise FairprunerError(
            f"{known} of the {len(rows)} items of {path} are in the calibration data {calibration}: evaluate"
            " on items that were not scored on."
        )


def check_text_unseen(path: str | Path, calibration: str | Path) -> None:
    """Raise if a text file contains a long passage of the calibration file: a text of its rows, or a line."""
    text = read_plain_text(path)
    if Path(calibration).suffix == ".txt":
        values: list[Any] = read_plain_text(calibration).splitlines()
    else:
        values = [value for row in read_rows(Path(calibration)) for value in row.values()]
    passages = [value for value in values if isinstance(value, str) and len(value) >= LONG]
    known = sum(passage in text for passage in passages)
    if known:
        raise FairprunerError(
            f"{known} of the {len(passages)} long texts of the calibration data {calibration} are in {path}:"
            " evaluate on a text that was not scored on."
        )
