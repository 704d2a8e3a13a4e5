"""What all commands share: the application, common options, and printing."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from torch import nn
from typer.core import TyperGroup

import fairpruner as fp
from fairpruner.allocation import RULES
from fairpruner.core.budget import Budget
from fairpruner.core.latency import LatencyTable
from fairpruner.core.units import KINDS
from fairpruner.errors import FairprunerError, FairprunerWarning
from fairpruner.inputs.sources import PRETRAINED, is_zoo, load_model
from fairpruner.inputs.streamed import Streamed
from fairpruner.inputs.workers import naming_dead_workers
from fairpruner.models.devices import device_of_process
from fairpruner.terminal.interrupts import STOPPED, interruptible
from fairpruner.terminal.tables import Printable


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Inside the block, warnings of fairpruner are printed as one sentence, without their line of code."""
    usual = warnings.formatwarning

    def plain(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if issubclass(category, FairprunerWarning):
            return f"Warning: {message}\n"
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = usual


class _Commands(TyperGroup):
    """Prints one sentence on stderr for a user's mistake (exit code 1) and for Ctrl-C (exit code 130)."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with plain_warnings(), interruptible(), naming_dead_workers():
                return super().invoke(ctx)
        except FairprunerError as error:
            print(f"Error: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        except KeyboardInterrupt as stop:
            print(str(stop) or STOPPED, file=sys.stderr)  # recovery adds how to resume
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help=fp.__doc__,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        print(fp.__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None: ...


def _misread(option: str, text: str, found: str, step: str) -> typer.BadParameter:
    """The error for an option's value: what is wrong in it, and what to give."""
    return typer.BadParameter(f"{option} {text}: {found}; give {step}")


def parse_number(text: str, option: str, step: str = "1 or 0.5") -> int | float:
    """A number: an integer is a count, a number with a decimal point is a share."""
    part = text.rpartition("=")[2].strip()
    try:
        return int(part) if part.lstrip("+-").isdigit() else float(part)
    except ValueError:
        raise _misread(option, text, f"{part!r} is not a number", step) from None


def parse_numbers(text: str, option: str) -> list[int | float]:
    """Comma-separated numbers."""
    return [parse_number(part, option, "numbers such as 0.3,0.5") for part in text.split(",")]


def parse_floats(text: str, option: str) -> tuple[float, ...]:
    return tuple(map(float, parse_numbers(text, option)))


def parse_shape(text: str) -> tuple[int, ...]:
    return _positive(text, "--shape", "a shape such as 3,32,32")


def parse_counts(text: str, option: str) -> tuple[int, ...]:
    return _positive(text, option, "whole numbers of at least 1, such as 1,4,8")


def _positive(text: str, option: str, step: str) -> tuple[int, ...]:
    """Comma-separated whole numbers of at least 1."""
    found = []
    for part in text.split(","):
        if not part.strip().isdecimal() or int(part) < 1:
            raise _misread(option, text, f"{part.strip()!r} is not a whole number of at least 1", step)
        found.append(int(part))
    return tuple(found)


def parse_multiple(text: str) -> int | Literal["auto"]:
    option, step = "--multiple-of", "a whole number such as 8, or auto"
    if text == "auto":
        return "auto"
    number = parse_number(text, option, step)
    if not isinstance(number, int):
        raise _misread(option, text, f"{text!r} is not a whole number", step)
    return number


def read_latency(path: Path | None) -> LatencyTable | None:
    return None if path is None else LatencyTable.load(path)


def parse_goal(keep: str | None, alpha: float | None) -> Budget | None:
    """The budget of a command that takes either --keep or --alpha."""
    if (keep is None) == (alpha is None):
        found = "neither" if keep is None else "both"
        raise FairprunerError(
            f"Pruning needs either a tolerance or a budget, found {found}: give --alpha 0.1 or --keep"
            " flops=0.5."
        )
    if keep is None:
        return None
    metric, _, amount = keep.partition("=")
    step = "flops=0.5 or flops=1000000"
    if not amount:
        raise _misread("--keep", keep, "no amount", step)
    return Budget(metric, parse_number(keep, "--keep", step))  # type: ignore[arg-type]  # Budget checks the metric itself


def parse_names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def optional_names(text: str | None) -> list[str] | None:
    """The names of an option; None if it was not given."""
    return parse_names(text) if text else None


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help=(
            "timm:NAME, torchvision:NAME, hf:FOLDER or hf:NAME, package.module:FUNCTION or"
            " path/to/file.py:FUNCTION."
        ),
    ),
]
ScoresFile = Annotated[Path, typer.Argument(metavar="SCORES", help="A file that `score` wrote.")]
Weights = Annotated[
    str | None,
    typer.Option(
        help=f"A .safetensors, .pt or .pth file, or {PRETRAINED!r} for the weights of timm or torchvision."
    ),
]
Skip = Annotated[
    list[str] | None, typer.Option(help="A space, module or pattern that is not pruned; may be repeated.")
]
Kinds = Annotated[str | None, typer.Option(help=f"Only these kinds: {', '.join(KINDS)}.")]
Rule = Annotated[
    str, typer.Option(help=f"How depths are chosen: {', '.join(RULES)}.", autocompletion=lambda: list(RULES))
]
Exact = Annotated[bool, typer.Option("--exact", help="Move single units to meet the budget exactly.")]
MultipleOf = Annotated[
    str,
    typer.Option(
        help="Channels and hidden units are kept in multiples of this; auto takes the multiple of --latency."
    ),
]
Latency = Annotated[
    Path | None,
    typer.Option(
        help=(
            "A table that `latency` wrote. Plans predict milliseconds, and a budget may be latency=0.6 or"
            " latency_ms=12."
        )
    ),
]
MinKeep = Annotated[
    str, typer.Option(help="Every space keeps at least this many units, or this share of them.")
]
Removal = Annotated[str | None, typer.Option(help="The removal signal to use, one of the scored signals.")]
Protection = Annotated[
    str | None, typer.Option(help="The protection signal to use, one of the scored signals.")
]
BatchSize = Annotated[int, typer.Option(help="Samples per batch.")]
Device = Annotated[str, typer.Option(help="The device that the model runs on: cpu, cuda, mps, …")]
Force = Annotated[bool, typer.Option("--force", help="Replace an output that fairpruner wrote before.")]
Stream = Annotated[
    bool,
    typer.Option(
        "--stream", help="Read an hf: folder layer by layer, for a model larger than memory; see --work."
    ),
]
Work = Annotated[
    Path | None,
    typer.Option(
        help=(
            "With --stream: a folder on a disk with room, removed at the end. A command that was killed"
            " continues from it. By default the output's name with .work."
        )
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def trained(source: str, weights: str | None, device: str = "cpu") -> nn.Module:
    """The model that a source names, with its weights, on a device; prints a note if they are random."""
    net = load_model(source, weights)
    if is_zoo(source) and weights is None:
        print(
            f"Note: {source} has random weights here; give --weights FILE, or --weights {PRETRAINED}.",
            file=sys.stderr,
        )
    try:
        return net.to(device_of_process(device))
    except (RuntimeError, AssertionError) as error:  # the exceptions of torch for a missing device
        raise FairprunerError(f"The model cannot be put on the device {device!r}: {error}") from error


def streamed(source: str, work: Path, weights: str | None = None, device: str = "cpu") -> Streamed:
    """The model of an hf: folder that is read layer by layer; notes what it takes on disk."""
    if weights is not None or device != "cpu":
        raise FairprunerError(
            "--stream computes on the CPU, with the weights of an hf: folder: leave out --weights, --device."
        )
    return Streamed(source, work=work, say=lambda sentence: print(f"Note: {sentence}", file=sys.stderr))


def check_work(work: Path | None, stream: bool) -> None:
    """Refuse a work folder that nothing uses."""
    if work is not None and not stream:
        raise FairprunerError(
            f"Found --work {work} without --stream, which alone uses it: give --stream, or leave out --work."
        )


def beside(output: Path, work: Path | None) -> Path:
    """The work folder of a command: the given one, or one beside its output."""
    return work or output.with_name(f"{output.name}.work")


def is_first() -> bool:
    """Whether this process writes and prints: only the first process of a launch does."""
    return os.environ.get("RANK", "0") == "0"


def show(shown: Printable, as_json: bool) -> None:
    """Print a result as a table or as JSON."""
    if as_json:
        try:
            text = json.dumps(shown.json, indent=2, allow_nan=False)
        except ValueError as error:  # NaN or infinity
            raise FairprunerError(
                "The result has a number that is not finite, which JSON cannot hold: leave out --json."
            ) from error
        print(text)
        return
    width = None if sys.stdout.isatty() else 140  # a pipe or a file has no width
    Console(width=width, markup=False).print(shown.table)
