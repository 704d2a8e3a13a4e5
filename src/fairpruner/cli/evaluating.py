"""The command that asks a language model what it can still do: evaluate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import typer
from rich.console import Group

from ..errors import FairprunerError
from ..evaluation import TASKS, Outcome, Perplexity, check_text_unseen, evaluate, find_files, perplexity, read_tokens
from ..inputs.hugging_face import is_causal, is_source, place_of, tokenizer_of
from ..tables import Shown, table_of
from .common import AsJson, BatchSize, Device, app, parse_names, show, trained

Results = dict[str, dict[str, Outcome | Perplexity]]  # model -> task or text -> result


@app.command(name="evaluate", epilog="Example: fairpruner evaluate hf:small --tasks wic,mmlu_pro --data texts --limit 200")
def evaluate_models(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="hf:FOLDER or hf:NAME, original or pruned; of several the mean is shown too.")],
    tasks: Annotated[str | None, typer.Option(help=f"One or several of {', '.join(TASKS)}.")] = None,
    data: Annotated[
        str | None, typer.Option(help="The tasks' files: a folder with wic_validation.jsonl and mmlu_pro_test.jsonl, or wic=FILE,mmlu_pro=FILE.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="A text file: perplexity over all of it.")] = None,
    length: Annotated[int, typer.Option(help="Perplexity: tokens in a window.")] = 512,
    limit: Annotated[int | None, typer.Option(help="Ask this many items of each task, evenly over its categories; all by default.")] = None,
    calibration: Annotated[Path | None, typer.Option(help="What the scores were made from: what is also in it is not evaluated.")] = None,
    batch_size: BatchSize = 8,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Measure language models: accuracy and parse rate on tasks, answered in their own words, and perplexity on a text."""
    if (tasks is None) != (data is None) or (tasks is None and text is None):
        raise FairprunerError("There is nothing to evaluate: give --tasks together with --data, or --text, or both.")
    files = find_files(parse_names(tasks), data) if tasks and data else {}
    if text is not None and calibration is not None:
        check_text_unseen(text, calibration)
    results: Results = {}
    for source in models:
        if not is_source(source):
            raise FairprunerError(f"{source} has no tokenizer: name a model of Hugging Face, hf:FOLDER.")
        net, tokenizer = trained(source, None, device), tokenizer_of(place_of(source))
        if not is_causal(net):
            raise FairprunerError(f"{type(net).__name__} does not predict the next token, so it has nothing to answer with.")
        found = results[source] = dict(evaluate(net, tokenizer, files, limit=limit, batch_size=batch_size, calibration=calibration))
        if text is not None:
            found[text.name] = perplexity(net, read_tokens(text, tokenizer), length=length, batch_size=batch_size)
    show(
        Shown(Group(*_tables(results)), {"models": {source: {name: asdict(result) for name, result in found.items()} for source, found in results.items()}}),
        as_json,
    )


def _tables(results: Results) -> list[Group]:
    """A table for each task, with a column for each model and the mean of several; one for perplexity."""
    tables = []
    for name in next(iter(results.values())):
        found = {source: by_name[name] for source, by_name in results.items()}
        tables.append(_task_table(name, {s: r for s, r in found.items() if isinstance(r, Outcome)}) or _perplexity_table(name, found))
    return tables


def _task_table(name: str, found: Mapping[str, Outcome]) -> Group | None:
    if not found:
        return None
    first = next(iter(found.values()))
    rows = [("accuracy", *_percents([r.accuracy for r in found.values()])), ("parse rate", *_percents([r.parse_rate for r in found.values()]))]
    rows += [(kind, *_percents([r.categories[kind].accuracy for r in found.values()])) for kind in first.categories]
    return table_of(f"{name}: {first.items:,} items, zero-shot; what cannot be parsed is wrong", ("", *_columns(found)), rows)


def _perplexity_table(name: str, found: Mapping[str, Any]) -> Group:
    first = next(iter(found.values()))
    row = _with_mean([r.value for r in found.values()], "{:.3f}")
    return table_of(f"{name}: {first.tokens:,} tokens predicted in {first.windows:,} windows of {first.length}", ("", *_columns(found)), [("perplexity", *row)])


def _columns(found: Mapping[str, Any]) -> list[str]:
    return [*found, *(["mean ± spread"] if len(found) > 1 else [])]


def _percents(shares: Sequence[float]) -> list[str]:
    return _with_mean([100 * share for share in shares], "{:.2f} %")


def _with_mean(values: Sequence[float], form: str) -> list[str]:
    """The numbers, and for several their mean and standard deviation."""
    mean = [f"{form.format(fmean(values))} ± {stdev(values):.2f}"] if len(values) > 1 else []
    return [*(form.format(value) for value in values), *mean]
