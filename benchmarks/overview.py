"""The opening of docs/benchmarks.md: one table and one picture, from what other benchmarks measured."""

from __future__ import annotations

from statistics import mean
from typing import Any, NamedTuple

import cifar_peers
import cifar_recovery
import llm
from harness import pages, runs
from nets.peer_models import MODELS

PEER = "Torch-Pruning"
LANGUAGE_SHARE = 0.2  # of the parameters that is removed
NAMES = {"default": "fp.prune", "paper": "the paper's method"}


class Bar(NamedTuple):
    """The accuracy of one way, the mean over draws of calibration images; of cut and repaired, the better."""

    library: str
    way: str
    keep: float
    top1: float


def bars() -> list[Bar]:
    """The default, the paper's method and the best scope of each criterion of the peer, by budget."""
    found: dict[tuple[str, str, float, str], list[float]] = {}
    for row in cifar_peers.rows():
        if row["library"] == PEER or row["way"] in NAMES:
            best = max(value for value in (row.get("top1"), row.get("better")) if value is not None)
            key = row["library"], row["way"], row["keep"], row.get("scope", "")
            found.setdefault(key, []).append(best)
    means = [Bar(*key[:3], mean(values)) for key, values in found.items()]
    return [
        max((bar for bar in means if bar[:3] == key), key=lambda bar: bar.top1)
        for key in dict.fromkeys(bar[:3] for bar in means)
    ]


def page() -> str:
    """The table, and the picture if there is something to compare."""
    what = "Bars: top-1 of ResNet-56, pruned without training, for fairpruner and Torch-Pruning"
    compared = {bar.library for bar in bars()} > {"fairpruner"}
    return "\n\n".join([table(), *[pages.picture("overview", what)] * compared])


def table() -> str:
    """Questions with their measured answers, as Markdown."""
    answers = (_accuracy(), _recovered(), _language(), _right(), _cost(), _speed())
    lines = [line for line in answers if line]
    return pages.table(["question", "fairpruner", "others", "measured by"], lines)


def _accuracy() -> list[str] | None:
    keep = cifar_peers.BUDGETS[0]
    found = [bar for bar in bars() if bar.keep == keep]
    ours = [bar for bar in found if bar.library != PEER]
    theirs = [bar for bar in found if bar.library == PEER]
    if not (ours and theirs):
        return None
    own, other = (max(part, key=lambda bar: bar.top1) for part in (ours, theirs))
    return [
        f"ResNet-56 on CIFAR-10 ({_original():.1f} %), {100 * keep:g} % of its FLOPs, no training: top-1",
        f"**{own.top1:.1f} %** ({NAMES[own.way]})",
        f"{PEER} {other.top1:.1f} % ({other.way}, batch norms re-estimated)",
        "`cifar_peers`",
    ]


def _original() -> float:
    baseline: float = runs.stored("cifar_peers")[0]["baseline"]
    return baseline


def _recovered() -> list[str] | None:
    """The same models after the first number of epochs."""
    epochs = cifar_recovery.EPOCHS[0]
    found = [line for line in cifar_recovery.lines() if line.keep == cifar_peers.BUDGETS[0]]
    ours, theirs = (
        [
            (mean(line.after[epochs]), line.way.partition(",")[0])
            for line in found
            if (line.library == PEER) is peer and line.after[epochs]
        ]
        for peer in (False, True)
    )
    if not (ours and theirs):
        return None
    return [
        f"The same after {epochs} epochs of the same training",
        f"**{max(ours)[0]:.2f} %** ({NAMES[max(ours)[1]]})",
        f"{PEER} {max(theirs)[0]:.2f} % ({max(theirs)[1]})",
        "`cifar_recovery`",
    ]


def _language() -> list[str] | None:
    """The perplexity of a language model, the mean over draws of calibration text."""
    rows = [row for row in runs.stored(llm.NAME) if "windows" in row]
    rows = [row for row in rows if (row["model"], row["share"]) == ("smollm2", LANGUAGE_SHARE)]
    found = {
        way: mean(row["perplexity"] for row in rows if row["way"] == way)
        for way in llm.FIRST
        if any(row["way"] == way for row in rows)
    }
    peers = {way: value for way, value in found.items() if not way.startswith("fairpruner")}
    if llm.DEFAULT not in found or not peers:
        return None
    best = min(peers, key=peers.__getitem__)
    return [
        f"SmolLM2-135M (perplexity {rows[0]['original']:.1f}), {100 * LANGUAGE_SHARE:g} % of its parameters"
        " (without embeddings) removed, no training: perplexity",
        f"**{found[llm.DEFAULT]:.1f}** (fp.prune)",
        f"{found[best]:.1f} ({best}, written again here)",
        f"`{llm.NAME}`",
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
    """All batch sizes, with the widths that the latency table prefers."""
    for row in runs.stored("latency"):
        if row["model"] == "resnet50" and row["format"] == "channels_last":
            found = [line for line in row["speed-up"] if line["plan"].endswith("auto")]
            own = sorted(line["faster"]["median"] for line in found)
            paper = sorted(line["paper"] for line in found)
            return [
                f"ResNet-50, {100 * found[0]['flops_kept']:.0f} % of its FLOPs, batches of 1 to 8: speed-up",
                f"**{own[0]:.2f} to {own[-1]:.2f}** of at most {min(line['ideal'] for line in found):.2f}",
                f"the paper {paper[0]} to {paper[-1]}, on another machine",
                "`latency`",
            ]
    return None


def plot() -> Any:
    """Accuracy of every way as bars, one for each budget."""
    from matplotlib.figure import Figure

    found = bars()
    titles = {(b.library, b.way): f"{b.library}: {NAMES.get(b.way, b.way)}" for b in found}
    order = sorted(titles, key=lambda key: max(bar.top1 for bar in found if bar[:2] == key))
    figure = Figure(figsize=(8, 0.9 + 0.6 * len(order)), layout="constrained")
    axes = figure.subplots()
    for number, (keep, shade) in enumerate(zip(cifar_peers.BUDGETS, (1.0, 0.6), strict=True)):
        shown = [bar for bar in found if bar.keep == keep]
        drawn = axes.barh(
            [order.index(bar[:2]) + 0.2 - 0.4 * number for bar in shown],
            [bar.top1 for bar in shown],
            height=0.38,
            color=["#6b6b6b" if bar.library == PEER else "#2a6f97" for bar in shown],
            alpha=shade,
        )
        texts = [f"{bar.top1:.1f}" for bar in shown]
        axes.bar_label(drawn, texts, padding=-30, color="white", weight="bold")
    axes.axvline(_original(), color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(order)), [titles[key] for key in order])
    axes.set(xlim=(0, 100))
    dark, light = (f"{100 * keep:g} %" for keep in cifar_peers.BUDGETS)
    figure.suptitle(
        "ResNet-56 on CIFAR-10, pruned without training: top-1 in %\n"
        f"Dark: {dark} of the FLOPs are kept. Light: {light}. Dotted: the original.",
        fontsize="medium",
    )
    axes.spines[["top", "right"]].set_visible(False)
    return figure
