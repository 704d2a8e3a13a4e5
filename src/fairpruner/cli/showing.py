"""The commands that draw: report, plot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import fairpruner as fp
from fairpruner.cli.common import AsJson, Force, Latency, Protection, Removal, app, show
from fairpruner.cli.outputs import check_output
from fairpruner.core.marks import FIGURE, PAGE
from fairpruner.core.scores import Scores
from fairpruner.errors import FairprunerError
from fairpruner.reporting.plots import FIGURES, draw
from fairpruner.terminal.tables import Printable


@app.command(epilog="Example: fairpruner report scores.safetensors --plan plan.json -o report.html")
def report(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A scores file, or the folder of a pruned model.")
    ],
    plan: Annotated[
        Path | None,
        typer.Option(
            help="The plan that the page shows first: a plan's file, or the folder of a pruned model."
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
    measured: Annotated[
        Path | None,
        typer.Option(
            help=(
                'A JSON file of measured numbers: {"cut": {"accuracy": 0.91, "flops": 62e6}}, or what'
                " `measure --json` printed."
            )
        ),
    ] = None,
    latency: Latency = None,
    title: Annotated[
        str | None, typer.Option(help="The title of the page; by default the name of the source.")
    ] = None,
    removal: Removal = None,
    protection: Protection = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write an interactive page on which any plan of the scores can be chosen."""
    check_output(output, PAGE, source, plan, measured, latency, force=force)
    if source.is_dir() and (removal or protection):
        raise FairprunerError(
            f"--removal and --protection choose signals of a scores file, and {source} is a folder: give the"
            " scores file, or leave them out."
        )
    found = fp.report(
        source if source.is_dir() else Scores.load(source).using(removal, protection),
        plan,
        measured=measured,
        latency=latency,
        title=title or source.name,
    )
    found.save_html(output)
    show(Printable(found, {"file": str(output), **found.to_json()}), as_json)


@app.command(epilog="Example: fairpruner plot tolerance scores.safetensors -o tolerance.svg")
def plot(
    figure: Annotated[
        str,
        typer.Argument(metavar="FIGURE", help=f"{', '.join(FIGURES)}.", autocompletion=lambda: list(FIGURES)),
    ],
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="Scores; for profile a plan or a folder; for ablation a JSON file of curves.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A .png, .svg or .pdf file; FIGURE.png by default.")
    ] = None,
    force: Force = False,
) -> None:
    """Draw one of the paper's figures."""
    place = output or Path(f"{figure}.png")
    check_output(place, FIGURE, source, force=force)
    draw(figure, source, place)
    print(place)
