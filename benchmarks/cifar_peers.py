"""ResNet-56 on CIFAR-10 (the paper's Table 1), without training: fairpruner beside Torch-Pruning 1.6.1.

Every library sees the same 2,000 training images per draw; top-1 is of all 10,000 test images. Torch-Pruning
has no FLOPs budget, so its pruning ratio is searched until `fp.count_flops` is nearest to the budget. Each of
its criteria runs globally and with one ratio for all layers, on the channels inside the blocks: with those of
the residual stream, the model that it cuts does not run. Hessian takes the mean squared gradient over all
images: Torch-Pruning's own sum keeps only the last one. Each of its cuts is measured as it is, and again
after its batch norms are re-estimated on the calibration images. `by hand` removes by `reconstruction` with
the rule `global` and repairs sequentially; `paper` is the paper's method. Signals with rules are cut and
then repaired sequentially. network-pruner 2.16, the package of the paper's authors, gets 64 images. Installs
the other libraries into benchmarks/.peers.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import pages, runs
from nets.images import cifar10, some, top1
from nets.training import resnet
from peers import PEERS, network_pruner_cut, network_pruner_scores, with_packages
from torch import Tensor, nn

import fairpruner as fp

BUDGETS = (0.462, 0.3)  # of FLOPs; the first is the paper's
DATALESS = ("magnitude",)  # other draws of images make no difference
CRITERIA = ("magnitude", "Taylor", "Hessian")
SCOPES = ("global", "local")
OURS = {
    "default": "`fp.prune` with nothing but a budget",
    "by hand": "reconstruction, global, sequential repair",
    "paper": "the paper's method",
}
AUTHORS = {"library": "network-pruner", "way": "its whole way, tolerance 0.1"}
TOLERANCE, FEW = 0.1, 64  # of network-pruner, and its images: it is slow
SIGNALS, RULES = ("wasserstein", "l1", "reconstruction", "random"), ("tod", "uniform", "global")
Row = dict[str, Any]
Batches = list[tuple[Tensor, Tensor]]
Gradients = dict[str, dict[str, Tensor]]  # criterion -> parameter -> gradient


def cases(quick: bool) -> Iterator[Row]:
    """Libraries by ways, then signals by rules; the first draw of everything comes first."""
    size = (
        {"depth": 20, "calibration": 250, "test": 1000}
        if quick
        else {"depth": 56, "calibration": 2000, "test": 10_000}
    )
    for draw in range(1 if quick else 3):
        for keep in BUDGETS[:1] if quick else BUDGETS:
            same = {**size, "draw": draw, "keep": keep}
            for way in OURS:
                yield {**same, "library": "fairpruner", "way": way}
            for criterion in CRITERIA:
                if draw == 0 or criterion not in DATALESS:
                    for scope in SCOPES:
                        yield {**same, "library": "Torch-Pruning", "way": criterion, "scope": scope}
    if not quick:
        yield {**size, "draw": 0, "keep": BUDGETS[0], **AUTHORS}
    for keep in BUDGETS[:1] if quick else BUDGETS:
        ours = {"library": "fairpruner", "draw": 0, "keep": keep}
        for signal in SIGNALS[1:2] if quick else SIGNALS:
            for rule in RULES:
                yield {**size, **ours, "way": signal, "rule": rule}


def measure(case: Row, shared: Path) -> Row:
    """Accuracy of the cut, and after the repair or with its batch norms re-estimated."""
    model, baseline = original(case["depth"], case["test"], shared)
    try:
        cut, better = smaller(case, shared)
    except Exception as error:  # another library's failure is a result
        if case["library"] != AUTHORS["library"]:
            raise
        return {"note": f"{type(error).__name__}: {error}"[:200]}
    images, labels = cifar10("test", shared)
    test = images[: case["test"]], labels[: case["test"]]
    example = torch.randn(1, 3, 32, 32)
    small = cut if better is None else better
    assert small is not None
    share = fp.count_flops(small, example) / fp.count_flops(model, example)
    return {
        "baseline": baseline,
        "flops_kept": round(share, 4),
        "top1": round(top1(cut, test), 2) if cut is not None else None,
        "better": round(top1(better, test), 2) if better is not None else None,
    }


def smaller(case: Row, shared: Path) -> tuple[nn.Module | None, nn.Module | None]:
    """The cut model, and the repaired one or the one with its batch norms re-estimated."""
    model = resnet(case["depth"], shared)
    data = calibration(case["calibration"], case["draw"], shared)
    if case["library"] == "fairpruner":
        return by_fairpruner(model, data, case, shared)
    if case["library"] == AUTHORS["library"]:
        x, y = (torch.cat(parts)[:FEW] for parts in zip(*data, strict=True))
        cut = network_pruner_cut(model, network_pruner_scores(model, x, y), TOLERANCE, x[:1])
        return cut, reestimated(cut, data)
    found = {}
    if case["way"] not in DATALESS:
        found = gradients(case["depth"], case["calibration"], case["draw"], shared)
    cut = nearest(model, found, case)
    return cut, reestimated(cut, data)


@cache
def original(depth: int, count: int, shared: Path) -> tuple[nn.Module, float]:
    """The trained model and its accuracy."""
    images, labels = cifar10("test", shared)
    model = resnet(depth, shared)
    return model, round(top1(model, (images[:count], labels[:count])), 2)


@cache
def calibration(count: int, draw: int, shared: Path) -> Batches:
    """One draw of training images."""
    return some(cifar10("train10k", shared), count, seed=draw)


@cache
def scored(depth: int, count: int, draw: int, shared: Path) -> fp.Scores:
    """All signals of one draw, for the channels inside the blocks."""
    data = calibration(count, draw, shared)
    model = resnet(depth, shared)
    return fp.score(model, data, spaces=fp.discover(model, data[0][0][:1], skip=["conv1"]), removal=SIGNALS)


def by_fairpruner(
    model: nn.Module, data: Batches, case: Row, shared: Path
) -> tuple[nn.Module | None, nn.Module | None]:
    """The cut model and the repaired one, where there is one."""
    budget = fp.Budget("flops", case["keep"])
    if case["way"] == "paper":
        return fp.prune(model, data, keep=budget, preset="paper")[0], None
    if case["way"] == "default":
        return None, fp.prune(model, data, keep=budget)[0]
    signal, rule = (case["way"], case["rule"]) if "rule" in case else ("reconstruction", "global")
    scores = scored(case["depth"], case["calibration"], case["draw"], shared)
    plan = fp.allocate(scores.using(signal), keep=budget, rule=rule)
    cut = fp.cut(model, plan)
    return cut, fp.repair(cut, model, plan, data, method="sequential")


@cache
def gradients(depth: int, count: int, draw: int, shared: Path) -> Gradients:
    """The mean gradient of the loss, and the mean of its square over single images."""
    model = resnet(depth, shared)
    data = calibration(count, draw, shared)
    first = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    second = copy.deepcopy(first)
    singles = ((x[i : i + 1], y[i : i + 1]) for x, y in data for i in range(len(y)))
    for image, label in singles:
        model.zero_grad()
        F.cross_entropy(model(image), label).backward()
        for name, p in model.named_parameters():
            first[name] += p.grad / count
            second[name] += p.grad**2 / count
    return {"Taylor": first, "Hessian": second}


def pruned(model: nn.Module, found: Gradients, ratio: float, case: Row) -> nn.Module:
    """A copy of the model, pruned by Torch-Pruning."""
    with_packages(*PEERS)
    import torch_pruning as tp

    small = copy.deepcopy(model)
    parameters = dict(small.named_parameters())
    for name, gradient in found.get(case["way"], {}).items():
        parameters[name].grad = gradient.clone()
    importance = {
        "magnitude": lambda: tp.importance.GroupMagnitudeImportance(p=2),
        "Taylor": tp.importance.GroupTaylorImportance,
        "Hessian": tp.importance.GroupHessianImportance,
    }[case["way"]]()
    if case["way"] == "Hessian":
        importance._accu_grad = {parameters[name]: g.clone() for name, g in found["Hessian"].items()}
        importance._counter = dict.fromkeys(importance._accu_grad, 1)
    stream = [m for path, m in small.named_modules() if path == "conv1" or path.endswith("conv2")]
    pruner = tp.pruner.BasePruner(
        small,
        torch.randn(1, 3, 32, 32),
        importance=importance,
        global_pruning=case["scope"] == "global",
        pruning_ratio=ratio,
        ignored_layers=[small.linear, *stream],
    )
    pruner.step()
    small.zero_grad()
    return small.eval()


def nearest(model: nn.Module, found: Gradients, case: Row) -> nn.Module:
    """The copy whose FLOPs are nearest to the budget, by bisection of the pruning ratio."""
    example = torch.randn(1, 3, 32, 32)
    whole = fp.count_flops(model, example)
    low, high, best = 0.0, 1.0, (float("inf"), model)
    for _ in range(10):
        ratio = (low + high) / 2
        with warnings.catch_warnings(action="ignore"):
            small = pruned(model, found, ratio, case)
        share = fp.count_flops(small, example) / whole
        best = min(best, (abs(share - case["keep"]), small), key=lambda pair: pair[0])
        low, high = (ratio, high) if share > case["keep"] else (low, ratio)
        if best[0] < 0.002:
            break
    return best[1]


def reestimated(model: nn.Module, data: Batches) -> nn.Module:
    """A copy whose batch norms have the statistics of the calibration images."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None
    with torch.no_grad():
        model.train()
        for x, _ in data:
            model(x)
    return model.eval()


def rows() -> list[Row]:
    """The rows of this benchmark, and those of others with the same images and budgets."""
    found = runs.stored("cifar_peers")
    known = {named(row) for row in found}
    for own in (*_of_default(), *_of_signals()):
        row = {**own, "library": "fairpruner"}
        if row["keep"] in BUDGETS and named(row) not in known:
            known.add(named(row))
            found.append(row)
    return found


def named(row: Row) -> tuple[Any, ...]:
    """What a row measures: no two rows of a table may be the same draw of the same way."""
    return tuple(row.get(name) for name in ("keep", "draw", "library", "way", "rule", "scope"))


def _of_default() -> Iterator[Row]:
    """The rows of benchmarks/default.py."""
    for row in pages.results("default").get("rows", []):
        if (row["part"], row.get("depth")) == ("default", 56):
            accuracy = "top1" if row["way"] == "paper" else "better"
            yield {**row, "top1": None, "better": None, accuracy: row["top1"]}


def _of_signals() -> Iterator[Row]:
    """The rows of benchmarks/cifar_resnet56.py: its draw of images is the first one here."""
    stored = [row for row in pages.results("cifar_resnet56").get("rows", []) if row["depth"] == 56]
    after = {(r["keep"], r["signal"], r["rule"]): r["top1"] for r in stored if r["repair"] == "sequential"}
    for row in (row for row in stored if row["repair"] == "plain"):
        key = row["keep"], row["signal"], row["rule"]
        by_hand = key[1:] == ("reconstruction", "global")
        way = {"way": "by hand"} if by_hand else {"way": row["signal"], "rule": row["rule"]}
        same = {name: row[name] for name in ("keep", "baseline", "flops_kept", "top1")}
        yield {**same, **way, "draw": 0, "better": after.get(key)}


def page() -> str:
    """All ways by budget, as Markdown."""
    found, lines = rows(), []
    for keep in BUDGETS:
        for library, way, more, title in (
            *(("fairpruner", way, {}, title) for way, title in OURS.items()),
            *(("fairpruner", s, {"rule": r}, f"{s}, {r}") for s in SIGNALS for r in RULES),
            *(("Torch-Pruning", c, {"scope": s}, f"{c}, {s}") for c in CRITERIA for s in SCOPES),
            (AUTHORS["library"], AUTHORS["way"], {}, AUTHORS["way"]),
        ):
            wanted = {"keep": keep, "library": library, "way": way, **more}
            chosen = [row for row in found if wanted.items() <= row.items()]
            if chosen and "note" in chosen[0]:
                lines.append([library, title, "", f"fails with a {chosen[0]['note'].partition(':')[0]}", ""])
            elif chosen:
                kept = pages.spread([row["flops_kept"] for row in chosen][:1], 3)
                accuracies = (
                    pages.spread([row[of] for row in chosen if row.get(of) is not None])
                    for of in ("top1", "better")
                )
                lines.append([library, title, kept, *accuracies])
    head = ["library", "way", "FLOPs kept", "the cut", "repaired, or batch norms re-estimated"]
    return pages.table(head, lines)
