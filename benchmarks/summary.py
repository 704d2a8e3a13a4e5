"""The accuracies in the README, from what other benchmarks measured."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from harness import pages, runs

HEAD = ("CIFAR-10, top-1", "FLOPs kept", "original", "the paper's method", "best by hand", "`fp.prune`")
WAYS = ("paper", "by hand", "default")


def page() -> str:
    """The default beside other ways, and other models."""
    return "\n\n".join([pages.table(HEAD, _default()), _reading(), _others()])


def _default() -> Iterator[tuple[str, ...]]:
    rows = [row for row in pages.results("default")["rows"] if row["part"] == "default"]
    for depth, keep in sorted({(row["depth"], row["keep"]) for row in rows}, reverse=True):
        chosen = [row for row in rows if (row["depth"], row["keep"]) == (depth, keep)]
        means = {
            way: [row["top1"] for row in chosen if row["way"] == way] for way in WAYS
        }  # top-1 of each draw
        if all(means.values()):
            yield (
                f"ResNet-{depth}",
                f"{100 * keep:.0f} %",
                f"{chosen[0]['baseline']:.2f} %",
                *(f"{mean(found):.2f} %" for found in means.values()),
            )


def _reading() -> str:
    return (
        "No training on labels: 2,000 calibration images, accuracy on all 10,000 test images"
        " (`benchmarks/default.py`). The paper's method is Wasserstein, Taylor and ToD, without repair. Best"
        " by hand is `reconstruction` with the rule `global`, no units of the residual stream removed, and"
        " `sequential` repair."
    )


def _others() -> str:
    text = max(runs.stored("minilm"), key=lambda row: row.get("repaired", 0.0))
    experts = {row["step"]: row for row in runs.stored("moe_repair") if row["rule"] == "global"}
    cut, repaired = (experts[step] for step in ("the cut", "kept and shared experts refitted"))
    return (
        f"- **Sentence embeddings**, MiniLM-L6 with {100 * text['flops_kept']:.0f} % of its FLOPs: the cosine"
        f" similarity to the original's embeddings is {text['plain']:.3f} after the cut and"
        f" {text['repaired']:.3f} after repair (`benchmarks/minilm.py`).\n"
        "- **Experts**, a small Qwen2-MoE with half of its experts: perplexity"
        f" {mean(cut['values']):.1f} after the cut and {mean(repaired['values']):.1f} after repair; the full"
        f" model has {cut['full']:.1f} (`benchmarks/moe_repair.py`)."
    )
