"""Writes docs/prunable.md from the rows that `python -m benchmarks zoo` measured.

python docs/prunable.py
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
INTRODUCTION = """# What can be pruned
"""
METHOD = """
`python -m benchmarks zoo` tries every model below, each in a separate process: it finds what can be removed, removes 40 % of each space at random, and saves and loads the smaller model. `python docs/prunable.py` writes this page from its results. All weights are random. The models of Hugging Face, of diffusers and those with experts are small versions, built from their configurations; of every family of timm, the smallest model is used. Full-size models have other widths, but the same parts can be removed. Torch-Pruning's own tests run on the models of torchvision, and on small networks for a dozen topics; for each topic there is a network here.

- A *channel* is one output of a convolution, with everything that reads it.
- A *hidden* unit is one neuron between two linear maps; in a gated MLP, the same unit of gate, up and down together.
- A *head* is one attention head, with its rows of q, k and v and its columns of the output projection; with grouped keys, one key-value group with its query heads.
- An *expert* is one routed expert, with its row of the router.
- A *block* is what one residual block adds to its stream. Blocks are only found if you name this kind, see [language_models.md](language_models.md#residual-blocks); they are not in the tables.

The embedding width of a transformer with LayerNorm cannot be pruned: its norms mix all channels, so they can only be removed together. With RMSNorm it can, if you name the kind `stream`. A part that cannot be removed on the example input is left out with the reason, and is never cut wrongly. `spaces.left_out` has the reasons for your model.

The columns:

- *found*: units by kind, and in how many spaces.
- *FLOPs kept*: the share of multiply-accumulates that is left after 40 % of each space was removed.
- *equal*: zeroing the removed units and cutting them give the same output in float64 with random weights (to 1e-8; to 1e-6 if the model itself rounds some numbers to float32; to 1e-4 for a model that only runs in float32, that takes more than 8 GB in float64, or that amplifies rounding; with the initial weights instead where random ones make the output chaotic), and params and FLOPs are as predicted. FLOPs are those of the example: a detector does more work where it finds more boxes, so for it they are an estimate, and a difference is written out. In float32, two detections may change places, because rounding can be larger than the difference of their scores; in float64 they do not.
- *saved*: a new process loads the cut model and computes the same.
- *discovery*: processor seconds, with its check, and how many forward passes over the same example take as long.
- *left out*: the number of names, besides those that reach the output, and why, in these words:
"""
# The beginning of a reason -> the words for it in the tables, and what they mean.
REASONS = {
    "a norm, a softmax or a shared size": ("tied", "a norm, a softmax or a shared size mixes all channels"),
    "shared by": ("shared", "a weight that all units share, such as a norm inside every head"),
    "a cut model cannot run": ("fixed size", "the model's code fixes this size, so a cut model cannot run"),
    "a cut changes the output's shape": ("fixed size", ""),
    "meets a size": ("fixed size", ""),
    "mask and cut differ": ("not exact", "zeroing and removing give different outputs"),
    "the example does not use it": ("unused", "the example does not use it"),
    "no weight reads it": ("not read", "no weight reads it"),
    "chooses places": ("places", "its numbers choose places in other tensors"),
    "written in place": ("in place", "written into a part of another tensor"),
    "passes through": ("no rule", "it passes through an operation that discovery does not follow"),
    "it is normalised": ("normalised", "the weight is normalised in every forward pass"),
    "a weight that reads it is standardised": ("normalised", ""),
    "routing needs": ("routing", "routing needs all of these experts"),
    "the model is random": ("random", "the model draws random numbers in eval mode"),
}
TITLES = {
    "topologies": "Topologies",
    "topics": "Topics of Torch-Pruning's tests",
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
HEAD = ("model", "example", "found", "FLOPs kept", "equal", "saved", "discovery", "left out")
COUNTS = (
    "",
    "models",
    "cut",
    "equal",
    "saved",
    "lose at least 30 % of FLOPs",
    "nothing to prune",
    "error",
    "slow",
)


def page(rows: list[dict[str, Any]], names: dict[str, str]) -> str:
    """The whole page; `names` are timm's families and the model that stands for each."""
    lines = [INTRODUCTION, counts(rows), "", _remarks(rows), METHOD, *_legend()]
    for group, mine in _groups(rows).items():
        titles = names if group == "timm" else {}
        cells = [_cells(titles.get(row["model"], row["model"]), row) for row in mine]
        lines += ["", f"## {TITLES[group]}", "", *_table(HEAD, cells)]
    return "\n".join(lines) + "\n"


def counts(rows: list[dict[str, Any]]) -> str:
    """A table with one line of counts for each group, and one for all."""
    lines = [(TITLES[group], *map(str, _count(mine))) for group, mine in _groups(rows).items()]
    return "\n".join(_table(COUNTS, [*lines, ("all", *map(str, _count(rows)))]))


def _groups(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each group that has some, by name."""
    groups = {group: [row for row in rows if row["group"] == group] for group in TITLES}
    return {group: sorted(mine, key=lambda row: row["model"]) for group, mine in groups.items() if mine}


def _count(rows: list[dict[str, Any]]) -> list[int]:
    cut = [row for row in rows if "kept" in row]
    return [
        len(rows),
        len(cut),
        sum(row["equal"] for row in cut),
        sum(bool(row["saved"]) for row in cut),
        sum(row["kept"]["flops"] <= 0.7 for row in cut),
        sum("nothing" in row for row in rows),
        sum("crash" in row for row in rows),
        sum(row["discovery_s"] > max(5, 40 * row["forward_s"]) for row in rows if "discovery_s" in row),
    ]


def _remarks(rows: list[dict[str, Any]]) -> str:
    """What is said of the counts."""
    cut = [row for row in rows if "kept" in row]
    flops = sum(row["predicted"] != row["counted"] for row in cut)
    outputs = sum(not row["equal"] and row["predicted"] == row["counted"] for row in cut)
    versions = {row.get("source", "") for row in rows}
    one = len(versions) == 1 and "" not in versions
    return (
        f"The rows were measured with {'one version' if one else 'several versions'} of the source."
        f" Zeroing and cutting give different outputs for {outputs} models. For {flops}, the FLOPs that were"
        " counted are not those predicted: these detectors do more work where they find more boxes. *slow*:"
        " discovery takes longer than both 5 processor seconds and 40 forward passes."
    )


def _legend() -> Iterator[str]:
    yield from (f"    - *{word}*: {meaning};" for word, meaning in REASONS.values() if meaning)


def _cells(name: str, row: dict[str, Any]) -> list[str]:
    if "crash" in row:
        return [name, "", f"error: {row['crash'].splitlines()[0][:90]}", "", "", "", "", ""]
    seconds = f"{row['discovery_s']:.1f} s, {row['discovery_s'] / row['forward_s']:.0f} passes"
    if "nothing" in row:
        reasons = Counter(
            _word(part.split(": ", 1)[-1]) for part in row["nothing"].split(": ", 1)[1].split("; ")
        )
        reasons.pop("", None)
        return [name, _example(row), "nothing", "100 %", "", "", seconds, ", ".join(reasons)]
    found = ", ".join(
        f"{units} {_plural(kind)} in {spaces}" for kind, (spaces, units) in row["found"].items()
    )
    left_out: Counter[str] = Counter()
    for reason, count in row["left_out"].items():
        left_out[_word(reason)] += count
    return [
        name,
        _example(row),
        found,
        f"{row['kept']['flops']:.0%}",
        "yes" if row["equal"] else _unequal(row),
        "yes" if row["saved"] else row.get("load_error", "another output")[:90],
        seconds,
        ", ".join(f"{count} {word}" for word, count in left_out.items()) or "–",
    ]


def _word(reason: str) -> str:
    """The short word for a reason; nothing for units that reach the output."""
    if reason.startswith("like "):
        reason = reason.split(", ", 1)[1]
    if reason.startswith("reaches the model's output"):
        return ""
    return next((word for start, (word, _) in REASONS.items() if reason.startswith(start)), reason[:40])


def _example(row: dict[str, Any]) -> str:
    """The example without its types: 1×3×64×64, or the names of the arguments."""
    shape = re.fullmatch(r"\w+\[([\d, ]+)\]", row["input"])
    if shape:
        return shape[1].replace(", ", "×")
    return ", ".join(re.findall(r"(\w+):", row["input"])) or row["input"]


def _unequal(row: dict[str, Any]) -> str:
    if row["predicted"] != row["counted"]:
        return f"FLOPs {row['counted'][1] / row['predicted'][1]:.4f} of the predicted"
    return f"differs by {row['difference']:.1g}"


def _plural(kind: str) -> str:
    return "hidden units" if kind == "hidden" else f"{kind}s"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return [_line(head), _line(["---"] * len(head)), *map(_line, lines)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def main() -> None:
    results = ROOT / "benchmarks" / "results"
    rows = json.loads((results / "zoo.json").read_text(encoding="utf-8"))["rows"]
    names = json.loads((results / "zoo_timm.json").read_text(encoding="utf-8"))
    (ROOT / "docs" / "prunable.md").write_text(page(rows, names), encoding="utf-8")


if __name__ == "__main__":
    main()
