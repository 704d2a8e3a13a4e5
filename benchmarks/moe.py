"""The paper's experiment on routed experts: language models without half, 3/4 or 5/6 of their experts.

    pip install "fairpruner[hf,lm_eval,energy]"
    python benchmarks/moe.py --shared ../shared --limit 20       # the tiny Qwen2-MoE, over an hour
    python benchmarks/moe.py --shared ../shared --only repair    # one part: table, constants, …
    python benchmarks/moe.py --table                             # only writes the tables of docs/moe.md
    python benchmarks/moe.py --shared ../shared --model Qwen/Qwen1.5-MoE-A2.7B-Chat --tasks wic,mmlu_pro

*table*: perplexity for every signal and rule, without training; mean and standard deviation over draws of
calibration tokens, once with equally many tokens from each of the text's 10 domains, and once as the text
comes.
*repair*: what each step of a repair without training adds, with half of the experts removed.
*constants*: removed experts that leave their mean outputs behind, compared with the other repairs of experts.
*costs*: bytes, memory, prefill and decode latency, energy.
*tasks*: the paper's tables: accuracy and parse rate of its two tasks, calibrated on their other split;
`--tasks` runs only this part.
Perplexity is over the first 24,576 validation tokens, in windows of 128, the length that the tiny model was
trained on; the tokenizer of another model reads the same text. Writes benchmarks/results/moe.json; other
parts of that file stay as they are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pages
import torch
import torchvision_shim  # noqa: F401 (transformers imports torchvision)
from routing import DOMAINS, VALIDATION, read_tokens
from torch import Tensor, nn

import fairpruner as fp
from fairpruner.evaluation import TASKS, evaluate, perplexity
from fairpruner.inputs.hugging_face import pretrained, tokenizer_of

RESULTS = Path(__file__).parent / "results" / "moe.json"
WINDOW = 128
REMOVED = (0.5, 0.75, 5 / 6)
REMOVALS = ("soft_activation", "reap", "frequency", "random")
ROWS = (
    ("random", "uniform"),
    ("frequency", "uniform"),
    *((s, rule) for s in ("soft_activation", "reap") for rule in ("uniform", "tod", "global")),
)
MIXES = ("equally much of each domain", "as the text comes")
Row = dict[str, Any]


class Bench:
    """The model, its validation text, and draws of calibration text."""

    def __init__(self, shared: Path, model: str, size: int, device: str) -> None:
        self.model = pretrained(model).to(device)
        tiny = str(shared / "weights" / "tiny_qwen2moe")
        self._reader, self._tokenizer = (
            (None, None) if model == tiny else (tokenizer_of(tiny), tokenizer_of(model))
        )
        self._train, self._domain, self._size = (
            read_tokens(shared, "moe_tokens_train").numpy(),
            read_tokens(shared, "moe_domains_train").numpy(),
            size,
        )
        self._validation = self._own(read_tokens(shared, "moe_tokens_val").numpy()[:VALIDATION])
        self.example = {"input_ids": self._validation[None, :WINDOW].to(device)}
        self.spaces = fp.discover(self.model, self.example, kinds=["expert"])

    def _own(self, ids: np.ndarray) -> Tensor:
        """The text of the stored tokens, which are the tiny model's, as tokens of this model."""
        if self._reader is not None and self._tokenizer is not None:
            ids = np.array(
                self._tokenizer(self._reader.decode(ids), add_special_tokens=False, verbose=False)[
                    "input_ids"
                ]
            )
        return torch.from_numpy(ids)

    def draw(self, seed: int, mix: str = MIXES[0]) -> list[dict[str, Tensor]]:
        """Batches of 64 windows."""
        rng, count = np.random.default_rng(seed), self._size // WINDOW
        kinds = (
            [self._domain == domain for domain in range(DOMAINS)] if mix == MIXES[0] else [self._domain >= 0]
        )
        starts = np.concatenate(
            [rng.choice(np.flatnonzero(kind)[:-WINDOW], count // len(kinds)) for kind in kinds]
        )
        stream = self._own(
            np.concatenate([self._train[start : start + WINDOW] for start in rng.permutation(starts)])
        )
        windows = stream[: len(stream) // WINDOW * WINDOW].view(-1, WINDOW)
        return [{"input_ids": some, "labels": some} for some in windows.split(64)]

    def scores(self, seed: int, mix: str = MIXES[0]) -> fp.Scores:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", fp.FairprunerWarning
            )  # the spread over the draws is what the tables show
            return fp.score(
                self.model,
                self.draw(seed, mix),
                spaces=self.spaces,
                removal=REMOVALS,
                protection="routed_taylor",
                seed=seed,
            )

    def perplexity(self, model: nn.Module) -> float:
        return perplexity(model, self._validation, length=WINDOW, batch_size=32).value


def plan_for(scores: fp.Scores, signal: str, rule: str, removed: float) -> fp.Plan:
    experts = sum(space.size for space in scores.spaces)
    return fp.allocate(
        scores.using(signal), keep=fp.Budget("experts", round(experts * (1 - removed))), rule=rule, exact=True
    )


def spread(values: Sequence[float]) -> Row:
    return {
        "values": values,
        "mean": statistics.mean(values),
        "deviation": statistics.stdev(values) if len(values) > 1 else 0.0,
    }


def measure_table(bench: Bench, draws: int) -> Row:
    """Perplexity by mix of the calibration text, signal, rule and share removed."""
    found: dict[tuple[str, str, str, float], list[float]] = {}
    for seed, mix in itertools.product(range(draws), MIXES):
        scores = bench.scores(seed, mix)
        for (signal, rule), removed in itertools.product(ROWS, REMOVED):
            small = fp.cut(bench.model, plan_for(scores, signal, rule, removed))
            values = found.setdefault((mix, signal, rule, removed), [])
            values.append(bench.perplexity(small))
            print(seed, mix, signal, rule, f"{removed:.3f}", f"{values[-1]:.2f}", flush=True)
    keys = ("mix", "signal", "rule", "removed")
    return {
        "full": bench.perplexity(bench.model),
        "rows": [dict(zip(keys, key, strict=True)) | spread(values) for key, values in found.items()],
    }


STEPS = {
    "kept experts moved towards the removed ones nearest to them": ["merge"],
    "kept and shared experts refitted": ["experts"],
    "moved, then refitted": ["merge", "experts"],
}
PART = 512  # features, a fraction of the tiny model's: real blocks are refitted in parts


def measure_repair(bench: Bench, draws: int) -> Row:
    """Perplexity after each step, with half of the experts gone."""
    found: dict[str, list[float]] = {}
    for seed in range(draws):
        scores, data = bench.scores(seed), bench.draw(seed)

        def note(step: str, small: nn.Module, seed: int = seed) -> None:
            found.setdefault(step, []).append(bench.perplexity(small))
            print(seed, step, f"{found[step][-1]:.2f}", flush=True)

        for signal, rule in (("reap", "uniform"), ("reap", "global")):
            plan = plan_for(scores, signal, rule, 0.5)
            small = fp.cut(bench.model, plan)
            note(f"{signal}, {rule}: the cut", small)
            for step, methods in STEPS.items():
                note(f"{signal}, {rule}: {step}", fp.repair(small, bench.model, plan, data, method=methods))
            with mock.patch("fairpruner.repair.experts.MOST_FEATURES", PART):
                note(
                    f"{signal}, {rule}: refitted in parts of {PART} features",
                    fp.repair(small, bench.model, plan, data, method="experts"),
                )
    return {
        "full": bench.perplexity(bench.model),
        "rows": [{"step": step, **spread(values)} for step, values in found.items()],
    }


WAYS: dict[str, list[str]] = {
    "the cut": [],
    "router weights divided by their sum (`renormalise`)": ["renormalise"],
    "kept and shared experts refitted (`experts`)": ["experts"],
    "removed experts leave constants behind (`constants`)": ["constants"],
    "constants, then refitted (`constants`, `experts`)": ["constants", "experts"],
}
SHARES = (0.25, 0.5)  # removed


def measure_constants(bench: Bench, draws: int) -> Row:
    """Perplexity after each way to repair, kept whatever the loss of the calibration data does."""
    found: dict[tuple[str, float], list[float]] = {}
    for seed in range(draws):
        scores, data = bench.scores(seed), bench.draw(seed)
        for removed, (way, methods) in itertools.product(SHARES, WAYS.items()):
            plan = plan_for(scores, "reap", "global", removed)
            small = fp.cut(bench.model, plan)
            if methods:
                small = fp.repair(
                    small, bench.model, plan, data, method=methods, loss=lambda *_: torch.zeros(())
                )
            values = found.setdefault((way, removed), [])
            values.append(bench.perplexity(small))
            print(seed, removed, way, f"{values[-1]:.2f}", flush=True)
    return {
        "full": bench.perplexity(bench.model),
        "rows": [
            {"way": way, "removed": removed, **spread(values)} for (way, removed), values in found.items()
        ],
    }


RESIDENT = """
import sys, torchvision_shim, torch, transformers
def memory(field):
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith(field)).split()[1])
idle = memory("VmRSS")
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
with torch.no_grad():
    model(input_ids=torch.zeros(1, 128, dtype=torch.int64))
print(memory("VmHWM") - idle)
"""


def on_disk(folder: Path) -> Row:
    """Bytes of a folder's tensors, and the resident memory above an idle process of one that loads and
    runs it.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RESIDENT, str(folder)],
        cwd=Path(__file__).parent,
        check=True,
        capture_output=True,
        text=True,
    )
    return {
        "disk": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        "resident": int(done.stdout.split()[-1]),
    }


def measure_costs(bench: Bench, draws: int) -> Row:
    """Sizes, memory, latency and energy of the uniform plans beside the full model."""
    scores = bench.scores(0)
    rows = []
    for removed in REMOVED:
        plan = plan_for(scores, "reap", "uniform", removed)
        small = fp.cut(bench.model, plan)
        measured = fp.measure(
            small, bench.example, against=bench.model, batch_sizes=(1,), memory=False, energy="DEU"
        )
        with tempfile.TemporaryDirectory() as folder:
            fp.save(bench.model, fp.Plan.removing(bench.spaces, {}), Path(folder) / "full")
            fp.save(small, plan, Path(folder) / "small")
            folders = {name: on_disk(Path(folder) / name) for name in ("full", "small")}
        rows.append({"removed": removed, "folders": folders, **measured.to_json()})
        print(measured, folders, flush=True)
    return {"rows": rows}


@dataclass(frozen=True)
class Protocol:
    """How the paper asks a task: from what it calibrates, what it evaluates, how much it removes, how
    many random choices it averages.
    """

    calibration: str
    evaluated: str
    removed: tuple[float, ...]
    seeds: int


PROTOCOLS = {
    "wic": Protocol("wic_train.jsonl", "wic_validation.jsonl", REMOVED, 10),
    "mmlu_pro": Protocol("mmlu_pro_validation.parquet", "mmlu_pro_test.jsonl.xz", (0.5,), 5),
}
METHODS = (
    ("frequency", "uniform"),
    ("soft_activation", "uniform"),
    ("soft_activation", "tod"),
    ("reap", "uniform"),
    ("reap", "global"),
)


def asked(task: str, path: Path, tokenizer: Any, size: int) -> list[dict[str, Tensor]]:
    """Questions of a split with their answers, about `size` tokens of them, as they are asked in the
    evaluation; batches of 8.
    """

    def text(row: Mapping[str, Any]) -> str:
        question, answer = TASKS[task].prompt(row), TASKS[task].answer(row)
        if not tokenizer.chat_template:
            return f"{question} {answer}"
        talk = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return str(tokenizer.apply_chat_template(talk, tokenize=False))

    texts = [text(row) for row in TASKS[task].read(path)]
    lengths = np.cumsum([len(tokenizer(some, verbose=False)["input_ids"]) for some in texts])
    texts = texts[: int(np.searchsorted(lengths, size)) + 1]
    coded = [
        tokenizer(texts[i : i + 8], return_tensors="pt", padding=True, truncation=True, max_length=512)
        for i in range(0, len(texts), 8)
    ]
    return [{"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]} for batch in coded]


def measure_tasks(
    shared: Path, model: str, tasks: Sequence[str], limit: int | None, size: int, device: str
) -> Row:
    """The paper's two tasks, zero-shot: the full model, the paper's baselines and choice, and ours."""
    full, tokenizer = pretrained(model).to(device), tokenizer_of(model)
    rows: list[Row] = []
    for task in tasks:
        protocol = PROTOCOLS[task]
        calibration, evaluated = (
            shared / "data" / "text" / name for name in (protocol.calibration, protocol.evaluated)
        )
        data = asked(task, calibration, tokenizer, size)
        spaces = fp.discover(
            full, {name: values[:1].to(device) for name, values in data[0].items()}, kinds=["expert"]
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fp.FairprunerWarning)
            scores = fp.score(full, data, spaces=spaces, removal=REMOVALS, protection="routed_taylor")
        wanted: list[tuple[str, float, list[fp.Plan]]] = [("full", 0.0, [fp.Plan.removing(spaces, {})])]
        for removed in protocol.removed:
            plans = {f"{signal}, {rule}": plan_for(scores, signal, rule, removed) for signal, rule in METHODS}
            wanted.append(
                (
                    "random, uniform",
                    removed,
                    [fp.shuffled(plans["frequency, uniform"], seed) for seed in range(protocol.seeds)],
                )
            )
            wanted += [(method, removed, [plan]) for method, plan in plans.items()]
        for method, removed, choices in wanted:
            found = [
                evaluate(
                    fp.cut(full, plan), tokenizer, {task: evaluated}, limit=limit, calibration=calibration
                )[task]
                for plan in choices
            ]
            shares = {
                name: spread([getattr(outcome, name) for outcome in found])
                for name in ("accuracy", "parse_rate")
            }
            categories = {
                kind: statistics.mean(outcome.categories[kind].accuracy for outcome in found)
                for kind in found[0].categories
            }
            rows.append(
                {
                    "task": task,
                    "method": method,
                    "removed": removed,
                    "items": found[0].items,
                    **shares,
                    "categories": categories,
                }
            )
            print(
                task,
                method,
                f"{removed:.3f}",
                *(f"{name} {share['mean']:.3f} ± {share['deviation']:.3f}" for name, share in shares.items()),
                flush=True,
            )
    return {"model": Path(model).name, "limit": limit, "rows": rows}


FOLDER = {"disk": "size on disk", "resident": "resident memory to load and run"}


def cell(values: Row, form: str = ".1f") -> str:
    return f"{values['mean']:{form}}" + (
        f" ± {values['deviation']:{form}}" if len(values["values"]) > 1 else ""
    )


def show_table(part: Row) -> list[str]:
    shown = [
        f"Full model: {part['full']:.2f}. Mean ± standard deviation over {part['draws']} draws of"
        f" {part['tokens']:,} tokens."
    ]
    for mix in MIXES:
        cells = {
            (row["signal"], row["rule"], round(row["removed"], 3)): cell(row)
            for row in part["rows"]
            if row["mix"] == mix
        }
        body = [
            [signal, rule, *(cells[signal, rule, round(removed, 3)] for removed in REMOVED)]
            for signal, rule in ROWS
        ]
        shown += [
            f"Calibration text: {mix}.",
            pages.table(["removal signal", "rule", *(f"{removed:.1%} removed" for removed in REMOVED)], body),
        ]
    return shown


def show_repair(part: Row) -> list[str]:
    body = [[row["step"], cell(row), f"{row['mean'] / part['full']:.2f}"] for row in part["rows"]]
    title = (
        f"Repair without training, half of the experts removed ({part['draws']} draws of {part['tokens']:,}"
        " tokens, equally much of each domain):"
    )
    return [title, pages.table(["step", "perplexity", "times the full model's"], body)]


def show_constants(part: Row) -> list[str]:
    cells = {(row["way"], row["removed"]): cell(row, ".2f") for row in part["rows"]}
    title = (
        f"Ways to repair blocks of experts, `reap` with `global` ({part['draws']} draws of {part['tokens']:,}"
        f" tokens, equally much of each domain; full model: {part['full']:.2f}):"
    )
    body = [[way, *(cells[way, removed] for removed in SHARES)] for way in WAYS]
    return [title, pages.table(["", *(f"{removed:.0%} removed" for removed in SHARES)], body)]


def show_costs(part: Row) -> list[str]:
    def amount(value: float) -> str:
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"

    def values(row: Row, side: str) -> dict[str, str]:
        """What was measured of one model, `side` being "model" (the pruned one) or "against" (the full
        one).
        """
        shown = {
            f"{q['name']}, {q['unit']}" if q["unit"] else q["name"]: amount(q[side])
            for q in row["quantities"]
            if q["model"] is not None
        }
        shown |= {
            f"{what}, MB": f"{row['folders']['small' if side == 'model' else 'full'][key] / 1e6:.1f}"
            for key, what in FOLDER.items()
        }
        for timing in row["timings"]:
            median = timing[side]["median"]
            shown[f"{timing['what']}, ms"] = f"{median:.2f}" + (
                f" ({timing['against']['median'] / median:.2f} ×)" if side == "model" else ""
            )
        return shown

    columns = [values(part["rows"][0], "against"), *(values(row, "model") for row in part["rows"])]
    title = (
        "What they cost: plans of equal depth, one text of 128 tokens; in brackets, how many times faster"
        " than the full model in the same run. Energy and CO2 are CodeCarbon's estimates, since this machine"
        " has no counter."
    )
    head = ["", "full", *(f"{row['removed']:.1%} removed" for row in part["rows"])]
    return [title, pages.table(head, [[name, *(column[name] for column in columns)] for name in columns[0]])]


def show_tasks(part: Row) -> list[str]:
    shown = [f"<details><summary>The paper's two tasks, {part['model']}</summary>"]
    for task in dict.fromkeys(row["task"] for row in part["rows"]):
        rows = [row for row in part["rows"] if row["task"] == task]
        body = [
            [
                row["method"],
                f"{row['removed']:.1%}",
                cell(row["accuracy"], ".1%"),
                cell(row["parse_rate"], ".1%"),
            ]
            for row in rows
        ]
        shown += [
            f"{task}, {rows[0]['items']:,} items:",
            pages.table(["removal signal, rule", "removed", "accuracy", "parse rate"], body),
        ]
        if kinds := list(rows[0]["categories"]):
            body = [[kind, *(f"{row['categories'][kind]:.1%}" for row in rows)] for kind in kinds]
            shown += [
                f"{task}, accuracy by category:",
                pages.table(["", *(row["method"] for row in rows)], body),
            ]
    return [*shown, "</details>"]


SHOWN = {
    "table": show_table,
    "repair": show_repair,
    "constants": show_constants,
    "costs": show_costs,
    "tasks": show_tasks,
}


def page() -> str:
    """All tables as Markdown."""
    results = pages.results("moe")
    return "\n\n".join(
        line for part, show in SHOWN.items() if part in results for line in show(results[part])
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument(
        "--model", help="a folder or a hub name; the tiny model of the shared folder by default"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=list(SHOWN))
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100_000, help="of calibration text in each draw")
    parser.add_argument("--tasks", help="measure only these, of wic,mmlu_pro")
    parser.add_argument("--limit", type=int, help="items of each task")
    parser.add_argument(
        "--table", action="store_true", help="put the tables into docs/moe.md, measure nothing"
    )
    options = parser.parse_args()
    results: Row = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    model = options.model or str(options.shared / "weights" / "tiny_qwen2moe")
    only = "tasks" if options.tasks else options.only
    wanted = () if options.table else (only,) if only else tuple(SHOWN)
    bench = Bench(options.shared, model, options.tokens, options.device) if set(wanted) - {"tasks"} else None
    for part in wanted:
        if bench is None or part == "tasks":
            tasks = (options.tasks or ",".join(PROTOCOLS)).split(",")
            found = measure_tasks(options.shared, model, tasks, options.limit, options.tokens, options.device)
        else:
            found = {
                "table": measure_table,
                "repair": measure_repair,
                "constants": measure_constants,
                "costs": measure_costs,
            }[part](bench, options.draws)
            found |= {"draws": options.draws, "tokens": options.tokens}
        results[part] = {"command": shlex.join(["python", *sys.argv]), **found}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    pages.fill("moe", page())


if __name__ == "__main__":
    main()
