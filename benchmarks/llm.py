"""How well a pruned language model still predicts text, beside the methods of others.

A share of the parameters of SmolLM2-135M-Instruct outside of its embedding is removed, and at one share of
those of Gemma-3-270M. Perplexity, and the agreement of the most likely next token with the original's, are
taken on 6,144 tokens of validation text, in windows of 512. The calibration text is 16 full windows of 512,
drawn from training text. More text would improve the repairs; this much lets a row take minutes on one core.
Rows of tasks have the accuracy on some items of WiC and MMLU-Pro. `data/language_models.py` of the shared
folder makes the models (needs gguf).

Methods of others (`llm_peers.py`), measured on the same text:

- *magnitude*: the squared weights of a unit, the same share in every layer.
- *Taylor, global*: LLM-Pruner's sum over a unit's weights of |weight x gradient|, one ranking of all units.
- *FLAP*: the fluctuation of what a consumer reads times its squared weights, standardised in every layer, one
  ranking; the mean of what is removed becomes a bias.
- *SliceGPT*: the stream keeps its first principal components, in another basis before every norm.
- *ShortGPT*: whole layers with the least block influence.

Rows of this package name signal and rule, and after a plus sign its repair with the calibration text.
`fp.prune` has nothing but a budget.
"""

from __future__ import annotations

import resource
import runpy
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import llm_peers as peers
import numpy as np
from harness import pages, runs
from nets.llm_setting import Setting
from torch import nn

import fairpruner as fp
from fairpruner.evaluation import evaluate
from fairpruner.evaluation.tasks import find_files

NAME = "llm"
SHARES, DRAWS = (0.2, 0.1, 0.3, 0.5), 3
CALIBRATED, TESTED = 16, 12  # windows
ITEMS = 100  # of each task
FOLDERS = Path.home() / ".cache" / "fairpruner"
TITLES = {"smollm2": "SmolLM2-135M-Instruct", "gemma3": "Gemma-3-270M"}
SIGNALS = ["surgeon", "reconstruction", "saliency", "activation"]
PEER_SIGNALS = ["magnitude", peers.ElementTaylor()]
Row = dict[str, Any]
Way = Callable[[Setting, float], nn.Module]

# WikiText-2 perplexity of Llama-2-7B without training, as one table of others quotes it; not measured here.
QUOTED = (
    ("LLM-Pruner", "50 %", "31.05"),
    ("SliceGPT", "50 %", "24.82"),
    ("LLM Surgeon", "50 %", "15.38"),
    ("MoDeGPT", "50 %", "11.88"),
    ("DISP-LLM", "50 %", "9.84"),
)


@dataclass(frozen=True)
class BySignal:
    """Remove hidden units and groups of heads by a signal and a rule of this package."""

    removal: str
    rule: str
    repair: tuple[str, ...] = ()
    signals: tuple[Any, ...] = tuple(SIGNALS)  # that are scored together

    def __call__(self, setting: Setting, share: float) -> nn.Module:
        scores = setting.scores(self.signals).using(removal=self.removal)
        plan = fp.allocate(scores, keep=setting.budget(share), rule=self.rule, exact=True)
        small = fp.cut(setting.model, plan)
        if not self.repair:
            return small
        return fp.repair(small, setting.model, plan, setting.data, method=self.repair)


def by_peer(removal: str, rule: str) -> Way:
    return BySignal(removal, rule, signals=tuple(PEER_SIGNALS))


def blocks_too(setting: Setting, share: float) -> nn.Module:
    """Hidden units, groups of heads and residual blocks by one signal under one budget."""
    scores = setting.scores(["surgeon"], ("hidden", "head", "block"))
    plan = fp.allocate(scores, keep=setting.budget(share), rule="global", exact=True)
    small = fp.cut(setting.model, plan)
    return fp.repair(small, setting.model, plan, setting.data, method=["least_squares", "sequential"])


def blocks_alone(setting: Setting, share: float) -> nn.Module:
    """Residual branches, attention or MLP, by their influence."""
    scores = setting.scores(["influence"], ("block",))
    plan = fp.allocate(scores, keep=setting.budget(share), rule="global")
    small = fp.cut(setting.model, plan)
    return fp.repair(small, setting.model, plan, setting.data, method=["least_squares", "sequential"])


def default(setting: Setting, share: float) -> nn.Module:
    small, plan = fp.prune(setting.model, setting.data, keep=setting.budget(share))
    for trial in plan.tried:
        print(trial, flush=True)
    return small


BEST = "fairpruner: surgeon, global + least_squares, sequential"
DEFAULT = "fairpruner: `fp.prune`"
FIRST: dict[str, Way] = {
    BEST: BySignal("surgeon", "global", ("least_squares", "sequential")),
    "magnitude": by_peer("magnitude", "uniform"),
    "Taylor, global (LLM-Pruner)": by_peer("element_taylor", "global"),
    "FLAP": peers.flap,
    "SliceGPT": peers.slicegpt,
    "ShortGPT": peers.shortgpt,
    DEFAULT: default,
}
WAYS: dict[str, Way] = {
    **FIRST,
    "fairpruner: surgeon, global": BySignal("surgeon", "global"),
    "fairpruner: surgeon, blocks too, global + repair": blocks_too,
    "fairpruner: blocks by influence + repair": blocks_alone,
    **{
        f"fairpruner: {signal}, {rule} + least_squares": BySignal(signal, rule, ("least_squares",))
        for signal in SIGNALS
        for rule in ("global", "tod", "uniform")
    },
}


def cases(quick: bool) -> Iterator[Row]:
    """The methods of others and the best of this package; other signals and rules at one share, one draw."""
    judged: Row = {"model": "smollm2", "windows": 1 if quick else TESTED}
    if quick:
        yield from ({**judged, "share": 0.2, "draw": 0, "way": way, "quick": True} for way in FIRST)
        return
    for draw in range(DRAWS):
        for share in SHARES:
            for way in FIRST:
                if way != DEFAULT or not draw or share == 0.2:  # it takes as long as all others together
                    yield {**judged, "share": share, "draw": draw, "way": way}
    at_one_share: Row = {**judged, "share": 0.2, "draw": 0}
    yield from ({**at_one_share, "way": way} for way in WAYS if way not in FIRST)
    tried: Row = {"model": "smollm2", "items": ITEMS, "share": 0.2, "draw": 0}
    yield from ({**tried, "way": way} for way in ["original", *FIRST])
    for way in FIRST:
        if way != "SliceGPT":  # its layers here are those of a Llama
            yield {**at_one_share, "way": way, "model": "gemma3"}


@cache
def setting(model: str, shared: Path, draw: int, quick: bool) -> Setting:
    """The model, made if need be, and the text of one draw."""
    make: Any = runpy.run_path(str(shared / "data" / "language_models.py"))
    folder = make["fetch"](model, FOLDERS / model)
    sizes = (2, 1) if quick else (CALIBRATED, TESTED)
    kept = None if quick else folder / "scores"
    made = Setting(folder, shared, draw, sizes=sizes, begun=model == "gemma3", cache=kept)
    peers.register(made)
    return made


def measure(case: Row, shared: Path) -> Row:
    """Prune once, and judge."""
    warnings.simplefilter("ignore", fp.FairprunerWarning)
    way = case["way"]
    own = setting(case["model"], shared, case["draw"], case.get("quick", False))
    start = time.process_time()
    small = own.model if way == "original" else WAYS[way](own, case["share"])
    seconds = time.process_time() - start
    if "items" in case:
        files = find_files(("wic", "mmlu_pro"), own.shared / "data" / "text")
        found = evaluate(small.eval(), own.tokenizer, files, limit=case["items"])
        return {task: round(result.accuracy, 4) for task, result in found.items()}
    return {
        **own.judge(small.eval()),
        "original": round(own.judge.perplexity, 2),
        "removed": case["share"] if way == "SliceGPT" else round(own.removed(small), 4),
        "seconds": round(seconds, 1),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def page() -> str:
    """Perplexity and agreement of every way, the mean over draws, and what others report elsewhere."""
    parts = [part for model in TITLES for part in _of_model(model)]
    if not parts:
        return "Not measured yet."
    quoted = pages.table(["quoted, not measured here", "removed", "perplexity"], QUOTED)
    beside = "Others report for Llama-2-7B on WikiText-2, as one table quotes them:"
    return "\n\n".join([*parts, *_tasks(), beside, quoted])


def _of_model(model: str) -> list[str]:
    """What was measured on one model: a sentence and a table."""
    found = [row for row in runs.stored(NAME) if "windows" in row and row["model"] == model]
    if not found:
        return []
    shares = sorted({row["share"] for row in found})
    lines = []
    for way in WAYS:
        own = [row for row in found if row["way"] == way]
        if own:
            cells = [_cell([row for row in own if row["share"] == share]) for share in shares]
            cost, held = (np.median([row[field] for row in own]) for field in ("seconds", "peak_gb"))
            lines.append([way, *cells, f"{cost:.0f}", f"{held:.1f}"])
    head = ["", *(f"{share:.0%} removed" for share in shares), "seconds", "GB"]
    original = found[0]["original"]
    told = f"{TITLES[model]}: perplexity (agreement of the most likely next token in %; n draws)."
    told += f" The original has {original}."
    best = min((r for r in found if r["share"] == 0.2), key=lambda r: r["perplexity"], default=None)
    if best:
        told += f" The best row at 20 % has {best['perplexity'] / original:.2f} times that: {best['way']}."
    told += " Seconds are processor time on one core, without the scores where they were made before."
    return [told, pages.table(head, lines)]


def _tasks() -> list[str]:
    """The accuracy on tasks, if it was measured."""
    found = [row for row in runs.stored(NAME) if "items" in row]
    lines = [[r["way"], *(f"{100 * r[task]:.0f}" for task in ("wic", "mmlu_pro"))] for r in found]
    told = (
        f"Accuracy in % on {ITEMS} items of each task, 20 % removed, one draw. Guessing has 50 % and 10 %,"
        " and an output that is no answer counts as wrong: for a model of this size, the numbers mostly show"
        " whether it still answers in the form that is asked for."
    )
    return [told, pages.table(["", "WiC", "MMLU-Pro"], lines)] if found else []


def _cell(found: list[Row]) -> str:
    if not found:
        return "–"
    perplexity = float(np.mean([row["perplexity"] for row in found]))
    agreement = 100 * float(np.mean([row["agreement"] for row in found]))
    return f"{perplexity:.1f} ({agreement:.0f}{f'; {len(found)}' if len(found) > 1 else ''})"
