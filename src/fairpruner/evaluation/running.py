"""Running tasks with lm_eval: greedy generation, accuracy, and the share of answers that could be parsed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fairpruner.errors import FairprunerError, check_whole_number, import_extra, unknown
from fairpruner.evaluation.tasks import TASKS, QuestionTask
from fairpruner.evaluation.unseen import check_unseen
from fairpruner.inputs.datasets import draw_balanced
from fairpruner.inputs.text import Row
from fairpruner.models.calling import evaluating
from fairpruner.terminal.progress import silenced


@dataclass(frozen=True)
class TaskResult:
    """The result of a model on one task or category; an answer that cannot be parsed counts as wrong."""

    items: int
    accuracy: float
    parse_rate: float
    categories: Mapping[str, TaskResult] = field(default_factory=dict)

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
) -> dict[str, TaskResult]:
    """Run tasks on a causal language model, zero-shot and with greedy generation.

    `files` maps tasks to local files: {"wic": "wic_validation.jsonl"}. `limit` is the number of items per
    task, drawn evenly from its categories or answers. The tokenizer's chat template is used if it has one.
    `calibration` is the file that the scores were made from: an error is raised if it contains an item.
    """
    for name in files:
        if name not in TASKS:
            raise unknown("task", name, TASKS)
    check_whole_number("batch_size", batch_size)
    items = {name: _drawn(TASKS[name], TASKS[name].read(Path(path)), limit) for name, path in files.items()}
    if calibration is not None:
        for name, path in files.items():
            check_unseen(items[name], TASKS[name].texts, path, calibration)
    results = {}
    for name, rows in items.items():
        answers = _answers(model, tokenizer, TASKS[name], rows=rows, batch_size=batch_size)
        results[name] = _result(TASKS[name], rows, np.array(answers, dtype=bool))
    return results


def _drawn(task: QuestionTask, rows: list[Row], limit: int | None) -> list[Row]:
    """At most `limit` items, evenly from the categories or answers, in the order of the file."""
    if limit is not None and limit < 1:
        raise FairprunerError(f"limit is {limit}, expected at least 1 item.")
    kinds = [(task.category or task.answer)(row) for row in rows]
    _, labels = np.unique(kinds, return_inverse=True)
    return [rows[i] for i in np.sort(draw_balanced(labels.astype(np.int64), limit, seed=0))]


def _result(task: QuestionTask, rows: Sequence[Row], answers: np.ndarray) -> TaskResult:
    """The result from answers [n, 2], (right, parsed) each, in total and by category."""
    kinds = np.array([task.category(row) for row in rows]) if task.category else np.array([])
    categories = {str(kind): _total(answers[kinds == kind]) for kind in np.unique(kinds)}
    return TaskResult(**{**asdict(_total(answers)), "categories": categories})


def _total(answers: np.ndarray) -> TaskResult:
    right, parsed = answers.mean(axis=0)
    return TaskResult(len(answers), float(right), float(parsed))


def _answers(
    model: nn.Module, tokenizer: Any, task: QuestionTask, *, rows: Sequence[Row], batch_size: int
) -> list[tuple[bool, bool]]:
    """(answered right, answer could be parsed) for each row."""
    harness = _harness()

    def judge(row: Row, written: Sequence[str]) -> dict[str, bool]:
        found = task.parse(written[0], row)
        return {"right": found == task.answer(row), "parsed": found is not None}

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
            {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("right", "parsed")
        ],
        "generation_kwargs": {"until": ["\n\n"], "do_sample": False, "max_gen_toks": task.new_tokens},
    }
    with evaluating(model), silenced("lm_eval"):
        asked = harness.models.huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        # Without its default tasks, because lm_eval would read thousands of files to find them.
        manager = harness.tasks.TaskManager(include_defaults=False)
        tasks = manager.load([harness.api.task.ConfigurableTask(config=settings)])
        # Not simple_evaluate, which also sets seeds, looks for a git repository and inspects the machine.
        found = harness.evaluator.evaluate(
            asked,
            tasks,
            bootstrap_iters=0,
            apply_chat_template=bool(getattr(tokenizer, "chat_template", None)),
        )
    samples = sorted(found["samples"][task.name], key=lambda sample: sample["doc_id"])
    return [(sample["right"], sample["parsed"]) for sample in samples]


def _harness() -> Any:
    """lm_eval with the modules that are used here."""
    for name in ("models.huggingface", "api.task", "evaluator", "tasks"):
        import_extra(f"lm_eval.{name}", "lm_eval", "Running tasks")
    return import_extra("lm_eval", "lm_eval", "Running tasks")
