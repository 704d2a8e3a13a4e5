"""Writes docs/prunable.md from the rows that `python benchmarks/zoo.py` measured.

python docs/prunable.py
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
INTRODUCTION = """# What can be pruned

`python benchmarks/zoo.py` tries every model below, each in a separate process: it finds what can be removed, removes 40 % of each space at random, and saves and loads the smaller model. `python docs/prunable.py` writes this page from its results. All weights are random. The models of Hugging Face, of diffusers and those with experts are small versions, built from their configurations; of every family of timm, the smallest model is used. Full-size models have other widths, but the same parts can be removed.

- A *channel* is one output of a convolution, with everything that reads it.
- A *hidden* unit is one neuron between two linear maps; in a gated MLP, the same unit of gate, up and down together.
- A *head* is one attention head, with its rows of q, k and v and its columns of the output projection; with grouped keys, one key-value group with its query heads.
- An *expert* is one routed expert, with its row of the router.
- A *block* is what one residual block adds to its stream. Blocks are only found if you name this kind, see [language_models.md](language_models.md#residual-blocks); they are not in the tables.

The embedding width of a transformer with LayerNorm cannot be pruned: its norms mix all channels, so they can only be removed together. With RMSNorm it can, if you name the kind `stream`. A part that cannot be removed on the example input is left out with the reason, and is never cut wrongly. `spaces.left_out` has the reasons for your model.

The columns:

- *found*: units by kind, and in how many spaces.
- *FLOPs kept*: the share of multiply-accumulates that is left after 40 % of each space was removed.
- *equal*: zeroing the removed units and cutting them give the same output in float64 with random weights (to 1e-8; to 1e-4 for a model that only runs in float32), and params and FLOPs are as predicted. FLOPs are those of the example: a detector does more work where it finds more boxes, so for it they are an estimate, and a difference is written out.
- *saved*: a new process loads the cut model and computes the same.
- *seconds*: of processor time for discovery, with its check, and how many forward passes over the same example take as long.
- *left out*: how many names, besides those that reach the output.
"""
TITLES = {
    "topologies": "Topologies",
    "torchvision": "torchvision, classification",
    "torchvision-detection": "torchvision, detection",
    "torchvision-segmentation": "torchvision, segmentation",
    "torchvision-video": "torchvision, video",
    "timm": "timm, the smallest model of each family",
    "transformers": "Hugging Face transformers",
    "experts": "Mixture of experts",
    "diffusers": "diffusers",
    "ultralytics": "Ultralytics",
    "graphs": "PyTorch Geometric",
}
HEAD = ("model", "example", "found", "FLOPs kept", "equal", "saved", "seconds", "left out")


def page(rows: dict[str, Any], names: dict[str, str]) -> str:
    """The whole page; `names` are timm's families and the model that stands for each."""
    lines = [INTRODUCTION, *_summary(rows)]
    for group, title in TITLES.items():
        mine = {
            path.partition("/")[2]: row for path, row in sorted(rows.items()) if path.startswith(f"{group}/")
        }
        if mine:
            lines += ["", f"## {title}", "", _line(HEAD), _line(["---"] * len(HEAD))]
            lines += [
                _line(_cells(names.get(name, name) if group == "timm" else name, row))
                for name, row in mine.items()
            ]
    return "\n".join(lines) + "\n"


def _summary(rows: dict[str, Any]) -> Iterator[str]:
    cut = [row for row in rows.values() if "kept" in row]
    timm = [row for path, row in rows.items() if path.startswith("timm/")]
    enough = sum(row.get("kept", {"flops": 1})["flops"] <= 0.7 for row in timm)
    slow = sum(
        row["discovery_s"] > max(5, 40 * row["forward_s"]) for row in rows.values() if "discovery_s" in row
    )
    yield (
        f"{len(rows)} models: {len(cut)} are cut, {sum(row['equal'] for row in cut)} of them equal and"
        f" {sum(row['saved'] for row in cut)} saved; in {sum('nothing' in row for row in rows.values())} there is"
        f" nothing to prune, and {sum('crash' in row for row in rows.values())} stop with an error. Of"
        f" {len(timm)} families of timm, {enough} lose at least 30 % of their FLOPs. Discovery takes longer than"
        f" both 5 seconds and 40 forward passes for {slow} models."
    )


def _cells(name: str, row: dict[str, Any]) -> list[str]:
    if "crash" in row:
        return [name, "", f"stops with {row['crash']}", "", "", "", "", ""]
    seconds = f"{row['discovery_s']:.1f} ({row['discovery_s'] / row['forward_s']:.0f} passes)"
    if "nothing" in row:
        return [name, row["input"], "nothing", "100 %", "", "", seconds, row["nothing"].split(": ", 1)[1]]
    found = ", ".join(
        f"{units} {_plural(kind)} in {spaces}" for kind, (spaces, units) in row["found"].items()
    )
    return [
        name,
        row["input"],
        found,
        f"{row['kept']['flops']:.0%}",
        "yes" if row["equal"] else _unequal(row),
        "yes" if row["saved"] else row.get("load_error", "another output"),
        seconds,
        "; ".join(f"{count}x {reason}" for reason, count in _merged(row["left_out"]).items()) or "–",
    ]


def _merged(reasons: dict[str, int]) -> Counter[str]:
    """Reasons without the messages of torch, so that equal ones are counted together."""
    total: Counter[str] = Counter()
    for reason, count in reasons.items():
        total[reason.split(": ")[0]] += count
    return total


def _unequal(row: dict[str, Any]) -> str:
    if row["predicted"] != row["counted"]:
        return f"FLOPs {row['counted'][1] / row['predicted'][1]:.4f} of the predicted"
    return f"differs by {row['difference']:.1g}"


def _plural(kind: str) -> str:
    return "hidden units" if kind == "hidden" else f"{kind}s"


def _line(cells: Any) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def main() -> None:
    results = ROOT / "benchmarks" / "results"
    rows = json.loads((results / "zoo.json").read_text(encoding="utf-8"))["rows"]
    names = json.loads((results / "zoo_timm.json").read_text(encoding="utf-8"))
    (ROOT / "docs" / "prunable.md").write_text(page(rows, names), encoding="utf-8")


if __name__ == "__main__":
    main()
