"""The `fairpruner` command: every stage of the pipeline, on files."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import nn
from typer.core import TyperGroup

import fairpruner as fp

from .allocation import RULES
from .datasets import Preprocessing, Sampling, example_of, load_data
from .demo import DATA, PRUNED, SCORES, WEIGHTS
from .demo import run as run_demo
from .errors import FairprunerError
from .hugging_face import is_causal, is_source, place_of, tokenizer_of
from .sources import PRETRAINED, example_for, is_zoo, load_model, transform_of
from .storage import FOLDER_FILES
from .tables import Shown, show_demo, show_plan, show_scores, show_spaces, show_sweep
from .text import READERS, Columns, load_text
from .types import KINDS, METRICS, Budget, Metric, Plan, Scores


class _Commands(TyperGroup):
    """A user's mistake becomes one sentence on stderr and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FairprunerError as error:
            print(f"Error: {error}", file=sys.stderr)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False, help=fp.__doc__, context_settings={"help_option_names": ["-h", "--help"]}
)


def _version(asked: bool) -> None:
    if asked:
        print(fp.__version__)
        raise typer.Exit


@app.callback()
def _main(version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)] = False) -> None: ...


def _numbers(text: str) -> list[int | float]:
    """Comma-separated numbers: whole ones are counts, those with a point are shares."""
    try:
        return [int(part) if part.strip().lstrip("+-").isdigit() else float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 0.3,0.5") from None


def _floats(text: str) -> tuple[float, ...]:
    return tuple(map(float, _numbers(text)))


def _number(text: str) -> int | float:
    numbers = _numbers(text)
    if len(numbers) != 1:
        raise typer.BadParameter(f"{text!r} is not one number")
    return numbers[0]


def _shape(text: str) -> tuple[int, ...]:
    sides = tuple(side for side in _numbers(text) if isinstance(side, int) and side > 0)
    if len(sides) != len(_numbers(text)):
        raise typer.BadParameter(f"{text!r} is not a shape such as 3,32,32")
    return sides


def _budget(text: str) -> Budget:
    metric, _, amount = text.partition("=")
    if not amount:
        raise typer.BadParameter(f"{text!r} is not metric=amount, such as flops=0.5 or units=100")
    return Budget(metric, _number(amount))  # type: ignore[arg-type]  # Budget checks the metric itself


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="timm:NAME, torchvision:NAME, hf:FOLDER or hf:NAME, package.module:FUNCTION or path/to/file.py:FUNCTION.")
]
ScoresFile = Annotated[Path, typer.Argument(metavar="SCORES", help="A file that `score` wrote.")]
Weights = Annotated[str | None, typer.Option(help=f"A .safetensors, .pt or .pth file; {PRETRAINED!r} for the zoo's own.")]
Data = typer.Option(
    help="A folder of class subfolders of images, an .npz with x and y, a .jsonl or .csv of texts, or package.module:FUNCTION or file.py:FUNCTION that returns batches."
)
Size = Annotated[int | None, typer.Option(help="Images: side in pixels after resizing and centre crop.")]
Mean = Annotated[str, typer.Option(help="Images and uint8 arrays: mean per channel, of values in [0, 1].")]
Std = Annotated[str, typer.Option(help="Images and uint8 arrays: standard deviation per channel.")]
TextColumn = Annotated[str, typer.Option(help="Texts: the column that holds them, or two with a comma between for pairs.")]
LabelColumn = Annotated[str | None, typer.Option(help="Texts: the column of their classes; a language model can do without.")]
Length = Annotated[int, typer.Option(help="Texts: take this many tokens of each.")]
Skip = Annotated[list[str] | None, typer.Option(help="Space, module or pattern to leave alone; may be repeated.")]
Kinds = Annotated[str | None, typer.Option(help=f"Only these kinds: {', '.join(KINDS)}.")]
Rule = Annotated[str, typer.Option(help=f"{', '.join(RULES)}.", autocompletion=lambda: list(RULES))]
Exact = Annotated[bool, typer.Option("--exact", help="Move single units to hit the budget itself.")]
MultipleOf = Annotated[int, typer.Option(help="What is kept of a space is a multiple of this.")]
MinKeep = Annotated[str, typer.Option(help="At least this many units, or this share, of every space.")]
Removal = Annotated[str | None, typer.Option(help="Which of the scored removal signals to use.")]
Protection = Annotated[str | None, typer.Option(help="Which of the scored protection signals to use.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


@app.command(epilog="Example: fairpruner discover torchvision:resnet18 --skip layer4")
def discover(
    model: Model,
    weights: Weights = None,
    shape: Annotated[str | None, typer.Option(help="Shape of one input without the batch, such as 3,32,32; a zoo's model knows its own.")] = None,
    data: Annotated[str | None, Data] = None,
    size: Size = None,
    text_column: TextColumn = "text",
    length: Length = 128,
    skip: Skip = None,
    kinds: Kinds = None,
    as_json: AsJson = False,
) -> None:
    """Show what can be removed from a model, and what cannot and why."""
    net = load_model(model, weights)
    if data is not None:
        columns = Columns(_names(text_column), None, length)
        example = example_of(_batches(model, net, data, Sampling(samples=1), Preprocessing(size), columns), torch.device("cpu"))
    else:
        example = torch.rand(1, *_shape(shape)) if shape is not None else example_for(model, net)
        if example is None:
            raise FairprunerError(f"{model} does not say what its input looks like: give --shape, such as --shape 3,32,32, or --data.")
    _print(show_spaces(fp.discover(net, example, kinds=_names(kinds) if kinds else None, skip=skip or ())), as_json)


@app.command(epilog="Example: fairpruner score net.py:build --weights net.safetensors --data digits.npz --removal wasserstein,l1 -o scores.safetensors")
def score(
    model: Model,
    data: Annotated[str, Data],
    weights: Weights = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the scores go.")] = Path("scores.safetensors"),
    removal: Annotated[str, typer.Option(help=f"One or several of {', '.join(fp.signals.names('removal'))}.")] = "wasserstein",
    protection: Annotated[str, typer.Option(help=f"One or several of {', '.join(fp.signals.names('protection'))}.")] = "taylor",
    groups: Annotated[int | None, typer.Option(help="Compare this many groups of similar classes instead of all classes.")] = None,
    samples: Annotated[int | None, typer.Option(help="Use this many samples, evenly over the classes; all by default.")] = None,
    batch_size: Annotated[int, typer.Option(help="Samples per batch.")] = 64,
    size: Size = None,
    mean: Mean = "0",
    std: Std = "1",
    text_column: TextColumn = "text",
    label_column: LabelColumn = None,
    length: Length = 128,
    skip: Skip = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, mps, …")] = "cpu",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Score every unit of a model on calibration data, once: every budget after that is instant."""
    _check_room(output, force)
    net = _trained(model, weights, device)
    columns = Columns(_names(text_column), label_column, length)
    if Path(data).suffix in READERS and label_column is None and not is_causal(net):
        raise FairprunerError(f"{type(net).__name__} does not predict the next token, so its texts need classes: give --label-column.")
    batches = _batches(model, net, data, Sampling(samples, batch_size, seed), Preprocessing(size, _floats(mean), _floats(std)), columns)
    spaces = fp.discover(net, example_of(batches, torch.device(device)), skip=skip or ())
    scores = fp.score(net, batches, spaces=spaces, removal=_names(removal), protection=_names(protection), groups=groups, seed=seed)
    scores.save(output)
    _print(show_scores(scores, str(output)), as_json)


@app.command(epilog="Example: fairpruner sweep scores.safetensors --metric flops --amounts 0.3,0.5,0.7")
def sweep(
    scores: ScoresFile,
    metric: Annotated[str, typer.Option(help=f"{', '.join(METRICS)}.", autocompletion=lambda: list(METRICS))] = "flops",
    amounts: Annotated[str, typer.Option(help="What to keep: shares such as 0.5, or counts such as 1000000.")] = "0.9,0.8,0.7,0.6,0.5,0.4,0.3",
    rule: Rule = "tod",
    exact: Exact = False,
    multiple_of: MultipleOf = 1,
    min_keep: MinKeep = "1",
    removal: Removal = None,
    protection: Protection = None,
    as_json: AsJson = False,
) -> None:
    """Show what many budgets would keep, without the model."""
    loaded = Scores.load(scores).using(removal, protection)
    kept = _numbers(amounts)
    known: Metric = metric  # type: ignore[assignment]  # Budget checks it
    _print(show_sweep(fp.sweep(loaded, known, kept, rule=rule, exact=exact, multiple_of=multiple_of, min_keep=_number(min_keep)), kept, metric), as_json)


@app.command(epilog="Example: fairpruner plan scores.safetensors --keep flops=0.5 -o plan.json")
def plan(
    scores: ScoresFile,
    keep: Annotated[str | None, typer.Option(help="The budget, such as flops=0.5, params=1000000 or units=0.8.")] = None,
    alpha: Annotated[float | None, typer.Option(help="The tolerance in [0, 1), instead of a budget.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the plan goes.")] = Path("plan.json"),
    rule: Rule = "tod",
    exact: Exact = False,
    multiple_of: MultipleOf = 1,
    min_keep: MinKeep = "1",
    removal: Removal = None,
    protection: Protection = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Choose the units that go, for a budget or a tolerance, without the model."""
    _check_room(output, force)
    loaded = Scores.load(scores).using(removal, protection)
    budget = _budget(keep) if keep else None
    chosen = fp.allocate(loaded, alpha, keep=budget, rule=rule, exact=exact, multiple_of=multiple_of, min_keep=_number(min_keep))
    diagnosis = fp.diagnose(loaded, chosen)
    chosen.save(output)
    _print(Shown(diagnosis, {"file": str(output), **diagnosis.to_json(), "original": dict(chosen.original), "predicted": dict(chosen.predicted)}), as_json)


@app.command(epilog="Example: fairpruner cut net.py:build plan.json --weights net.safetensors -o small")
def cut(
    model: Model,
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A file that `plan` wrote.")],
    weights: Weights = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of the smaller model.")] = Path("pruned"),
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Cut the plan's units out of a model and save the smaller one."""
    _check_room(output, force)
    chosen = Plan.load(plan)
    small = fp.cut(_trained(model, weights), chosen)
    if output.is_dir():
        shutil.rmtree(output)
    fp.save(small, chosen, output, build=model)
    _print(show_plan(chosen, str(output)), as_json)


@app.command(epilog="Example: fairpruner info plan.json")
def info(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A scores file, a plan, or the folder of a pruned model.")], as_json: AsJson = False
) -> None:
    """Show what a file or folder of fairpruner holds."""
    if path.suffix == ".safetensors":
        _print(show_scores(Scores.load(path), str(path)), as_json)
    else:
        _print(show_plan(Plan.load(path / "plan.json" if path.is_dir() else path), str(path)), as_json)


@app.command(epilog="Example: fairpruner demo -o digits")
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder that the demo fills.")] = Path("fairpruner-demo"),
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Train a small CNN on handwritten digits, score it once, and prune it to half its FLOPs."""
    for name in (DATA, WEIGHTS, SCORES, PRUNED):
        _check_room(output / name, force)
    if (output / PRUNED).is_dir():
        shutil.rmtree(output / PRUNED)
    torch.set_num_threads(1)  # the tensors are so small that threads would only wait for each other
    _print(show_demo(run_demo(output), str(output)), as_json)


def _batches(source: str, net: nn.Module, data: str, sampling: Sampling, preprocessing: Preprocessing, columns: Columns) -> Iterable[Any]:
    """The data, its images prepared as the options say, or where they say nothing as the model's zoo does; its texts by the model's tokenizer."""
    if Path(data).suffix in READERS:
        if not is_source(source):
            raise FairprunerError(f"Data {data} is text, and {source} has no tokenizer: name a model of Hugging Face, hf:FOLDER.")
        return _texts(source, net, data, sampling, columns)
    images = Path(data).is_dir()
    return load_data(data, sampling, preprocessing, transform=transform_of(source, net) if images and preprocessing == Preprocessing() else None)


def _texts(source: str, net: Any, data: str, sampling: Sampling, columns: Columns) -> Iterable[Any]:
    tokenizer = tokenizer_of(place_of(source))
    if net.config.pad_token_id is None:  # a classifier made of a language model looks for the last real token by it
        net.config.pad_token_id = tokenizer.pad_token_id
    return load_text(data, tokenizer, sampling, columns, classes=net.config.label2id)


def _trained(source: str, weights: str | None, device: str = "cpu") -> nn.Module:
    if is_zoo(source) and weights is None:
        print(f"Note: {source} has random weights here; give --weights FILE, or --weights {PRETRAINED}.", file=sys.stderr)
    net = load_model(source, weights)
    try:
        return net.to(device)
    except (RuntimeError, AssertionError) as error:  # how torch refuses a device
        raise FairprunerError(f"The model cannot be put on the device {device!r}: {error}") from error


def _check_room(path: Path, force: bool) -> None:
    """Refuse before any work is done: a place that cannot be written, or one that is taken; a folder is replaced only if nothing but a pruned model is in it."""
    nearest = next(parent for parent in path.absolute().parents if parent.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        raise FairprunerError(f"Cannot write {path}: {nearest} is no folder that can be written.")
    full = path.is_dir() and any(path.iterdir())
    if (path.is_file() or full) and not force:
        raise FairprunerError(f"{path} already exists: choose another name, or replace it with --force.")
    if full and not {file.name for file in path.iterdir()} <= FOLDER_FILES:
        raise FairprunerError(f"Folder {path} holds more than a pruned model, so --force will not replace it: choose another name.")


def _print(shown: Shown, as_json: bool) -> None:
    if as_json:
        print(json.dumps(shown.json, indent=2, allow_nan=False))
        return
    width = None if sys.stdout.isatty() else 140  # a pipe or a file has no width of its own
    Console(width=width, markup=False).print(shown.table)
