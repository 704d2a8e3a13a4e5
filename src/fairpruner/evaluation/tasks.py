"""The paper's two tasks, zero-shot: the prompt of an item, and how the answer is parsed from the output.

The paper does not print its prompts. The prompts here are simple ones, listed in docs/moe.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fairpruner.errors import FairprunerError, unknown
from fairpruner.inputs.text import Row, read_rows

LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True)
class QuestionTask:
    """One task: its items are the rows of a file with these columns."""

    name: str
    split: str  # to evaluate on; calibration uses another
    columns: tuple[str, ...]
    texts: tuple[str, ...]  # the columns that identify an item
    prompt: Callable[[Row], str]
    answer: Callable[[Row], str]
    parse: Callable[[str, Row], str | None]  # None if there is no answer
    typed: Callable[[Row], Row]  # the item with the types of its columns: a .csv holds nothing but text
    category: Callable[[Row], str] | None = None
    new_tokens: int = 32  # the most tokens that the model generates

    def read(self, path: Path) -> list[Row]:
        """The items of a file; an error if one lacks a column or has an invalid answer."""
        items: list[Row] = []
        for number, row in enumerate(read_rows(path), start=1):
            missing = [column for column in self.columns if column not in row]
            if missing:
                raise FairprunerError(
                    f"Item {number} of {path} has no {missing[0]!r}, expected the columns"
                    f" {', '.join(self.columns)} of {self.name}."
                )
            try:
                items.append(self.typed(row))
                self.answer(items[-1])
            except (ValueError, TypeError, IndexError) as error:
                raise FairprunerError(
                    f"Item {number} of {path} has no valid answer for {self.name}: {error}."
                ) from error
        return items


def _ask_wic(row: Row) -> str:
    return (
        f'Does the word "{row["word"]}" have the same meaning in these two sentences?\n'
        f"Sentence 1: {row['sentence1']}\nSentence 2: {row['sentence2']}\n"
        'Answer with "yes" or "no".\nAnswer:'
    )


def _typed_wic(row: Row) -> Row:
    labels = {"0": 0, "1": 1, "false": 0, "true": 1}
    label = row["label"]
    return {**row, "label": labels.get(label.strip().lower(), label)} if isinstance(label, str) else row


def _answer_wic(row: Row) -> str:
    if row["label"] not in (0, 1):
        raise ValueError(f"the label is {row['label']!r}, expected true or false")
    return "yes" if row["label"] else "no"


def parse_yes_or_no(text: str, row: Row) -> str | None:
    """The first word that is "yes" or "no".

    >>> parse_yes_or_no(" No, they differ.", {})
    'no'
    """
    found = re.search(r"\b(yes|no)\b", text, re.IGNORECASE)
    return found.group(1).lower() if found else None


def _ask_mmlu_pro(row: Row) -> str:
    options = "\n".join(
        f"{letter}. {option}" for letter, option in zip(LETTERS, row["options"], strict=False)
    )
    return f"{row['question']}\n{options}\nAnswer with the letter of the one correct option.\nAnswer:"


def _typed_mmlu_pro(row: Row) -> Row:
    index, options = row["answer_index"], row["options"]
    if isinstance(options, str):
        try:
            options = json.loads(options)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the options are {options[:60]!r}, expected a JSON list") from error
    if not isinstance(options, list):
        raise ValueError(f"the options are a {type(options).__name__}, expected a list")
    return {**row, "answer_index": int(index) if isinstance(index, str) else index, "options": options}


def _answer_mmlu_pro(row: Row) -> str:
    letter = LETTERS[int(row["answer_index"])]
    if row["answer"] != letter or not 0 <= row["answer_index"] < len(row["options"]) <= len(LETTERS):
        raise ValueError(
            f"the answer is {row['answer']!r} with index {row['answer_index']} of {len(row['options'])}"
            " options"
        )
    return letter


# From the most to the least explicit. A bare letter elsewhere is not taken: it may be the word "A" or "I".
LETTER_PATTERNS = (r"answer is:?\s*\(?([A-J])\b", r"^\W*([A-J])(?=\s*$|\s*[.):,\n])", r"\(([A-J])\)")


def parse_letter(text: str, row: Row) -> str | None:
    """The letter of an option: after "answer is", at the start of the text, or in brackets.

    >>> row = {"options": ["x"] * 4}
    >>> parse_letter(" The answer is (C).", row), parse_letter("A question of taste", row)
    ('C', None)
    """
    allowed = LETTERS[: len(row["options"])]
    for pattern in LETTER_PATTERNS:
        found = re.search(pattern, text)
        if found:
            return found.group(1) if found.group(1) in allowed else None
    return None


TASKS: dict[str, QuestionTask] = {
    "wic": QuestionTask(
        "wic",
        "validation",
        ("word", "sentence1", "sentence2", "label"),
        ("sentence1", "sentence2"),
        _ask_wic,
        _answer_wic,
        parse_yes_or_no,
        _typed_wic,
    ),
    "mmlu_pro": QuestionTask(
        "mmlu_pro",
        "test",
        ("question", "options", "answer", "answer_index", "category"),
        ("question",),
        _ask_mmlu_pro,
        _answer_mmlu_pro,
        parse_letter,
        _typed_mmlu_pro,
        category=lambda row: str(row["category"]),
    ),
}
"""The tasks that `evaluate` knows, by name."""


def find_files(tasks: Sequence[str], data: str | Path) -> dict[str, Path]:
    """The file of every task.

    `data` is "wic=FILE,mmlu_pro=FILE", or a folder with files named TASK_SPLIT.*, such as
    wic_validation.jsonl.
    """
    for name in tasks:
        if name not in TASKS:
            raise unknown("task", name, TASKS)
    folder = Path(data)
    if folder.is_dir():
        found = {name: sorted(folder.glob(f"{name}_{TASKS[name].split}.*")) for name in tasks}
        given = {name: files[0] for name, files in found.items() if files}
    else:
        pairs = [part.partition("=") for part in str(data).split(",")]
        given = {name.strip(): Path(path.strip()) for name, equals, path in pairs if equals}
    for name in tasks:
        if name not in given:
            raise FairprunerError(
                f"No data for task {name} in {data}: expected a folder with {name}_{TASKS[name].split}.jsonl"
                f" (.jsonl.xz, .csv, .parquet), or {name}=FILE."
            )
    return {name: given[name] for name in tasks}
