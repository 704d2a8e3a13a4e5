"""The opening of docs/benchmarks.md: one table and one picture, from what other benchmarks measured."""

from __future__ import annotations

from statistics import mean
from typing import Any, NamedTuple

import cifar_peers
import pages
import runs
from peer_models import MODELS

KEEP = 0.462  # of FLOPs, the paper's
NAMES = {
    "default": "fp.prune",
    "by hand": "reconstruction, global, repaired",
    "paper": "the paper's method",
    "wasserstein, tod": "wasserstein, ToD, repaired",
}


class Bar(NamedTuple):
    """The accuracy of one way, the mean over draws of calibration images; of cut and repaired, the better."""

    library: str
    way: str
    keep: float
    top1: float


def bars() -> list[Bar]:
    """Every way at the paper's budget, and fairpruner's at smaller ones; the best first."""
    found: dict[tuple[str, str, float], list[float]] = {}
    for row in cifar_peers.rows():
        if row["keep"] == KEEP or (row["keep"] < KEEP and row["library"] == "fairpruner"):
            way = ", ".join(filter(None, (row["way"], row.get("rule"), row.get("scope"))))
            best = max(value for value in (row.get("top1"), row.get("better")) if value is not None)
            found.setdefault((row["library"], way, row["keep"]), []).append(best)
    return sorted((Bar(*key, mean(values)) for key, values in found.items()), key=lambda bar: -bar.top1)


def page() -> str:
    """The table, and the picture if there is something to compare."""
    what = "Bars: top-1 of ResNet-56, pruned without training, for every library and way"
    compared = {bar.library for bar in bars()} > {"fairpruner"}
    return "\n\n".join([table(), *[pages.picture("overview", what)] * compared])


def table() -> str:
    """Four questions with their measured answers, as Markdown."""
    lines = [line for line in (_accuracy(), _right(), _cost(), _speed()) if line]
    return pages.table(["question", "fairpruner", "others", "measured by"], lines)


def _accuracy() -> list[str] | None:
    ours = [bar for bar in bars() if bar.library == "fairpruner"]
    theirs = [bar for bar in bars() if bar.library != "fairpruner"]
    if not (ours and theirs):
        return None
    baseline = runs.stored("cifar_peers")[0]["baseline"]
    return [
        f"ResNet-56 on CIFAR-10 ({baseline:.1f} %), pruned without training: top-1",
        f"**{ours[0].top1:.1f} %** with {100 * ours[0].keep:g} % of the FLOPs ({NAMES[ours[0].way]})",
        f"Torch-Pruning {theirs[0].top1:.1f} % with {100 * theirs[0].keep:g} % ({theirs[0].way}, batch norms"
        " re-estimated)",
        "`cifar_peers`",
    ]


def _right() -> list[str] | None:
    stored = runs.stored("peers")
    by_model = {(row["model"], row["library"]): row for row in stored}
    both = [
        m for m, library in by_model if library == "fairpruner" and (m, "Torch-Pruning 1.6.1") in by_model
    ]
    if len(both) < len(MODELS):  # some of the models are there because they are difficult
        return None

    def fine(library: str) -> int:
        rows = [by_model[model, library] for model in both]
        return sum(row.get("right", 0) > 0 and not row["wrong"] and not row["failed"] for row in rows)

    def wrong(library: str) -> int:
        return sum(by_model[model, library].get("wrong", 0) > 0 for model in both)

    peer = "Torch-Pruning 1.6.1"
    return [
        f"Of {len(both)} models, how many are cut right everywhere?",
        f"**{fine('fairpruner')}**, {wrong('fairpruner')} silently wrong",
        f"Torch-Pruning {fine(peer)}, {wrong(peer)} silently wrong",
        "`peers`",
    ]


def _cost() -> list[str] | None:
    stored = runs.stored("scoring")
    peer = next((r for r in stored if r.get("library", "").startswith("network-pruner")), None)
    cost = next((r for r in stored if (r["part"], r["model"]) == ("time", "VGG16-BN")), None)
    if not (peer and cost):
        return None
    return [
        "Scoring VGG16-BN, as a multiple of a plain forward and backward pass",
        f"**{cost['ratio_cpu']:.2f}**",
        f"network-pruner, the paper's package: {peer['times']:.0f} times as long as fairpruner",
        "`scoring`",
    ]


def _speed() -> list[str] | None:
    for row in runs.stored("latency"):
        if row["model"] == "resnet50" and row["format"] == "channels_last":
            best = max(row["speed-up"], key=lambda found: found["faster"]["median"])
            return [
                f"ResNet-50, {100 * best['flops_kept']:.0f} % of its FLOPs, batch {best['batch']}: speed-up",
                f"**{best['faster']['median']:.2f}** of at most {best['ideal']:.2f}",
                f"the paper {best['paper']}, on another machine",
                "`latency`",
            ]
    return None


def plot() -> Any:
    """Accuracy of every way as bars."""
    from matplotlib.figure import Figure

    found = bars()[::-1]
    figure = Figure(figsize=(8, 0.9 + 0.32 * len(found)), layout="constrained")
    axes = figure.subplots()
    labels = [f"{b.library}, {100 * b.keep:g} % of FLOPs: {NAMES.get(b.way, b.way)}" for b in found]
    colours = ["#2a6f97" if bar.library == "fairpruner" else "#8a8a8a" for bar in found]
    drawn = axes.barh(labels, [bar.top1 for bar in found], color=colours)
    axes.bar_label(drawn, fmt="%.1f", padding=-30, color="white", weight="bold")
    axes.axvline(runs.stored("cifar_peers")[0]["baseline"], color="black", linewidth=0.8, linestyle=":")
    axes.set(xlim=(0, 100))
    figure.suptitle("ResNet-56 on CIFAR-10, pruned without training: top-1 in %. Dotted: the original.")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
