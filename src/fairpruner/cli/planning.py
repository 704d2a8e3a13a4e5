"""The commands before a cut: discover, score, sweep, plan, info."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import fairpruner as fp
from fairpruner.cli.common import (
    AsJson,
    Device,
    Exact,
    Force,
    Kinds,
    Latency,
    MinKeep,
    Model,
    MultipleOf,
    Protection,
    Removal,
    Rule,
    ScoresFile,
    Skip,
    Stream,
    Weights,
    Work,
    app,
    beside,
    check_work,
    is_first,
    optional_names,
    parse_goal,
    parse_multiple,
    parse_number,
    parse_numbers,
    parse_shape,
    read_latency,
    show,
    streamed,
    trained,
)
from fairpruner.cli.outputs import check_output
from fairpruner.cli.reading import (
    CALIBRATION,
    Data,
    DataOptions,
    Length,
    Size,
    TextColumn,
    check_used,
    reads_data,
)
from fairpruner.cli.tables import show_plan, show_scores, show_spaces, show_sweep
from fairpruner.core.budget import BUDGETS, Metric
from fairpruner.core.plan import Plan
from fairpruner.core.scores import Scores
from fairpruner.errors import FairprunerError
from fairpruner.inputs.datasets import example_of
from fairpruner.inputs.hugging_face import is_causal
from fairpruner.inputs.sources import example_for, load_model, resolve
from fairpruner.inputs.text import is_rows
from fairpruner.models.devices import device_of_model
from fairpruner.terminal.tables import Printable


@app.command(
    epilog=(
        "Examples: fairpruner discover torchvision:resnet18 --skip layer4; fairpruner discover hf:large"
        " --stream"
    )
)
def discover(
    model: Model,
    weights: Weights = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Shape of one input without the batch, such as 3,32,32; not needed for timm and torchvision."
        ),
    ] = None,
    data: Annotated[str | None, Data] = None,
    size: Size = None,
    text_column: TextColumn = "text",
    length: Length = 128,
    skip: Skip = None,
    kinds: Kinds = None,
    stream: Stream = False,
    as_json: AsJson = False,
) -> None:
    """Show what can be removed from a model, and why other parts cannot."""
    data_options = DataOptions(size=size, text_column=text_column, length=length)
    check_used(data_options, DataOptions(), [] if data is None else [data])
    if shape is not None and data is not None:
        raise FairprunerError(
            f"Found --shape {shape} and --data {data}, expected one of them: the data has a shape."
        )
    large = streamed(model, Path(), weights) if stream else None  # discovery keeps nothing on disk
    net = load_model(model, weights) if large is None else large.model
    if data is not None:
        batches = replace(data_options, samples=1).read(model, net, data)
        example = example_of(batches, torch.device("cpu"), net)
    else:
        example = torch.rand(1, *parse_shape(shape)) if shape is not None else example_for(model, net)
        if example is None:
            raise FairprunerError(
                f"The input shape of {model} is unknown: give --shape, such as --shape 3,32,32, or --data."
            )
    spaces = fp.discover(large or net, example, kinds=optional_names(kinds), skip=skip or ())
    show(show_spaces(spaces), as_json)


@app.command(
    epilog=(
        "Examples: fairpruner score net.py:build --weights net.safetensors --data digits.npz --removal"
        " wasserstein,l1 -o scores.safetensors; fairpruner score hf:large --stream --data text.jsonl"
    )
)
@reads_data
def score(
    model: Model,
    data: Annotated[str, Data],
    weights: Weights = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path(
        "scores.safetensors"
    ),
    removal: Annotated[
        str | None,
        typer.Option(
            help=(f"Some of {', '.join(fp.signals.names('removal'))}; the default depends on the kind.")
        ),
    ] = None,
    protection: Annotated[
        str | None,
        typer.Option(
            help=(f"Some of {', '.join(fp.signals.names('protection'))}; the default depends on the kind.")
        ),
    ] = None,
    groups: Annotated[
        int | None,
        typer.Option(help="Merge classes into this many groups of similar ones before comparing them."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(fp.signals.TASKS)}; by default what the labels show."),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(help="Your loss(output, labels) as path/to/file.py:function; by default the task's."),
    ] = None,
    data_options: DataOptions = CALIBRATION,
    skip: Skip = None,
    kinds: Kinds = None,
    stream: Stream = False,
    work: Work = None,
    device: Device = "cpu",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Score every unit of a model on calibration data; every plan is then made from these scores."""
    if task and loss:
        raise FairprunerError(
            f"Found --task {task} and --loss {loss}, expected one of them: a loss replaces that of the task."
        )
    check_work(work, stream)
    check_output(output, "scores", model, data, weights, force=force)
    large = streamed(model, beside(output, work), weights, device) if stream else None
    net = trained(model, weights, device) if large is None else large.model
    if is_rows(data) and data_options.label_column is None and not is_causal(net):
        raise FairprunerError(
            f"{type(net).__name__} is not a causal language model, so its texts need classes: give"
            " --label-column."
        )
    batches = data_options.read(model, net, data)
    at = device_of_model(net) if large is None else torch.device("cpu")
    spaces = fp.discover(
        large or net,
        example_of(batches, at, net),
        kinds=optional_names(kinds),
        skip=skip or (),
    )
    removals, protections = (optional_names(names) for names in (removal, protection))
    scores = fp.score(
        large or net,
        batches,
        spaces=spaces,
        removal=removals,
        protection=protections,
        loss=resolve(loss) if loss else task,
        groups=groups,
        seed=data_options.seed,
    )
    if is_first():
        scores.save(output)
        show(show_scores(scores, str(output)), as_json)


@app.command(epilog="Example: fairpruner sweep scores.safetensors --metric flops --amounts 0.3,0.5,0.7")
def sweep(
    scores: ScoresFile,
    metric: Annotated[
        str, typer.Option(help=f"{', '.join(BUDGETS)}.", autocompletion=lambda: list(BUDGETS))
    ] = "flops",
    amounts: Annotated[
        str, typer.Option(help="What to keep: shares such as 0.5, or counts such as 1000000.")
    ] = "0.9,0.8,0.7,0.6,0.5,0.4,0.3",
    rule: Rule = "tod",
    exact: Exact = False,
    multiple_of: MultipleOf = "1",
    min_keep: MinKeep = "1",
    latency: Latency = None,
    removal: Removal = None,
    protection: Protection = None,
    as_json: AsJson = False,
) -> None:
    """Show what plans for several budgets keep; needs no model."""
    loaded = Scores.load(scores).using(removal, protection)
    kept = parse_numbers(amounts, "--amounts")
    known: Metric = metric  # type: ignore[assignment]  # Budget checks it
    constraints = _constraints(multiple_of, min_keep, latency)
    plans = fp.sweep(loaded, known, kept, rule=rule, exact=exact, **constraints)
    show(show_sweep(plans, kept, metric), as_json)


@app.command(epilog="Example: fairpruner plan scores.safetensors --keep flops=0.5 -o plan.json")
def plan(
    scores: ScoresFile,
    keep: Annotated[
        str | None,
        typer.Option(
            help="The budget, such as flops=0.5, params=1000000, units=0.8 or, with --latency, latency=0.6."
        ),
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="The tolerance in [0, 1), instead of a budget.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("plan.json"),
    rule: Rule = "tod",
    exact: Exact = False,
    multiple_of: MultipleOf = "1",
    min_keep: MinKeep = "1",
    latency: Latency = None,
    removal: Removal = None,
    protection: Protection = None,
    kinds: Kinds = None,
    skip: Skip = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make a plan for a budget or a tolerance; needs no model."""
    check_output(output, "plan", scores, latency, force=force)
    budget = parse_goal(keep, alpha)
    loaded = Scores.load(scores).using(removal, protection)
    if kinds or skip:
        loaded = loaded.only(optional_names(kinds), skip or ())
    constraints = _constraints(multiple_of, min_keep, latency)
    chosen = fp.allocate(loaded, alpha, keep=budget, rule=rule, exact=exact, **constraints)
    diagnosis = fp.diagnose(loaded, chosen)
    chosen.save(output)
    costs = {"original": dict(chosen.original), "predicted": dict(chosen.predicted)}
    show(Printable(diagnosis, {"file": str(output), **diagnosis.to_json(), **costs}), as_json)


@app.command(epilog="Example: fairpruner info plan.json")
def info(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A scores file, a plan, or the folder of a pruned model.")
    ],
    as_json: AsJson = False,
) -> None:
    """Show what is in a scores file, a plan, or the folder of a pruned model."""
    if path.suffix == ".safetensors":
        show(show_scores(Scores.load(path), str(path)), as_json)
    else:
        show(show_plan(Plan.load(path / "plan.json" if path.is_dir() else path), str(path)), as_json)


def _constraints(multiple_of: str, min_keep: str, latency: Path | None) -> dict[str, Any]:
    """The constraints of every plan, as arguments of `fp.allocate`."""
    return {
        "multiple_of": parse_multiple(multiple_of),
        "min_keep": parse_number(min_keep, "--min-keep"),
        "latency": read_latency(latency),
    }
