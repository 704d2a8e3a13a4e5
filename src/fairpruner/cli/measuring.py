"""The commands that measure: measure, latency."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from torch import nn

import fairpruner as fp
from fairpruner.cli.common import (
    AsJson,
    Device,
    Force,
    Model,
    ScoresFile,
    Weights,
    app,
    parse_counts,
    parse_names,
    parse_shape,
    show,
    trained,
)
from fairpruner.cli.outputs import check_output
from fairpruner.core.scores import Scores
from fairpruner.errors import FairprunerError
from fairpruner.inputs.sources import example_for
from fairpruner.measuring import RUNTIMES
from fairpruner.models.torch_private import tree_map_only
from fairpruner.terminal.tables import Printable, table_of

Shape = Annotated[
    str | None,
    typer.Option(
        help="Shape of one input without the batch, such as 3,32,32; not needed for timm and torchvision."
    ),
]
Threads = Annotated[int | None, typer.Option(help="The number of threads; by default that of torch.")]


@app.command(
    epilog=(
        "Example: fairpruner measure net.py:build --weights net.safetensors --pruned small --shape 3,32,32"
        " --runtimes eager,onnxruntime"
    )
)
def measure(
    model: Model,
    weights: Weights = None,
    pruned: Annotated[
        Path | None,
        typer.Option(help="The folder of a pruned model, to compare with MODEL."),
    ] = None,
    shape: Shape = None,
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,4,8",
    threads: Threads = None,
    runtimes: Annotated[str, typer.Option(help=f"One or several of {', '.join(RUNTIMES)}.")] = "eager",
    repeats: Annotated[int, typer.Option(help="The number of rounds; every model runs once in each.")] = 30,
    memory: Annotated[
        bool, typer.Option(help="Measure peak memory, in a new process for each model.")
    ] = True,
    energy: Annotated[
        str | None,
        typer.Option(
            help="Also measure energy and CO2, for the power mix of a country: an ISO code such as DEU."
        ),
    ] = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Measure params, FLOPs, bytes, latency and memory of a model, or compare a pruned model with it."""
    original = trained(model, weights, device)
    small = None if pruned is None else fp.load(pruned, build=model).to(device)
    found = fp.measure(
        original if small is None else small,
        _example(model, original, shape, device),
        against=None if small is None else original,
        batch_sizes=parse_counts(batch_sizes, "--batch-sizes"),
        threads=threads,
        runtimes=parse_names(runtimes),
        repeats=repeats,
        memory=memory,
        energy=energy,
    )
    show(Printable(found, found.to_json()), as_json)


@app.command(
    epilog=(
        "Example: fairpruner latency torchvision:resnet50 scores.safetensors --batch-size 1 -o latency.json"
    )
)
def latency(
    model: Model,
    scores: ScoresFile,
    weights: Weights = None,
    shape: Shape = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("latency.json"),
    batch_size: Annotated[int, typer.Option(help="Samples per batch.")] = 1,
    threads: Threads = None,
    runtime: Annotated[
        str, typer.Option(help=f"{', '.join(RUNTIMES)}.", autocompletion=lambda: list(RUNTIMES))
    ] = "eager",
    repeats: Annotated[
        int, typer.Option(help="The number of rounds; every cut model runs once in each.")
    ] = 10,
    device: Device = "cpu",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Measure how long a scored model takes at any width, on this machine.

    `plan --keep latency=0.6 --latency FILE` then needs no model.
    """
    check_output(output, "latency table", model, scores, weights, force=force)
    spaces = Scores.load(scores).spaces
    net = trained(model, weights, device)
    example = _example(model, net, shape, device)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=repeats)
        table = fp.latency_table(
            net,
            example,
            spaces,
            batch_size=batch_size,
            threads=threads,
            runtime=runtime,
            repeats=repeats,
            progress=lambda done, rounds: bar.update(task, completed=done),
        )
    table.save(output)
    show(_shown(table, output), as_json)


def _example(source: str, net: nn.Module, shape: str | None, device: str) -> Any:
    example = torch.rand(1, *parse_shape(shape)) if shape is not None else example_for(source, net)
    if example is None:
        raise FairprunerError(
            f"The input shape of {source} is unknown: give --shape, such as --shape 3,32,32."
        )
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), example)


def _shown(table: fp.LatencyTable, place: Path) -> Printable:
    rows = [
        (f"{measured:.3g}", f"{predicted:.3g}", f"{miss:+.1%}")
        for (measured, predicted), miss in zip(table.trials, table.misses, strict=True)
    ]
    title = f"{place}: {len(table.ops)} operations; widths are rounded up to multiples of {table.multiple}"
    setting = ", ".join(f"{name} {value}" for name, value in table.setting.items())
    facts = {
        "file": str(place),
        "multiple": table.multiple,
        "setting": dict(table.setting),
        "trials": [list(trial) for trial in table.trials],
    }
    return Printable(table_of(title, ("measured ms", "predicted ms", "miss"), rows, notes=[setting]), facts)
