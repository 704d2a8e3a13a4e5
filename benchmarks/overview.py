"""The opening of docs/benchmarks.md: one table and one picture, from what other benchmarks measured."""

from __future__ import annotations

from typing import Any

import cifar_peers
import pages
import runs

KEEP = 0.462
Row = dict[str, Any]


def bars() -> list[tuple[str, str, float]]:
    """Library, way and top-1 at the paper's budget, the best first; of cut and repaired, the better."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in cifar_peers.rows():
        if row["keep"] == KEEP and "rule" not in row:
            way = ", ".join(filter(None, (row["way"], row.get("scope"))))
            best = max(value for value in (row.get("top1"), row.get("better")) if value is not None)
            found.setdefault((row["library"], way), []).append(best)
    means = [(library, way, sum(v) / len(v)) for (library, way), v in found.items()]
    return sorted(means, key=lambda bar: -bar[2])


def page() -> str:
    """The table, and the picture if there is something to compare."""
    what = "Bars: top-1 of ResNet-56 with 46.2 % of its FLOPs, without training, for every library and way"
    compared = {library for library, *_ in bars()} > {"fairpruner"}
    return "\n\n".join([table(), *[pages.picture("overview", what)] * compared])


def table() -> str:
    """Four questions with their measured answers, as Markdown."""
    lines = [line for line in (_accuracy(), _right(), _cost(), _speed()) if line]
    return pages.table(["question", "fairpruner", "others", "measured by"], lines)


def _accuracy() -> list[str] | None:
    ours = [(way, top1) for library, way, top1 in bars() if library == "fairpruner"]
    theirs = [(way, top1) for library, way, top1 in bars() if library != "fairpruner"]
    if not (ours and theirs):
        return None
    baseline = runs.stored("cifar_peers")[0]["baseline"]
    return [
        f"ResNet-56 on CIFAR-10 ({baseline:.2f} %) with 46.2 % of its FLOPs, no training: top-1",
        f"**{ours[0][1]:.1f} %** ({ours[0][0]})",
        f"Torch-Pruning {theirs[0][1]:.1f} % ({theirs[0][0]}, batch norms re-estimated)",
        "`cifar_peers`",
    ]


def _right() -> list[str] | None:
    stored = runs.stored("peers")
    by_model = {(row["model"], row["library"]): row for row in stored}
    both = [
        m for m, library in by_model if library == "fairpruner" and (m, "Torch-Pruning 1.6.1") in by_model
    ]
    if not both:
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
    """Accuracy of every way at the paper's budget, as bars."""
    from matplotlib.figure import Figure

    found = bars()[::-1]
    figure = Figure(figsize=(7, 0.6 + 0.32 * max(len(found), 1)), layout="constrained")
    axes = figure.subplots()
    colours = {"fairpruner": "#2a6f97", "Torch-Pruning": "#b0b0b0"}
    names = {
        "default": "fp.prune",
        "by hand": "reconstruction, global, repaired",
        "paper": "the paper's method",
    }
    labels = [f"{library}: {names.get(way, way)}" for library, way, _ in found]
    drawn = axes.barh(labels, [top1 for *_, top1 in found], color=[colours[library] for library, *_ in found])
    axes.bar_label(drawn, fmt="%.1f", padding=3)
    for row in runs.stored("cifar_peers")[:1]:
        axes.axvline(row["baseline"], color="black", linewidth=0.8, linestyle=":", label="original")
        axes.legend(frameon=False, loc="lower right")
    axes.set(xlim=(0, 105), xlabel="top-1 on CIFAR-10 in %, ResNet-56 with 46.2 % of its FLOPs, no training")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
