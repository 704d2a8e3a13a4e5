"""The paper's experiment on routed experts: what is left of a language model without half, three quarters or five sixths of them.

    pip install "fairpruner[hf,lm_eval,energy]"
    python benchmarks/moe.py --shared ../shared                      # the trained tiny Qwen2-MoE: about 40 minutes on two cores
    python benchmarks/moe.py --shared ../shared --only repair        # one part of: table, repair, costs, tasks
    python benchmarks/moe.py --shared ../shared --table              # only put the tables into docs/moe.md
    python benchmarks/moe.py --shared ../shared --model Qwen/Qwen1.5-MoE-A2.7B-Chat --only tasks --tasks wic,mmlu_pro

*table*: perplexity for every signal and rule, without any training, mean and spread over draws of calibration tokens.
*repair*: what each step of a repair without training adds, at half of the experts. *costs*: bytes, memory, prefill and
decode latency, energy. *tasks*: accuracy and parse rate of the paper's two tasks, calibrated on their other split.
Perplexity is over the first 24,576 validation tokens in windows of 128, the length the tiny model was trained on.
Writes benchmarks/results/moe.json; parts that were not asked for stay as they are.
"""

from __future__ import annotations

import argparse
import json
import lzma
import shlex
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision_shim  # noqa: F401 (transformers imports torchvision)
from torch import Tensor, nn

import fairpruner as fp
from fairpruner.evaluation import TASKS, evaluate, perplexity
from fairpruner.experts import expert_blocks
from fairpruner.inputs.hugging_face import pretrained, tokenizer_of

RESULTS = Path(__file__).parent / "results" / "moe.json"
PAGE = Path(__file__).parents[1] / "docs" / "moe.md"
WINDOW, VALIDATION, DOMAINS = 128, 24_576, 10
REMOVED = (0.5, 0.75, 5 / 6)
REMOVALS = ("soft_activation", "reap", "frequency", "random")
ROWS = (("random", "uniform"), ("frequency", "uniform"), *((s, rule) for s in ("soft_activation", "reap") for rule in ("uniform", "tod", "global")))
Row = dict[str, Any]


def tokens(shared: Path, name: str, dtype: str) -> np.ndarray:
    return np.frombuffer(lzma.open(shared / "data" / "text" / f"{name}.bin.xz").read(), dtype)


class Bench:
    """The model, its validation text, and draws of calibration text that take equally much of each domain."""

    def __init__(self, shared: Path, model: str, size: int) -> None:
        self.model = pretrained(model)
        self._train, self._domain, self._size = tokens(shared, "moe_tokens_train", "<u2"), tokens(shared, "moe_domains_train", "u1"), size
        self._validation = torch.from_numpy(tokens(shared, "moe_tokens_val", "<u2")[:VALIDATION].astype(np.int64))
        example = {"input_ids": self._validation[None, :WINDOW]}
        self.spaces = fp.discover(self.model, example, kinds=["expert"])

    def draw(self, seed: int) -> list[dict[str, Tensor]]:
        """Batches of 64 windows."""
        rng, windows = np.random.default_rng(seed), []
        for domain in range(DOMAINS):
            places = np.flatnonzero(self._domain == domain)[:-WINDOW]
            windows += [self._train[start : start + WINDOW] for start in rng.choice(places, self._size // WINDOW // DOMAINS)]
        chosen = torch.from_numpy(np.stack(windows)[rng.permutation(len(windows))].astype(np.int64))
        return [{"input_ids": some, "labels": some} for some in chosen.split(64)]

    def scores(self, seed: int) -> fp.Scores:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fp.FairprunerWarning)  # the spread over the draws is what the tables show
            return fp.score(self.model, self.draw(seed), spaces=self.spaces, removal=REMOVALS, protection="routed_taylor", seed=seed)

    def perplexity(self, model: nn.Module) -> float:
        return perplexity(model, self._validation, length=WINDOW, batch_size=32).value


def plan_for(scores: fp.Scores, signal: str, rule: str, removed: float) -> fp.Plan:
    experts = sum(space.size for space in scores.spaces)
    return fp.allocate(scores.using(signal), keep=fp.Budget("experts", round(experts * (1 - removed))), rule=rule, exact=True)


def spread(values: Sequence[float]) -> Row:
    return {"values": values, "mean": statistics.mean(values), "deviation": statistics.stdev(values) if len(values) > 1 else 0.0}


def measure_table(bench: Bench, draws: int) -> Row:
    """Perplexity by signal, rule and share removed."""
    found: dict[tuple[str, str, float], list[float]] = {}
    for seed in range(draws):
        scores = bench.scores(seed)
        for signal, rule in ROWS:
            for removed in REMOVED:
                small = fp.cut(bench.model, plan_for(scores, signal, rule, removed))
                found.setdefault((signal, rule, removed), []).append(bench.perplexity(small))
                print(seed, signal, rule, f"{removed:.3f}", f"{found[signal, rule, removed][-1]:.2f}", flush=True)
    return {
        "full": bench.perplexity(bench.model),
        "rows": [{"signal": s, "rule": rule, "removed": removed, **spread(values)} for (s, rule, removed), values in found.items()],
    }


def merged(model: nn.Module, plan: fp.Plan, scores: fp.Scores) -> nn.Module:
    """The cut, with every removed expert averaged into the kept one whose router row is most like its own, weighted by how often each is chosen."""
    small = fp.cut(model, plan)
    for block in expert_blocks(model):
        router = model.get_submodule(block.router).get_parameter("weight").detach()  # [E, H]
        often = torch.from_numpy(scores.removals["frequency"][block.name]).float()  # [E]
        gone = torch.tensor(plan.removed[block.name])
        kept = torch.tensor([unit for unit in range(block.size) if unit not in plan.removed[block.name]])
        unit_rows = torch.nn.functional.normalize(router, dim=1)
        nearest = (unit_rows[gone] @ unit_rows[kept].T).argmax(1)  # [gone] positions among the kept
        total = often[kept].index_add(0, nearest, often[gone]).clamp_min(1e-9)
        for name, stack in model.get_submodule(block.experts).named_parameters():
            weighted = stack.detach() * often[:, None, None]
            mean = weighted[kept].index_add(0, nearest, weighted[gone]) / total[:, None, None]
            small.get_submodule(block.experts).get_parameter(name).data.copy_(mean)
    return small


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
            note(f"{signal}, {rule}: removed experts merged into the nearest kept instead", merged(bench.model, plan, scores))
            note(f"{signal}, {rule}: kept and shared experts refitted", fp.repair(small, bench.model, plan, data, method="experts"))
    return {"full": bench.perplexity(bench.model), "rows": [{"step": step, **spread(values)} for step, values in found.items()]}


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
    """Bytes of a folder's tensors, and the resident memory above an idle process of one that loads and runs it."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", RESIDENT, str(folder)], cwd=Path(__file__).parent, check=True, capture_output=True, text=True)
    return {"disk": sum(file.stat().st_size for file in folder.glob("*.safetensors")), "resident": int(done.stdout.split()[-1])}


def measure_costs(bench: Bench, draws: int) -> Row:
    """Sizes, memory, latency and energy of the uniform plans beside the full model."""
    scores = bench.scores(0)
    example = {"input_ids": bench.draw(0)[0]["input_ids"][:1]}
    rows = []
    for removed in REMOVED:
        plan = plan_for(scores, "reap", "uniform", removed)
        small = fp.cut(bench.model, plan)
        measured = fp.measure(small, example, against=bench.model, batch_sizes=(1,), memory=False, energy="DEU")
        with tempfile.TemporaryDirectory() as folder:
            fp.save(bench.model, fp.Plan.removing(bench.spaces, {}), Path(folder) / "full")
            fp.save(small, plan, Path(folder) / "small")
            folders = {name: on_disk(Path(folder) / name) for name in ("full", "small")}
        rows.append({"removed": removed, "folders": folders, **measured.to_json()})
        print(measured, folders, flush=True)
    return {"rows": rows}


def asked(task: str, path: Path, tokenizer: Any, items: int) -> list[dict[str, Tensor]]:
    """Questions of a split with their answers, as calibration batches of 8."""
    rows = TASKS[task].read(path)[:items]
    texts = [f"{TASKS[task].prompt(row)} {TASKS[task].answer(row)}" for row in rows]
    coded = [tokenizer(texts[i : i + 8], return_tensors="pt", padding=True, truncation=True, max_length=512) for i in range(0, len(texts), 8)]
    return [{"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]} for batch in coded]


FILES = {"wic": ("wic_train.jsonl", "wic_validation.jsonl"), "mmlu_pro": ("mmlu_pro_validation.parquet", "mmlu_pro_test.jsonl.xz")}  # to calibrate, to evaluate


def measure_tasks(shared: Path, model: str, tasks: Sequence[str], limit: int | None) -> Row:
    """The paper's two tasks, zero-shot, with half of the experts: the full model, random experts, the paper's choice, and ours."""
    found, tokenizer = pretrained(model), tokenizer_of(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = []
    for task in tasks:
        calibration, evaluated = (shared / "data" / "text" / name for name in FILES[task])
        data = asked(task, calibration, tokenizer, 64)
        spaces = fp.discover(found, {name: values[:1] for name, values in data[0].items()}, kinds=["expert"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fp.FairprunerWarning)
            scores = fp.score(found, data, spaces=spaces, removal=REMOVALS, protection="routed_taylor")
        plans = {f"{signal}, {rule}": plan_for(scores, signal, rule, 0.5) for signal, rule in (("soft_activation", "tod"), ("reap", "uniform"))}
        plans |= {f"random, seed {seed}": fp.shuffled(plans["reap, uniform"], seed) for seed in range(3)}
        models = {"full": found, **{name: fp.cut(found, plan) for name, plan in plans.items()}}
        for name, small in models.items():
            outcome = evaluate(small, tokenizer, {task: evaluated}, limit=limit, calibration=calibration)[task]
            rows.append({"task": task, "model": name, **outcome.to_json()})
            print(task, name, f"accuracy {outcome.accuracy:.3f}, parse rate {outcome.parse_rate:.3f}, {outcome.items} items", flush=True)
    return {"model": Path(model).name, "limit": limit, "rows": rows}


START, END = "<!-- made by: python benchmarks/moe.py --table -->", "<!-- end -->"


FOLDER = {"disk": "size on disk", "resident": "resident memory to load and run"}


def tables(parts: Row) -> str:
    """The results as Markdown."""

    def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
        return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body))

    def cell(row: Row) -> str:
        return f"{row['mean']:.1f} ± {row['deviation']:.1f}"

    made = []
    if "table" in parts:
        part = parts["table"]
        cells = {(row["signal"], row["rule"], round(row["removed"], 3)): cell(row) for row in part["rows"]}
        body = [[signal, rule, *(cells[signal, rule, round(removed, 3)] for removed in REMOVED)] for signal, rule in ROWS]
        made.append(f"Full model: {part['full']:.2f}. Mean ± standard deviation over {part['draws']} draws of {part['tokens']:,} tokens.")
        made.append(table(["removal signal", "rule", *(f"{removed:.1%} removed" for removed in REMOVED)], body))
    if "repair" in parts:
        part = parts["repair"]
        made.append(f"Repair without training, half of the experts removed ({part['draws']} draws of {part['tokens']:,} tokens):")
        made.append(table(["step", "perplexity", "times the full model's"], [[r["step"], cell(r), f"{r['mean'] / part['full']:.2f}"] for r in part["rows"]]))
    if "costs" in parts:
        body = []
        for row in parts["costs"]["rows"]:
            known = [q for q in row["quantities"] if q["model"] is not None]
            body += [
                [f"{row['removed']:.1%}", f"{q['name']}, {q['unit']}" if q["unit"] else q["name"], f"{q['against']:,.4g}", f"{q['model']:,.4g}"] for q in known
            ]
            body += [
                [f"{row['removed']:.1%}", f"{what}, MB", *(f"{row['folders'][name][key] / 1e6:.1f}" for name in ("full", "small"))]
                for key, what in FOLDER.items()
            ]
            body += [[f"{row['removed']:.1%}", f"{t['what']}, ms", f"{t['against']['median']:.2f}", f"{t['model']['median']:.2f}"] for t in row["timings"]]
        made.append("What they cost (energy and CO2 are CodeCarbon's estimates, since this machine has no counter):")
        made.append(table(["removed", "quantity", "full", "pruned"], body))
    if "tasks" in parts:
        part = parts["tasks"]
        made.append(f"Tasks, {part['model']}, half of the experts removed:")
        body = [[r["task"], r["model"], f"{r['accuracy']:.1%}", f"{r['parse_rate']:.1%}", str(r["items"])] for r in part["rows"]]
        made.append(table(["task", "model", "accuracy", "parse rate", "items"], body))
    return "\n\n".join(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--model", help="a folder or a hub name; the tiny model of the shared folder by default")
    parser.add_argument("--only", choices=["table", "repair", "costs", "tasks"])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100_000, help="of calibration text in each draw")
    parser.add_argument("--tasks", default="wic,mmlu_pro")
    parser.add_argument("--limit", type=int, help="items of each task")
    parser.add_argument("--table", action="store_true", help="put the tables into docs/moe.md, measure nothing")
    options = parser.parse_args()
    results: Row = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    model = options.model or str(options.shared / "weights" / "tiny_qwen2moe")
    wanted = () if options.table else (options.only,) if options.only else ("table", "repair", "costs", "tasks")
    bench = Bench(options.shared, model, options.tokens) if set(wanted) - {"tasks"} else None
    for part in wanted:
        if bench is None or part == "tasks":
            found = measure_tasks(options.shared, model, options.tasks.split(","), options.limit)
        else:
            found = {"table": measure_table, "repair": measure_repair, "costs": measure_costs}[part](bench, options.draws)
            found |= {"draws": options.draws, "tokens": options.tokens}
        results[part] = {"command": shlex.join(["python", *sys.argv]), **found}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    before, rest = PAGE.read_text().split(START)
    PAGE.write_text(before + START + "\n\n" + tables(results) + "\n\n" + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
