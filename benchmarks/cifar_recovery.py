"""ResNet-56 on CIFAR-10 (the paper's Table 1) after recovery: the same fine-tuning for every library.

The models that benchmarks/cifar_peers.py cuts, each repaired or with its batch norms re-estimated, are
trained on all 50,000 images (crops and mirror images, batches of 128) for 5 or 15 epochs by
`fp.Recipe.short_for`, with the same images and seeds for every way. Both recipes are for every way: one is
`matched` to the outputs of the original's blocks, which is what `fp.prune` uses, the other `distilled` from
the original's logits. The last weights are tested. Cut models and checkpoints are kept in the cache of the
user, where a stopped run goes on. The paper has 93.64 after 300 epochs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import cifar_peers
import torch
from cifar_peers import BUDGETS, CRITERIA, SCOPES
from harness import pages, runs
from nets.images import CACHE, cifar10, top1
from nets.training import resnet
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fairpruner as fp
from fairpruner.inputs.augmentation import Augmented

WAYS = (
    *({"library": "fairpruner", "way": "default", "recipe": recipe} for recipe in ("matched", "distilled")),
    *({"library": "fairpruner", "way": "paper", "recipe": recipe} for recipe in ("distilled", "matched")),
    *(
        {"library": "Torch-Pruning", "way": criterion, "scope": scope, "recipe": recipe}
        for scope in SCOPES
        for criterion in CRITERIA
        for recipe in ("matched", "distilled")
    ),
)
EPOCHS = (5, 15)
FOLDER = CACHE / "cifar_recovery"
Row = dict[str, Any]


def cases(quick: bool) -> Iterator[Row]:
    size = (
        {"depth": 20, "calibration": 250, "test": 1000, "train": 500}
        if quick
        else {"depth": 56, "calibration": 2000, "test": 10_000, "train": 50_000}
    )
    for keep in BUDGETS[:1] if quick else BUDGETS:
        for seed in range(1 if quick else 3):
            for epochs in (1,) if quick else EPOCHS:
                for way in WAYS[:1] if quick else WAYS:
                    yield {**way, "epochs": epochs, "seed": seed, "draw": 0, "keep": keep, **size}


def measure(case: Row, shared: Path) -> Row:
    small = smaller(case, shared)
    split = "train" if case["train"] > 10_000 else "train10k"
    x, y = (part[: case["train"]] for part in cifar10(split, shared))
    loader = DataLoader(
        Augmented(TensorDataset(x, y), ["crop", "flip"]), 128, shuffle=True, generator=torch.Generator()
    )
    images, labels = cifar10("test", shared)
    test = images[: case["test"]], labels[: case["test"]]
    trained = fp.recover(
        small,
        loader,
        epochs=case["epochs"],
        teacher=resnet(case["depth"], shared).to(memory_format=torch.channels_last),
        recipe=replace(fp.Recipe.short_for(small, near=case["recipe"] == "matched"), seed=case["seed"]),
        folder=FOLDER / _name(case),
    )
    return {"before": round(top1(small, test), 2), "top1": round(top1(trained, test), 2)}


def smaller(case: Row, shared: Path) -> nn.Module:
    """The model before training; it is cut once for all seeds and epochs."""
    case = {name: value for name, value in case.items() if name not in ("recipe", "epochs", "seed", "train")}
    path, model = FOLDER / f"{_name(case)}.safetensors", resnet(case["depth"], shared)
    if not path.exists():
        cut, better = cifar_peers.smaller(case, shared)
        small = better if better is not None else cut
        assert small is not None
        FOLDER.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in small.state_dict().items()}, path)
    for name, tensor in load_file(path).items():  # the modules work with any widths
        module, _, own = name.rpartition(".")
        old = getattr(model.get_submodule(module), own)
        new = nn.Parameter(tensor) if isinstance(old, nn.Parameter) else tensor
        setattr(model.get_submodule(module), own, new)
    return model.to(memory_format=torch.channels_last)


def _name(case: Row) -> str:
    return "-".join(str(value).replace(" ", "_") for value in case.values())


class Line(NamedTuple):
    """One way at one budget; the accuracies are those of the seeds."""

    keep: float
    library: str
    way: str
    before: float
    after: dict[int, list[float]]  # epochs -> accuracies


def lines() -> Iterator[Line]:
    """The ways that were measured, by budget."""
    stored = runs.stored("cifar_recovery")
    for keep in BUDGETS:
        for way in WAYS:
            found = [row for row in stored if {**way, "keep": keep}.items() <= row.items()]
            if found:
                title = ", ".join(value for name, value in way.items() if name != "library")
                after = {epochs: [r["top1"] for r in found if r["epochs"] == epochs] for epochs in EPOCHS}
                yield Line(keep, way["library"], title, found[0]["before"], after)


def page() -> str:
    """Ways by epochs, as Markdown."""
    cells = [
        [
            line.library,
            line.way,
            f"{line.keep:g}",
            f"{line.before:.2f}",
            *(pages.spread(line.after[epochs]) for epochs in EPOCHS),
        ]
        for line in lines()
    ]
    head = ["library", "way", "FLOPs kept", "before training", *(f"{epochs} epochs" for epochs in EPOCHS)]
    what = (
        "Dots: top-1 after 5 and 15 epochs of training, for every library and way, one panel for each budget"
    )
    return "\n\n".join([pages.table(head, cells), *[pages.picture("cifar_recovery", what)] * bool(cells)])


def plot() -> Any:
    """Accuracy after training: a panel for each budget, a row for each way, a dot for each length."""
    from matplotlib.figure import Figure

    panels = {keep: found for keep in BUDGETS if (found := [line for line in lines() if line.keep == keep])}
    height = 1.2 + 0.3 * max(map(len, panels.values()))
    figure = Figure(figsize=(6.5 * len(panels), height), layout="constrained")
    for keep, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        found = sorted(panels[keep], key=lambda line: max(map(mean, filter(None, line.after.values()))))
        for number, line in enumerate(found):
            for values, style in zip(line.after.values(), ("full", "none"), strict=True):
                if values:
                    axes.errorbar(
                        mean(values),
                        number,
                        xerr=stdev(values) if len(values) > 1 else None,
                        fmt="o",
                        color="#2a6f97" if line.library == "fairpruner" else "#6b6b6b",
                        fillstyle=style,
                    )
        original = runs.stored("cifar_peers")[0]["baseline"]
        axes.axvline(original, color="black", linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(found)), [f"{line.library}: {line.way}" for line in found])
        axes.set(xlabel="top-1, %", title=f"{100 * keep:g} % of the FLOPs")
        axes.spines[["top", "right"]].set_visible(False)
    short, long = EPOCHS
    figure.suptitle(f"Full: after {short} epochs. Hollow: {long}. Dotted: the original.", fontsize="medium")
    return figure
