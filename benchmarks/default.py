"""What `fp.prune` finds when nothing but a budget is said, beside the best combination picked by hand.

    python benchmarks/default.py --shared ../shared                      # what the results do not hold yet
    python benchmarks/default.py --shared ../shared --depth 20 --keep 0.5  # only this model and budget
    python benchmarks/default.py --only protection                       # can any protection help ToD?
    python benchmarks/default.py --table                                 # only the tables of docs/search.md

*default*: CIFAR-10 ResNets (--shared), five draws of 2,000 training images, all 10,000 test images. `paper`
is the paper's method. `by hand` removes by `reconstruction` with the rule `global`, leaves the residual
stream whole and repairs sequentially: the best combination of docs/repair.md.

*protection*: ResNet-20 at half of its FLOPs, sequential repair. ToD with each protection signal beside the
rules `uniform` and `global`, three draws, judged by the KL divergence of the logits on 2,000 other training
images. Protection: `taylor` (first order, the paper's), `taylor2` (second order, sample by sample),
`deletion` (measured damage, on 64 images), `reconstruction` (what the others cannot replace). One thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pages
import torch
from cifar_models import cifar10, resnet, some, top1
from torch import Tensor, nn

import fairpruner as fp
from fairpruner.pipeline.search.judging import Judge

RESULTS = Path(__file__).parent / "results" / "default.json"
CALIBRATION, DRAWS, BUDGETS = 2000, 5, (0.5, 0.3, 0.7)
WAYS = ("paper", "by hand", "default")
PROTECTIONS = ("taylor", "taylor2", "deletion", "random")
# Removal signal, rule, protection signal. `reconstruction` protects what the other units cannot replace; as
# the protection of itself it would make ToD the rule `uniform`.
RULES = (
    *(("reconstruction", "tod", protection) for protection in PROTECTIONS),
    ("reconstruction", "uniform", ""),
    ("reconstruction", "global", ""),
    *(("l1", "tod", protection) for protection in ("taylor", "taylor2", "reconstruction")),
    ("l1", "uniform", ""),
)
Row = dict[str, Any]
Batches = list[tuple[Tensor, Tensor]]


def by_way(model: nn.Module, data: Batches, keep: fp.Budget, way: str) -> tuple[nn.Module, fp.Plan]:
    """The smaller model, and its plan."""
    if way == "paper":
        return fp.prune(model, data, keep=keep, preset="paper")
    if way == "default":
        return fp.prune(model, data, keep=keep)
    spaces = fp.discover(model, data[0][0][:1], skip=["conv1"])
    plan = fp.allocate(
        fp.score(model, data, spaces=spaces, removal="reconstruction"), keep=keep, rule="global"
    )
    return fp.repair(fp.cut(model, plan), model, plan, data, method="sequential"), plan


def default_rows(shared: Path, wanted: Callable[[Row], bool]) -> Iterator[Row]:
    """One row for each draw, model, budget and way, the most telling first."""
    images, test = cifar10("train10k", shared), cifar10("test", shared)

    @cache
    def original(depth: int) -> tuple[nn.Module, float]:
        """The model, in the layout that convolutions on a CPU like, and its accuracy."""
        model = resnet(depth, shared).to(memory_format=torch.channels_last)
        return model, round(top1(model, test), 2)

    for draw in range(DRAWS):
        for keep in BUDGETS:
            for depth in (20, 56):
                for way in reversed(WAYS):
                    row: Row = {"part": "default", "depth": depth, "keep": keep, "draw": draw, "way": way}
                    if not wanted(row):
                        continue
                    model, baseline = original(depth)
                    data = some(images, CALIBRATION, seed=draw)
                    forward = _seconds(lambda model=model, data=data: [model(x) for x, _ in data])
                    start = time.process_time()
                    small, plan = by_way(model, data, fp.Budget("flops", keep), way)
                    seconds = time.process_time() - start
                    yield {
                        **row,
                        "top1": round(top1(small, test), 2),
                        "baseline": baseline,
                        "flops_kept": round(plan.share("flops"), 4),
                        "forwards": round(seconds / forward, 1),
                        "tried": [trial.to_json() for trial in plan.tried],
                    }


def protection_rows(shared: Path, wanted: Callable[[Row], bool]) -> Iterator[Row]:
    """One row for each draw and rule."""
    images, model = cifar10("train10k", shared), resnet(20, shared)
    for draw in range(3):
        rows = [
            {"part": "protection", "draw": draw, "removal": removal, "rule": rule, "protection": protection}
            for removal, rule, protection in RULES
        ]
        if not any(map(wanted, rows)):
            continue
        batches = some(images, 2 * CALIBRATION, seed=draw)
        data, others = batches[: len(batches) // 2], batches[len(batches) // 2 :]
        spaces = fp.discover(model, data[0][0][:1], skip=["conv1"])
        few_images = [(x[:64], y[:64]) for x, y in data[:1]]  # a forward pass for each unit
        few = fp.score(model, few_images, spaces=spaces, removal="l1", protection="deletion")
        scores = fp.score(
            model,
            data,
            spaces=spaces,
            removal=["reconstruction", "l1"],
            protection=[p for p in PROTECTIONS if p != "deletion"],
        )
        more = {"deletion": few.protection, "reconstruction": scores.removals["reconstruction"]}
        scores = replace(scores, protections={**scores.protections, **more})
        for row in filter(wanted, rows):
            using = scores.using(row["removal"], row["protection"] or None)
            plan = fp.allocate(using, keep=fp.Budget("flops", 0.5), rule=row["rule"], exact=True)
            small = fp.repair(fp.cut(model, plan), model, plan, data, method="sequential")
            found = Judge(model, others, task="classification").distance(small)
            yield {**row, "divergence": round(found, 4), "flops_kept": round(plan.share("flops"), 4)}


def _seconds(action: Callable[[], Any]) -> float:
    """CPU seconds of a call."""
    with torch.no_grad():
        start = time.process_time()
        action()
        return time.process_time() - start


def _key(row: Row) -> tuple[Any, ...]:
    names = ("part", "depth", "keep", "draw", "way", "removal", "rule", "protection")
    return tuple(row.get(name) for name in names)


def _rows() -> list[Row]:
    rows: list[Row] = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    return rows


def _store(row: Row) -> None:
    """Add a row to what the file holds by now."""
    rows = [*_rows(), row]
    text = json.dumps({"command": "python benchmarks/default.py", "threads": 1, "rows": rows}, indent=1)
    RESULTS.write_text(text + "\n")


def page() -> str:
    """The results as Markdown."""
    rows = _rows()

    def spread(field: str, **wanted: Any) -> str:
        found = [r[field] for r in rows if all(r.get(name) == value for name, value in wanted.items())]
        if not found:
            return ""
        digits = {"divergence": 4, "forwards": 1}.get(field, 2)
        deviation = f" ± {statistics.stdev(found):.{digits}f}" if len(found) > 1 else ""
        return f"{statistics.mean(found):.{digits}f}{deviation} ({len(found)})"

    accuracy = [
        [
            f"ResNet-{depth}",
            f"{keep:g}",
            *(spread("top1", part="default", depth=depth, keep=keep, way=w) for w in WAYS),
            spread("forwards", part="default", depth=depth, keep=keep, way="default"),
        ]
        for depth in (20, 56)
        for keep in sorted(BUDGETS, reverse=True)
    ]
    protection = [
        [
            removal,
            rule,
            of,
            spread("divergence", part="protection", removal=removal, rule=rule, protection=of),
        ]
        for removal, rule, of in RULES
    ]
    measured = (
        (
            ["model", "FLOPs kept", *WAYS, "passes of the default"],
            [line for line in accuracy if any(line[2:])],
        ),
        (["removal", "rule", "protection", "divergence"], [line for line in protection if line[3]]),
    )
    return "\n\n".join(pages.table(head, body) for head, body in measured if body)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--only", choices=("default", "protection"))
    parser.add_argument("--depth", type=int)
    parser.add_argument("--keep", type=float)
    parser.add_argument("--draw", type=int)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--table", action="store_true", help="only put the tables into docs/search.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch.jit

    def wanted(row: Row) -> bool:
        asked = ((name, getattr(options, name)) for name in ("depth", "keep", "draw", "way"))
        fits = all(value is None or row.get(name, value) == value for name, value in asked)
        return fits and _key(row) not in {_key(done) for done in _rows()}

    parts = {"default": default_rows, "protection": protection_rows}
    for part, make in () if options.table else parts.items():
        if options.only in (None, part):
            for row in make(options.shared, wanted):
                print({name: value for name, value in row.items() if name != "tried"}, flush=True)
                _store(row)
    pages.fill("default", page())


if __name__ == "__main__":
    main()
