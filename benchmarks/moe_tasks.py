"""The paper's two tasks for language models with routed experts: accuracy and parse rate, zero-shot.

The full model, the paper's baselines and choice, and ours, calibrated on another split of the task. The tiny
Qwen2-MoE of the shared folder gets 20 items of each task. The paper's own model gets all of them, once its
weights are in the cache of huggingface_hub:

    pip install "fairpruner[hf,lm_eval]"
    hf download Qwen/Qwen1.5-MoE-A2.7B-Chat
    python -m benchmarks moe_tasks --shared ../shared --only model=Qwen/Qwen1.5-MoE-A2.7B-Chat

It runs on a GPU if there is one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import pages, runs
from huggingface_hub import try_to_load_from_cache
from nets import moe_models
from nets.moe_models import REMOVED, cell, plan_for
from torch import Tensor, nn

import fairpruner as fp
from fairpruner.evaluation import TASKS, evaluate
from fairpruner.inputs.hugging_face import pretrained, tokenizer_of

TINY, PAPER = moe_models.NAME, "Qwen/Qwen1.5-MoE-A2.7B-Chat"
RANDOM, FULL = "random, uniform", "full"
METHODS = (
    RANDOM,
    "frequency, uniform",
    "soft_activation, uniform",
    "soft_activation, tod",
    "reap, uniform",
    "reap, global",
)
Row = dict[str, Any]


@dataclass(frozen=True)
class Protocol:
    """How the paper asks a task: from what it calibrates, what it evaluates, how much it removes, how
    many random choices it averages.
    """

    calibration: str
    evaluated: str
    removed: tuple[float, ...]
    seeds: int


PROTOCOLS = {
    "wic": Protocol("wic_train.jsonl", "wic_validation.jsonl", REMOVED, 10),
    "mmlu_pro": Protocol("mmlu_pro_validation.parquet", "mmlu_pro_test.jsonl.xz", (0.5,), 5),
}


def cases(quick: bool) -> Iterator[Row]:
    """The tiny model, then the paper's if it is here. `limit` is the number of items, `tokens` are those of
    calibration.
    """
    if quick:
        for method in (FULL, METHODS[-1]):
            yield _case(TINY, "wic", method, 0.5 * (method != FULL), limit=4, tokens=2000)
        return
    here = isinstance(try_to_load_from_cache(PAPER, "config.json"), str)
    for model, limit, tokens in ((TINY, 20, 20_000), *[(PAPER, None, 100_000)] * here):
        for task, protocol in PROTOCOLS.items():
            yield _case(model, task, FULL, 0.0, limit, tokens)
            for removed in protocol.removed:
                for method in METHODS:
                    yield _case(model, task, method, removed, limit, tokens)


def _case(model: str, task: str, method: str, removed: float, limit: int | None, tokens: int) -> Row:
    return {
        "model": model,
        "task": task,
        "method": method,
        "removed": removed,
        "limit": limit,
        "tokens": tokens,
    }


def measure(case: Row, shared: Path) -> Row:
    """Accuracy and parse rate of each choice of experts, and the mean accuracy by category."""
    full, tokenizer = loaded(case["model"], shared)
    protocol, texts = PROTOCOLS[case["task"]], shared / "data" / "text"
    found = [
        evaluate(
            fp.cut(full, plan),
            tokenizer,
            {case["task"]: texts / protocol.evaluated},
            limit=case["limit"],
            calibration=texts / protocol.calibration,
        )[case["task"]]
        for plan in plans(case, shared)
    ]
    return {
        "items": found[0].items,
        "accuracy": [outcome.accuracy for outcome in found],
        "parse_rate": [outcome.parse_rate for outcome in found],
        "categories": {
            kind: statistics.mean(outcome.categories[kind].accuracy for outcome in found)
            for kind in found[0].categories
        },
    }


@cache
def loaded(name: str, shared: Path) -> tuple[nn.Module, Any]:
    place = str(shared / "weights" / TINY) if name == TINY else name
    return pretrained(place).to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer_of(place)


def plans(case: Row, shared: Path) -> list[fp.Plan]:
    """The choice of experts, or several random ones of the same depths."""
    scores = scored(case["model"], case["task"], case["tokens"], shared)
    if case["method"] == FULL:
        return [fp.Plan.removing(scores.spaces, {})]
    named = "frequency, uniform" if case["method"] == RANDOM else case["method"]
    plan = plan_for(scores, *named.split(", "), case["removed"])
    seeds = range(PROTOCOLS[case["task"]].seeds)
    return [fp.shuffled(plan, seed) for seed in seeds] if case["method"] == RANDOM else [plan]


@cache
def scored(name: str, task: str, tokens: int, shared: Path) -> fp.Scores:
    model, tokenizer = loaded(name, shared)
    data = asked(task, shared / "data" / "text" / PROTOCOLS[task].calibration, tokenizer, tokens)
    device = next(model.parameters()).device
    one = {name: values[:1].to(device) for name, values in data[0].items()}
    return moe_models.score(model, data, fp.discover(model, one, kinds=["expert"]))


def asked(task: str, path: Path, tokenizer: Any, size: int) -> list[dict[str, Tensor]]:
    """Questions of a split with their answers, about `size` tokens of them, as they are asked in the
    evaluation; batches of 8.
    """

    def text(row: Mapping[str, Any]) -> str:
        question, answer = TASKS[task].prompt(row), TASKS[task].answer(row)
        if not tokenizer.chat_template:
            return f"{question} {answer}"
        talk = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return str(tokenizer.apply_chat_template(talk, tokenize=False))

    texts = [text(row) for row in TASKS[task].read(path)]
    lengths = np.cumsum([len(tokenizer(some, verbose=False)["input_ids"]) for some in texts])
    texts = texts[: int(np.searchsorted(lengths, size)) + 1]
    coded = [
        tokenizer(texts[i : i + 8], return_tensors="pt", padding=True, truncation=True, max_length=512)
        for i in range(0, len(texts), 8)
    ]
    return [{"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]} for batch in coded]


def page() -> str:
    """Tables for each model, as Markdown."""
    stored, shown = runs.stored("moe_tasks"), []
    for model in dict.fromkeys(row["model"] for row in stored):
        shown.append(f"<details><summary>The paper's two tasks, {model}</summary>")
        for task in PROTOCOLS:
            shown += tables(task, [row for row in stored if (row["model"], row["task"]) == (model, task)])
        shown.append("</details>")
    return "\n\n".join(shown)


def tables(task: str, rows: list[Row]) -> Iterator[str]:
    """Shares by method, and the accuracy by category."""
    if rows:
        body = [
            [
                row["method"],
                f"{row['removed']:.1%}",
                cell(row["accuracy"], ".1%"),
                cell(row["parse_rate"], ".1%"),
            ]
            for row in rows
        ]
        yield f"{task}, {rows[0]['items']:,} items:"
        yield pages.table(["removal signal, rule", "removed", "accuracy", "parse rate"], body)
    if rows and rows[0]["categories"]:
        body = [[kind, *(f"{row['categories'][kind]:.1%}" for row in rows)] for kind in rows[0]["categories"]]
        yield f"{task}, accuracy by category:"
        yield pages.table(["", *(row["method"] for row in rows)], body)
