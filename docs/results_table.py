"""Write the table of measured results into README.md, from the files in benchmarks/results.

python docs/results_table.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
START, END = "<!-- made by: python docs/results_table.py -->", "<!-- end -->"
HEAD = ("model, data, metric", "signal, rule", "kept", "original", "cut", "repaired", "script")


def table() -> str:
    """The table as markdown."""
    rows = [*_cifar(), *_minilm(), *_experts()]
    lines = [HEAD, tuple("---" for _ in HEAD), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{_speed()}\n"


def write() -> None:
    """Replace the text between the markers of the README."""
    before, _, rest = README.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{START}\n{table()}{END}{after}", encoding="utf-8")


def _results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def _cifar() -> Iterator[tuple[str, ...]]:
    rows = _results("cifar_resnet56")["rows"]
    for signal, rule, keep in (
        ("wasserstein", "tod", 0.7),
        ("reconstruction", "global", 0.7),
        ("wasserstein", "tod", 0.5),
        ("reconstruction", "global", 0.5),
    ):
        wanted = (56, keep, rule, signal)
        chosen = {
            row["repair"]: row
            for row in rows
            if (row["depth"], row["keep"], row["rule"], row["signal"]) == wanted
        }
        plain, repaired = chosen["plain"], chosen["sequential"]
        yield (
            "ResNet-56, CIFAR-10, top-1",
            f"{signal}, {rule}",
            f"{100 * plain['flops_kept']:.0f} % of FLOPs",
            *(f"{value:.2f} %" for value in (plain["baseline"], plain["top1"], repaired["top1"])),
            "`benchmarks/cifar_resnet56.py`",
        )


def _minilm() -> Iterator[tuple[str, ...]]:
    row = max(_results("minilm")["rows"], key=lambda row: row.get("repaired", 0.0))
    yield (
        "MiniLM-L6 (BERT), similarity to the original's embeddings",
        f"{row['signal']}, {row['rule']}",
        f"{100 * row['flops_kept']:.0f} % of FLOPs",
        "1",
        f"{row['plain']:.3f}",
        f"{row['repaired']:.3f}",
        "`benchmarks/minilm.py`",
    )


def _experts() -> Iterator[tuple[str, ...]]:
    found = _results("moe")["repair"]
    means = {row["step"]: row["mean"] for row in found["rows"]}
    yield (
        "small Qwen2-MoE, mixed text, perplexity",
        "reap, global",
        "50 % of experts",
        f"{found['full']:.1f}",
        f"{means['reap, global: the cut']:.1f}",
        f"{means['reap, global: kept and shared experts refitted']:.1f}",
        "`benchmarks/moe.py`",
    )


def _speed() -> str:
    timed = _results("latency")["resnet50"]
    rows = {row["batch"]: row for row in timed["speed-up"] if row["plan"].endswith("auto")}
    cost = _results("scoring")
    peer = cost["seconds for 256 images"]
    faster = [f"{rows[batch]['faster']['median']:.2f} times at batch {batch}" for batch in sorted(rows)]
    return (
        f"ResNet-50 with {100 * rows[1]['flops_kept']:.0f} % of its FLOPs is faster: {', '.join(faster)}"
        f" ({timed['machine']}; `benchmarks/latency.py`). Scoring VGG16-BN takes {cost['score / plain']:.2f}"
        " times as long as one plain forward and backward pass over the same images; the package of the"
        f" paper's authors, network-pruner 2.16, takes {peer['times faster']:.0f} times as long as fairpruner"
        " (`benchmarks/scoring.py`)."
    )


if __name__ == "__main__":
    write()
