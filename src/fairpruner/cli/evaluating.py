"""The command that evaluates language models: evaluate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import typer
from rich.console import Group

import fairpruner as fp
from fairpruner.cli.common import (
    AsJson,
    BatchSize,
    Device,
    Stream,
    Work,
    app,
    beside,
    check_work,
    parse_names,
    show,
    streamed,
    trained,
)
from fairpruner.errors import FairprunerError
from fairpruner.evaluation import (
    TASKS,
    Perplexity,
    TaskResult,
    check_text_unseen,
    evaluate,
    find_files,
    perplexity,
    read_tokens,
)
from fairpruner.inputs.hugging_face import is_causal, is_source, place_of, tokenizer_of
from fairpruner.terminal.tables import Printable, table_of

Results = dict[str, dict[str, TaskResult | Perplexity]]  # model -> task or text -> result


@app.command(
    name="evaluate",
    epilog=(
        "Examples: fairpruner evaluate hf:small --tasks wic,mmlu_pro --data texts --limit 200; fairpruner"
        " evaluate hf:large --stream --text text.txt"
    ),
)
def evaluate_models(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help=(
                "hf:FOLDER or hf:NAME, original or pruned. For several models of equal size the mean is shown"
                " too."
            ),
        ),
    ],
    tasks: Annotated[str | None, typer.Option(help=f"One or several of {', '.join(TASKS)}.")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help=(
                "The tasks' files: a folder with wic_validation.jsonl and mmlu_pro_test.jsonl, or"
                " wic=FILE,mmlu_pro=FILE."
            )
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="A text file, to compute the perplexity on.")] = None,
    length: Annotated[int, typer.Option(help="Perplexity: the number of tokens in a window.")] = 512,
    limit: Annotated[
        int | None,
        typer.Option(help="The number of items of each task, evenly from its categories; all by default."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="The file that the scores were made from; items that are in it are refused."),
    ] = None,
    batch_size: BatchSize = 8,
    stream: Stream = False,
    work: Work = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Evaluate language models: accuracy and parse rate on tasks, and perplexity on a text."""
    check_work(work, stream)
    if (tasks is None) != (data is None) or (tasks is None and text is None):
        raise FairprunerError(
            "There is nothing to evaluate: give --tasks together with --data, or --text, or both."
        )
    if tasks is not None and stream:
        raise FairprunerError(
            "Tasks generate text with the whole model, which --stream does not load: give --text alone."
        )
    files = find_files(parse_names(tasks), data) if tasks and data else {}
    if text is not None and calibration is not None:
        check_text_unseen(text, calibration)
    results: Results = {}
    sizes: dict[str, int] = {}
    for source in models:
        if not is_source(source):
            raise FairprunerError(f"{source} has no tokenizer: give a Hugging Face model, hf:FOLDER.")
        tokenizer = tokenizer_of(place_of(source))
        large = streamed(source, beside(Path(place_of(source)), work), None, device) if stream else None
        net = _causal(trained(source, None, device) if large is None else large.model)
        sizes[source] = fp.count_params(net)
        found = results[source] = dict(
            evaluate(net, tokenizer, files, limit=limit, batch_size=batch_size, calibration=calibration)
        )
        if text is not None:
            found[text.name] = perplexity(
                large or net, read_tokens(text, tokenizer), length=length, batch_size=batch_size
            )
    show(_shown(results, sizes), as_json)


def _causal(net: Any) -> Any:
    """The model, refused unless it predicts the next token."""
    if not is_causal(net):
        raise FairprunerError(
            f"{type(net).__name__} is not a causal language model, so it cannot generate answers: give a"
            " model that predicts the next token."
        )
    return net


def _shown(results: Results, sizes: Mapping[str, int]) -> Printable:
    """One table for each task or text; models of the most frequent size get a mean."""
    usual, count = Counter(sizes.values()).most_common(1)[0]
    same_size = [source for source, size in sizes.items() if size == usual] if count > 1 else []
    tables = [
        _table(name, {source: by_name[name] for source, by_name in results.items()}, same_size)
        for name in next(iter(results.values()))
    ]
    content = {
        source: {name: asdict(result) for name, result in found.items()} for source, found in results.items()
    }
    return Printable(Group(*tables), {"models": content})


def _table(name: str, found: Mapping[str, TaskResult | Perplexity], same_size: Sequence[str]) -> Group:
    """One task, or perplexity: a column for each model, and one for the mean of models of equal size."""
    columns = ("", *found, *([f"mean of {len(same_size)} ± deviation"] if same_size else []))

    def row(label: str, number: Callable[[Any], float], form: str) -> tuple[str, ...]:
        values = {source: number(result) for source, result in found.items()}
        same = [values[source] for source in same_size]
        mean = [f"{form.format(fmean(same))} ± {stdev(same):.2f}"] if same else []
        return label, *(form.format(value) for value in values.values()), *mean

    first = next(iter(found.values()))
    if isinstance(first, Perplexity):
        title = f"{name}: {first.tokens:,} tokens predicted in {first.windows:,} windows of {first.length}"
        return table_of(title, columns, [row("perplexity", lambda result: result.value, "{:.3f}")])
    percent = "{:.2f} %"
    rows = [
        row("accuracy", lambda result: 100 * result.accuracy, percent),
        row("parse rate", lambda result: 100 * result.parse_rate, percent),
    ]
    rows += [
        row(kind, lambda result, kind=kind: 100 * result.categories[kind].accuracy, percent)  # type: ignore[misc]
        for kind in first.categories
    ]
    return table_of(
        f"{name}: {first.items:,} items, zero-shot; an answer that cannot be parsed is wrong", columns, rows
    )
