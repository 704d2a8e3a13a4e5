"""Tasks answered by a model through lm_eval: greedy generation, accuracy, and how many answers could be
read at all.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fairpruner.errors import FairprunerError, unknown
from fairpruner.evaluation.tasks import TASKS, Task
from fairpruner.evaluation.unseen import check_unseen
from fairpruner.inputs.datasets import choose
from fairpruner.inputs.text import Row
from fairpruner.models.calling import evaluating


@dataclass(frozen=True)
class Outcome:
    """How a model did on one task, as a whole or in one category; an answer that cannot be read is wrong."""

    items: int
    accuracy: float
    parse_rate: float
    categories: Mapping[str, Outcome] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    model: nn.Module,
    tokenizer: Any,
    files: Mapping[str, str | Path],
    *,
    limit: int | None = None,
    batch_size: int = 8,
    calibration: str | Path | None = None,
) -> dict[str, Outcome]:
    """Ask a causal language model every item of the tasks' local files, {"wic": "wic_validation.jsonl"},
    zero-shot and greedily.

    `limit` items of each task, evenly over its categories or answers. A tokenizer's chat template is used
    if it has one. With `calibration`, the file that the scores were made from, items that are in it are
    refused.
    """
    for name in files:
        if name not in TASKS:
            raise unknown("task", name, TASKS)
    items = {name: _chosen(TASKS[name], TASKS[name].read(Path(path)), limit) for name, path in files.items()}
    if calibration is not None:
        for name, path in files.items():
            check_unseen(items[name], TASKS[name].texts, path, calibration)
    outcomes = {}
    for name, rows in items.items():
        # [(right, readable)] of each row
        answers = _answers(model, tokenizer, TASKS[name], rows, batch_size)
        outcomes[name] = _outcome(TASKS[name], rows, np.array(answers, dtype=bool))
    return outcomes


def _chosen(task: Task, rows: list[Row], limit: int | None) -> list[Row]:
    if limit is not None and limit < 1:
        raise FairprunerError(f"limit is {limit}, expected at least 1 item.")
    kinds = [(task.category or task.answer)(row) for row in rows]
    _, labels = np.unique(kinds, return_inverse=True)
    return [rows[i] for i in np.sort(choose(labels.astype(np.int64), limit, seed=0))]


def _outcome(task: Task, rows: Sequence[Row], answers: np.ndarray) -> Outcome:
    """Totals of [n, 2] right and readable answers, and the same by category."""
    kinds = np.array([task.category(row) for row in rows]) if task.category else np.array([])
    categories = {str(kind): _total(answers[kinds == kind]) for kind in np.unique(kinds)}
    return Outcome(**{**asdict(_total(answers)), "categories": categories})


def _total(answers: np.ndarray) -> Outcome:
    right, readable = answers.mean(axis=0)
    return Outcome(len(answers), float(right), float(readable))


def _answers(
    model: nn.Module, tokenizer: Any, task: Task, rows: Sequence[Row], batch_size: int
) -> list[tuple[bool, bool]]:
    """Whether each row was answered rightly, and whether the answer could be read."""
    harness = _harness()

    def judge(row: Row, written: Sequence[str]) -> dict[str, bool]:
        found = task.parse(written[0], row)
        return {"right": found == task.answer(row), "readable": found is not None}

    settings = {
        "task": task.name,
        "custom_dataset": lambda **_: {
            "test": importlib.import_module("datasets").Dataset.from_list([dict(row) for row in rows])
        },
        "test_split": "test",
        "output_type": "generate_until",
        "num_fewshot": 0,
        "doc_to_text": task.prompt,
        "doc_to_target": task.answer,
        "process_results": judge,
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True}
            for name in ("right", "readable")
        ],
        "generation_kwargs": {"until": ["\n\n"], "do_sample": False, "max_gen_toks": task.new_tokens},
    }
    with evaluating(model):
        asked = harness.models.huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        manager = harness.tasks.TaskManager(
            include_defaults=False
        )  # it would look through thousands of tasks of its own
        tasks = manager.load([harness.api.task.ConfigurableTask(config=settings)])
        # Not simple_evaluate, which seeds, looks for a git repository and collects facts about the
        # machine
        # for every call.
        found = harness.evaluator.evaluate(
            asked,
            tasks,
            bootstrap_iters=0,
            apply_chat_template=bool(getattr(tokenizer, "chat_template", None)),
        )
    samples = sorted(found["samples"][task.name], key=lambda sample: sample["doc_id"])
    return [(sample["right"], sample["readable"]) for sample in samples]


def _harness() -> Any:
    try:
        for name in ("models.huggingface", "api.task", "evaluator", "tasks"):
            importlib.import_module(f"lm_eval.{name}")
        harness = importlib.import_module("lm_eval")
    except ModuleNotFoundError as error:
        raise FairprunerError(
            f"Tasks need a package that is not installed ({error.name}): pip install 'fairpruner[lm_eval]'."
        ) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return harness
