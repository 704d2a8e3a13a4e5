"""Commands that make a smaller model: cut, recover, prune, demo."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.utils.data import DataLoader

import fairpruner as fp
from fairpruner.cli.common import (
    AsJson,
    Device,
    Force,
    Kinds,
    Model,
    Skip,
    Weights,
    Work,
    app,
    beside,
    check_work,
    is_first,
    optional_names,
    parse_goal,
    parse_names,
    show,
    streamed,
    trained,
)
from fairpruner.cli.outputs import MODEL_FOLDER, check_checkpoints, check_output
from fairpruner.cli.reading import CALIBRATION, TRAINING, Data, DataOptions, reads_data
from fairpruner.cli.tables import show_demo, show_history, show_plan
from fairpruner.core import marks
from fairpruner.core.plan import Plan
from fairpruner.demo import DATA, PRUNED, SCORES, WEIGHTS
from fairpruner.demo import run as run_demo
from fairpruner.errors import FairprunerError, unknown
from fairpruner.files.folders import SHARD_SIZE
from fairpruner.files.streaming import stream
from fairpruner.inputs.augmentation import AUGMENTATIONS, Augmented
from fairpruner.inputs.hugging_face import is_model, is_source, place_of
from fairpruner.pipeline.options import PRESETS
from fairpruner.pipeline.search import EFFORT
from fairpruner.recovery.recipe import OPTIMIZERS, SCHEDULES
from fairpruner.repair import METHODS
from fairpruner.repair.streamed import RepairedTensors, check_method, repairing

# The kinds of the demo's files.
KINDS = {DATA: marks.DATA, WEIGHTS: marks.WEIGHTS, SCORES: "scores", PRUNED: MODEL_FOLDER}

Folder = Annotated[Path, typer.Option("--output", "-o", help="The folder of the smaller model.")]
Repair = Annotated[
    str | None,
    typer.Option(help=f"Repair the cut model by one or several of {', '.join(METHODS)}; needs --data."),
]
Epochs = Annotated[int, typer.Option(help="Epochs of fine-tuning.")]
Checkpoints = Annotated[
    Path | None, typer.Option(help="A folder for checkpoints; the same command resumes from it.")
]
LearningRate = Annotated[float, typer.Option(help="The learning rate at the start of the schedule.")]
Augment = Annotated[
    str | None,
    typer.Option(
        help=f"Change training images at random: one or several of {', '.join(AUGMENTATIONS)}.",
        autocompletion=lambda: list(AUGMENTATIONS),
    ),
]
Optimizer = Annotated[
    str, typer.Option(help=f"One of {', '.join(OPTIMIZERS)}.", autocompletion=lambda: list(OPTIMIZERS))
]
Schedule = Annotated[
    str,
    typer.Option(
        help=f"The course of the learning rate: {', '.join(SCHEDULES)}.",
        autocompletion=lambda: list(SCHEDULES),
    ),
]


@app.command(
    epilog=(
        "Examples: fairpruner cut net.py:build plan.json --weights net.safetensors --repair sequential --data"
        " digits.npz -o small; fairpruner cut hf:large plan.json --stream --repair least_squares --data"
        " text.jsonl -o small"
    )
)
@reads_data
def cut(
    model: Model,
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A file that `plan` wrote.")],
    weights: Weights = None,
    output: Folder = Path("pruned"),
    repair: Repair = None,
    data: Annotated[str | None, Data] = None,
    stream_files: Annotated[
        bool, typer.Option("--stream", help="Cut an hf: folder file by file, for a model larger than memory.")
    ] = False,
    work: Work = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Hugging Face models: the size of the largest file, such as 5GB.")
    ] = SHARD_SIZE,
    data_options: DataOptions = CALIBRATION,
    device: Device = "cpu",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Remove the plan's units from a model, repair it if asked, and save the smaller model."""
    check_work(work, stream_files)
    methods = _repair_methods(repair)
    check_output(output, MODEL_FOLDER, model, plan, weights, data, force=force)
    if repair and data is None:
        raise FairprunerError(f"--repair {repair} needs samples: give --data.")
    if data is not None and not repair:
        raise FairprunerError(
            f"Found --data {data} without --repair, which alone uses it: give --repair, or leave out --data."
        )
    chosen = Plan.load(plan)
    if stream_files:
        if not is_source(model) or weights:
            raise FairprunerError(
                "--stream cuts the files of an hf: folder without building the model: leave out --weights, or"
                " leave out --stream."
            )
        repaired: AbstractContextManager[RepairedTensors] = nullcontext(RepairedTensors({}, ()))
        if repair and data:
            check_method(repair)
            large = streamed(model, beside(output, work), weights, device)
            repaired = repairing(large, chosen, data_options.read(model, large.model, data), repair)
        with repaired as (changes, notes):
            place = place_of(model)
            stream(place, chosen, output, max_shard_size=max_shard_size, force=force, changes=changes)
    else:
        net = trained(model, weights, device)
        if max_shard_size != SHARD_SIZE and not is_model(net):
            raise FairprunerError(
                f"--max-shard-size {max_shard_size} applies to Hugging Face models, and {model} is a"
                f" {type(net).__name__}: leave it out."
            )
        small, notes = fp.cut(net, chosen), ()
        if methods and data:
            samples = data_options.read(model, net, data)
            small, notes = fp.repair_with_notes(small, net, chosen, samples, method=methods)
        fp.save(small, chosen, output, build=model, max_shard_size=max_shard_size, force=force)
    show(show_plan(chosen, str(output), notes), as_json)


@app.command(
    epilog="Example: fairpruner recover small --model net.py:build --data digits.npz --epochs 10 -o recovered"
)
@reads_data
def recover(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a pruned model.")],
    data: Annotated[str, Data],
    model: Annotated[str, typer.Option(help="The source of the original architecture.")],
    epochs: Epochs = 10,
    output: Folder = Path("recovered"),
    validation: Annotated[
        str | None, typer.Option(help="Data to validate each epoch on; the best epoch is kept.")
    ] = None,
    checkpoints: Checkpoints = None,
    learning_rate: LearningRate = 0.005,
    optimizer: Optimizer = "sgd",
    schedule: Schedule = "cosine",
    label_smoothing: Annotated[
        float, typer.Option(help="The share of each label that is spread over all classes.")
    ] = 0.0,
    ema: Annotated[float, typer.Option(help="The decay of a moving average of the weights; 0 is off.")] = 0.0,
    teacher: Annotated[
        str | None, typer.Option(help="Weights of the original model, to distil from.")
    ] = None,
    augment: Augment = None,
    data_options: DataOptions = TRAINING,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a pruned model.

    For several processes or mixed precision, start it with `accelerate launch -m fairpruner`.
    """
    sources = (folder, data, model, validation, teacher)
    check_output(output, MODEL_FOLDER, *sources, checkpoints, force=force)
    check_checkpoints(checkpoints, *sources)
    small, plan = fp.load(folder, build=model), Plan.load(folder / "plan.json")
    recipe = fp.Recipe(
        optimizer=optimizer,
        schedule=schedule,
        learning_rate=learning_rate,
        label_smoothing=label_smoothing,
        ema=ema,
        seed=data_options.seed,
    )
    history: list[fp.Epoch] = []
    better = fp.recover(
        small,
        _for_training(data_options.read(model, small, data), augment),
        epochs=epochs,
        validation=data_options.read(model, small, validation) if validation else None,
        teacher=trained(model, teacher) if teacher else None,
        recipe=recipe,
        folder=checkpoints,
        on_epoch=history.append,
    )
    if is_first():
        fp.save(better, plan, output, build=model, force=force)
        show(show_history(history, str(output)), as_json)


@app.command(
    epilog=(
        "Example: fairpruner prune net.py:build --weights net.safetensors --data digits.npz --keep flops=0.5"
        " -o small"
    )
)
@reads_data
def prune(
    model: Model,
    data: Annotated[str, Data],
    weights: Weights = None,
    output: Folder = Path("pruned"),
    keep: Annotated[
        str | None, typer.Option(help="The budget, such as flops=0.5, params=1000000 or units=0.8.")
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(help="The tolerance in [0, 1) of each round, instead of a budget.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Score, cut, repair and train this many times.")] = 1,
    repair: Annotated[
        str | None,
        typer.Option(help=f"Repair each cut model by one or several of {', '.join(METHODS)}."),
    ] = None,
    recover_epochs: Annotated[int, typer.Option(help="Epochs of fine-tuning after each cut.")] = 0,
    train: Annotated[str | None, typer.Option(help="Data to fine-tune on; all of --data by default.")] = None,
    checkpoints: Checkpoints = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="The learning rate at the start; the default suits the model.")
    ] = None,
    augment: Augment = None,
    removal: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join(fp.signals.names('removal'))}; the default depends on the kind."
        ),
    ] = None,
    protection: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join(fp.signals.names('protection'))}; the default depends on the kind."
        ),
    ] = None,
    preset: Annotated[
        str,
        typer.Option(
            help="best searches over signals and rules for one budget; paper is the paper's method.",
            autocompletion=lambda: list(PRESETS),
        ),
    ] = "best",
    effort: Annotated[
        int,
        typer.Option(
            help="Forward passes over the data that the search for one budget, in one round, may spend."
        ),
    ] = EFFORT,
    data_options: DataOptions = CALIBRATION,
    kinds: Kinds = None,
    skip: Skip = None,
    device: Device = "cpu",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """All stages: find the best plan for a budget, cut, repair and train, once or in rounds, and save."""
    sources = (model, data, weights, train)
    check_output(output, MODEL_FOLDER, *sources, checkpoints, force=force)
    check_checkpoints(checkpoints, *sources)
    methods = _repair_methods(repair)
    training = {
        "--train": train,
        "--checkpoints": checkpoints,
        "--learning-rate": learning_rate,
        "--augment": augment,
    }
    unused = [name for name, value in training.items() if value is not None]
    if unused and not recover_epochs:
        raise FairprunerError(
            f"Found {', '.join(unused)} without --recover-epochs, so nothing is trained: give"
            f" --recover-epochs, or leave out {', '.join(unused)}."
        )
    budget = parse_goal(keep, alpha)
    if effort != EFFORT and (budget is None or rounds > 1 or preset == "paper"):
        raise FairprunerError(
            f"--effort {effort} applies to the search for one budget: leave it out, or leave out --alpha,"
            " --rounds and --preset paper."
        )
    recipe: dict[str, Any] = {"seed": data_options.seed}
    if learning_rate is not None:
        recipe["learning_rate"] = learning_rate
    net = trained(model, weights, device)
    small, plan = fp.prune(
        net,
        data_options.read(model, net, data),
        keep=budget,
        alpha=alpha,
        rounds=rounds,
        repair=methods,
        recover_epochs=recover_epochs,
        train=(
            _for_training(replace(data_options, samples=None).read(model, net, train or data), augment)
            if recover_epochs
            else None
        ),
        preset=preset,
        effort=effort,
        options={
            "discover": {"kinds": optional_names(kinds), "skip": skip or ()},
            "score": {"removal": removal, "protection": protection, "seed": data_options.seed},
            "recover": {"recipe": recipe, "folder": checkpoints} if recover_epochs else {},
        },
    )
    if is_first():
        fp.save(small, plan, output, build=model, force=force)
        show(show_plan(plan, str(output)), as_json)


@app.command(epilog="Example: fairpruner demo -o digits")
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")] = Path(
        "fairpruner-demo"
    ),
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Train a small CNN on handwritten digits, score it once, and prune it to half its FLOPs."""
    for name, kind in KINDS.items():
        check_output(output / name, kind, force=force)
    torch.set_num_threads(1)  # for such small tensors, more threads are slower
    show(show_demo(run_demo(output, force=force), str(output)), as_json)


def _repair_methods(text: str | None) -> list[str] | None:
    """The names of repair methods, checked before a model is loaded; None if the option was not given."""
    methods = optional_names(text)
    for method in methods or ():
        if method not in METHODS:
            raise unknown("repair method", method, METHODS)
    return methods


def _for_training(batches: Iterable[Any], augment: str | None) -> Iterable[Any]:
    """The same data with its images augmented; a loader reads it in a new order in each epoch."""
    if isinstance(batches, DataLoader):
        dataset = Augmented(batches.dataset, parse_names(augment)) if augment else batches.dataset
        return DataLoader(dataset, batches.batch_size, shuffle=True, collate_fn=batches.collate_fn)
    if augment:
        raise FairprunerError(
            f"--augment {augment} changes the images of a folder or of an .npz file, and this data is of"
            " another kind: augment it in the code that makes it."
        )
    return batches
