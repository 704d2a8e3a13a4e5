"""What repair costs: CPU time in forward passes of the original over the same data, and peak memory.

    python benchmarks/repair_cost.py --shared ../shared                     # what the results do not hold yet
    python benchmarks/repair_cost.py --shared ../shared --language FOLDER   # and a language model
    python benchmarks/repair_cost.py --table                                # only the table of docs/repair.md

*methods*: ResNet-56 with its real weights, 2,000 images, half of the FLOPs kept by `reconstruction` and
`global`, inner channels; top-1 is of all test images. *depth*: CIFAR ResNets of 20, 56 and 110 layers with
random weights, 2,000 images, every second inner channel removed, `sequential`. A language model loses a fifth
of its hidden units (smallest mean activation, the same share everywhere) and is repaired on 4,096 random
tokens. Peak memory is what the process held at most during the repair, above what it held before (Linux).
One thread.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pages
import torch
from cifar_models import CifarResNet, cifar10, resnet, some, top1
from torch import nn

import fairpruner as fp

IMAGES, TOKENS, LENGTH = 2000, 4096, 512
METHODS = ("mean", "least_squares", "least_squares+batchnorm", "sequential", "sequential+tune")
DEPTHS = (20, 56, 110)
Row = dict[str, Any]


def measured(model: nn.Module, data: list[Any], repair: Callable[[], Any]) -> tuple[Row, Any]:
    """The cost of a repair, and what it returns."""
    with torch.no_grad():
        _run(model, data[0])
        start = time.process_time()
        for batch in data:
            _run(model, batch)
        one_pass = time.process_time() - start
    held = _reset_peak()
    start = time.process_time()
    result = repair()
    spent = time.process_time() - start
    cost = {"forward_seconds": one_pass, "forwards": spent / one_pass, "peak_mb": (_peak() - held) / 1024}
    return {name: round(value, 2) for name, value in cost.items()}, result


def _run(model: nn.Module, batch: Any) -> Any:
    return model(**batch) if isinstance(batch, dict) else model(batch[0])


def _reset_peak() -> int:
    """Let the peak begin anew; the kilobytes held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def by_method(shared: Path, done: Callable[[Row], bool]) -> Iterator[Row]:
    """ResNet-56: cost and accuracy of each method, and of statistics that serve many plans."""
    ways = (*METHODS, "statistics", "least_squares from statistics")
    rows: list[Row] = [{"part": "methods", "model": "ResNet-56", "method": method} for method in ways]
    if all(map(done, rows)):
        return
    model, test, data = resnet(56, shared), cifar10("test", shared), some(cifar10("train10k", shared), IMAGES)
    spaces = fp.discover(model, data[0][0][:1], skip=["conv1"])
    scores = fp.score(model, data, spaces=spaces, removal="reconstruction")
    plan = fp.allocate(scores, keep=fp.Budget("flops", 0.5), rule="global")
    for row in rows[: len(METHODS)]:
        if not done(row):
            methods, small = row["method"].split("+"), fp.cut(model, plan)
            cost, repaired = measured(
                model, data, lambda s=small, m=methods: fp.repair(s, model, plan, data, method=m)
            )
            yield {**row, **cost, "top1": round(top1(repaired, test), 2)}
    cost, statistics = measured(model, data, lambda: fp.RepairStatistics(model, spaces, data))
    yield {**rows[-2], **cost}
    small = fp.cut(model, plan)
    cost, (repaired, _) = measured(model, data, lambda: statistics.repair(small, plan))
    yield {**rows[-1], **cost, "top1": round(top1(repaired, test), 2)}


def by_depth(shared: Path, done: Callable[[Row], bool]) -> Iterator[Row]:
    """The cost of `sequential` on nets of three depths."""
    data = some(cifar10("train10k", shared), IMAGES)
    for depth in DEPTHS:
        row: Row = {"part": "depth", "model": f"ResNet-{depth}", "method": "sequential"}
        if done(row):
            continue
        torch.manual_seed(0)
        model = CifarResNet((depth - 2) // 6).eval()
        spaces = fp.discover(model, data[0][0][:1], skip=["conv1"])
        plan = fp.Plan.removing(spaces, {space.name: range(0, space.size, 2) for space in spaces})
        small = fp.cut(model, plan)
        cost, _ = measured(
            model,
            data,
            lambda s=small, m=model, p=plan: fp.repair(s, m, p, data, method="sequential"),
        )
        yield {**row, **cost}


def language(folder: str) -> Row:
    """A language model: cost of `least_squares`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.vocab_size
    tokens = torch.randint(0, vocabulary, (TOKENS // LENGTH, LENGTH), generator=generator)
    data = [{"input_ids": rows} for rows in tokens.split(2)]
    spaces = fp.discover(model, {"input_ids": tokens[:1, :32]}, kinds=["hidden"])
    scores = fp.score(model, data, spaces=spaces, removal="activation")
    plan = fp.allocate(scores, keep=fp.Budget("units", 0.8), rule="uniform")
    small = fp.cut(model, plan)
    cost, _ = measured(model, data, lambda: fp.repair(small, model, plan, data, method="least_squares"))
    return {"part": "language", "model": Path(folder).name, "method": "least_squares", **cost}


def page() -> str:
    """The results as Markdown."""
    rows = [
        [r["model"], r["method"], f"{r['forwards']:.2f}", f"{r['peak_mb']:.0f}", f"{r.get('top1', '')}"]
        for r in _rows()
    ]
    return pages.table(["model", "method", "forward passes", "peak memory, MB", "top-1"], rows)


def _rows() -> list[Row]:
    rows: list[Row] = pages.results("repair_cost").get("rows", [])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--only", choices=("methods", "depth"))
    parser.add_argument("--language", help="the folder of a language model to measure too")
    parser.add_argument("--table", action="store_true", help="only put the table into docs/repair.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch.jit
    rows = _rows()

    def key(row: Row) -> tuple[str, ...]:
        return row["part"], row["model"], row["method"]

    def store(row: Row) -> None:
        print(row, flush=True)
        rows[:] = [other for other in rows if key(other) != key(row)] + [row]
        pages.store("repair_cost", {"threads": 1, "rows": rows})

    def done(row: Row) -> bool:
        return key(row) in set(map(key, rows))

    parts = {"methods": by_method, "depth": by_depth}
    for part, make in () if options.table else parts.items():
        if options.only in (None, part):
            for row in make(options.shared, done):
                store(row)
    if options.language:
        store(language(options.language))
    pages.fill("repair_cost", page())


if __name__ == "__main__":
    main()
