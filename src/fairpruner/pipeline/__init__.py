"""The whole job in one call: score, search or allocate, cut, repair and recover, in one round or several."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from fairpruner.allocation import KINDS_OF_METRIC, allocate, warn_if_far, without_miss_warnings
from fairpruner.allocation.composition import compose, remaining
from fairpruner.core.budget import Budget
from fairpruner.core.plan import Plan
from fairpruner.core.spaces import Spaces
from fairpruner.core.tod import check_alpha
from fairpruner.discovery import discover
from fairpruner.errors import FairprunerError, check_whole_number, unknown
from fairpruner.inputs.activations import number_in_common
from fairpruner.inputs.batches import check_rereadable, read_batches
from fairpruner.inputs.datasets import example_of
from fairpruner.inputs.tokens import real_tokens
from fairpruner.inputs.workers import naming_dead_workers
from fairpruner.models.calling import evaluating
from fairpruner.models.devices import device_of_model
from fairpruner.models.supported import check_has_numbers
from fairpruner.pipeline.search import (
    EFFORT,
    SEARCHED_RULES,
    Search,
    choose,
    make_candidates,
    useful_removals,
)
from fairpruner.recovery import Recipe, recover
from fairpruner.repair import METHODS
from fairpruner.repair import repair as repair_cut
from fairpruner.scoring.objective import Objective
from fairpruner.scoring.score import score
from fairpruner.surgery import cut

Options = Mapping[str, Mapping[str, Any]]  # stage -> its keyword arguments

# The stages whose keyword arguments `options` may set, except those in OWN, which `prune` sets itself.
STAGES: dict[str, Callable[..., Any]] = {
    "discover": discover,
    "score": score,
    "allocate": allocate,
    "repair": repair_cut,
    "recover": recover,
}
OWN = {"spaces", "keep", "method", "epochs"}
PRESETS = ("best", "paper")
FEWEST_BLOCKS = 4  # whose outputs are matched in recovery: fewer say little more than the logits
# (stage, option) that preset="paper" fixes.
PAPER = (("score", "removal"), ("score", "protection"), ("allocate", "rule"))


@naming_dead_workers()
def prune(
    model: nn.Module,
    data: Iterable[Any],
    *,
    keep: Budget | None = None,
    alpha: float | None = None,
    rounds: int = 1,
    repair: str | Sequence[str] | None = None,
    recover_epochs: int = 0,
    train: Iterable[Any] | None = None,
    preset: str = "best",
    effort: int = EFFORT,
    options: Options | None = None,
) -> tuple[nn.Module, Plan]:
    """The smaller model, and the plan that cuts the original to its shapes; the model given is not changed.

    For a budget in one round, a search makes plans from several signals and rules, cuts and repairs them, and
    compares them with the original on samples that the repair did not use. It may use `effort` forward passes
    over the data, and `plan.tried` lists what it compared. If you name methods in `repair`, or signals and
    rules in `options`, these are used instead of a search over them. `preset="paper"` is the paper's method
    alone: its signals, its rule, no repair.

    With several rounds, or with a tolerance, each round uses the paper's signals and rule, or those in
    `options`. With R rounds, each round keeps the R-th root of the budget's share. A tolerance holds in every
    round. `repair` names the methods that are applied after each cut. `recover_epochs` epochs are trained
    after each cut on `train`, or on `data`. They use `Recipe.short_for`, and the original model is the
    teacher; with `preset="paper"` they use the paper's recipe and no teacher.

    `options` are keyword arguments of the stages: {"score": {"removal": "l1"}}. In {"recover": {"recipe":
    {"seed": 1}}} the dict changes settings of the recipe; a `Recipe` there replaces it.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> data = [(torch.randn(16, 4), torch.arange(16) % 2) for _ in range(2)]
    >>> small, plan = prune(net, data, keep=Budget("units", 0.25))
    >>> small[0], plan.predicted["units"], sum(trial.chosen for trial in plan.tried)
    (Linear(in_features=4, out_features=4, bias=True), 4, 1)
    """
    check_has_numbers(model)
    options = _checked(options or {})
    _check_schedule(
        keep, alpha, {"rounds": (rounds, 1), "recover_epochs": (recover_epochs, 0), "effort": (effort, 1)}
    )
    methods = (repair,) if isinstance(repair, str) else repair
    for method in methods or ():
        if method not in METHODS:
            raise unknown("repair method", method, METHODS)
    _check_preset(preset, methods, options)
    for given in (data, train):
        check_rereadable(given, "every round reads it")
    spaces = discover(model, example_of(data, device_of_model(model), model), **options["discover"])
    current, whole = model, None
    searching = keep is not None and rounds == 1 and preset == "best"
    for done in range(1, rounds + 1):
        if keep is not None and searching:
            small, plan = _searched(model, data, spaces, Search(keep, effort, methods), options)
        else:
            scores = score(current, data, spaces=spaces, **options["score"])
            budget = keep and _share_of(keep, whole or Plan.removing(spaces, {}), done / rounds)
            with without_miss_warnings():
                plan = allocate(scores, alpha=alpha, keep=budget, **options["allocate"])
            small = cut(current, plan)
            if methods is not None:
                small = repair_cut(small, current, plan, data, method=methods, **options["repair"])
        spaces = remaining(plan, small)
        if recover_epochs:
            learning = {}
            if preset == "best":
                near = searching and _match(small, model, data)
                learning = {"teacher": model, "recipe": Recipe.short_for(small, near=near)}
            small = recover(
                small,
                train if train is not None else data,
                epochs=recover_epochs,
                **_of_round(done, learning, options["recover"]),
            )
        current, whole = small, plan if whole is None else compose(whole, plan)
    assert whole is not None  # there is at least one round
    if keep is not None:
        exact = searching or options["allocate"].get("exact")
        advice = "prune more kinds of units" if exact else 'give options={"allocate": {"exact": True}}'
        warn_if_far(whole, keep, advice)
    return current, whole


def _searched(
    model: nn.Module, data: Iterable[Any], spaces: Spaces, search: Search, options: Options
) -> tuple[nn.Module, Plan]:
    """The best smaller model that a search finds, and its plan; `options` restrict the search."""
    if search.keep.metric in KINDS_OF_METRIC:  # a budget of experts removes nothing else
        spaces = spaces.only(kinds=KINDS_OF_METRIC[search.keep.metric])
    first = next(read_batches(data, device_of_model(model), model))
    scoring, limits = dict(options["score"]), {"exact": True, **options["allocate"]}
    if scoring.get("removal") is None:
        scoring["removal"] = useful_removals(
            spaces,
            classes=first.has_classes and first.labels.ndim == 1,
            texts=real_tokens(first.inputs) is not None,
        )
    scores = score(model, data, spaces=spaces, **scoring)
    rules = (limits.pop("rule"),) if "rule" in limits else SEARCHED_RULES
    with without_miss_warnings():
        candidates = make_candidates(scores, search.keep, rules, **limits)
    with evaluating(model):
        objective = Objective.of(model, first, options["repair"].get("loss", scoring.get("loss")), seed=0)
    task = objective.task if objective.loss is None else None  # a caller's loss may take outputs of any form
    return choose(model, data, candidates, replace(search, loss=objective.loss, task=task))


def _match(small: nn.Module, model: nn.Module, data: Iterable[Any]) -> bool:
    """Whether enough blocks of the two models give outputs of the same shapes to be matched."""
    batch = next(read_batches(data, device_of_model(model), model)).rows(0, 2)
    with evaluating(small), evaluating(model):
        return number_in_common(small, model, batch) >= FEWEST_BLOCKS


def _of_round(number: int, learning: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `recover`: those of the options first, and for each round a folder of its own.

    A mapping for the recipe changes settings of the one in `learning`, or of the paper's.
    """
    found = {**learning, **options}
    if isinstance(found.get("recipe"), Mapping):
        found["recipe"] = replace(learning.get("recipe", Recipe()), **found["recipe"])
    if found.get("folder") is not None:
        found["folder"] = Path(found["folder"]) / f"round-{number}"
    return found


def _share_of(keep: Budget, so_far: Plan, done: float) -> Budget:
    """The budget after this share of the rounds, as a count.

    The amounts of the rounds form a geometric sequence from the original to `keep`.
    """
    if keep.counted_in == "latency_ms":  # a latency table holds for the original model only
        if done < 1:
            raise FairprunerError(
                f"A budget of {keep.metric} needs a single round: give rounds=1, or a budget of flops."
            )
        return keep
    original = so_far.original[keep.metric]
    amount = round(original ** (1 - done) * keep.target(original) ** done)
    # An earlier round may already keep less than this.
    return Budget(keep.metric, max(1, min(amount, so_far.predicted[keep.metric])))


def _check_schedule(
    keep: Budget | None, alpha: float | None, numbers: Mapping[str, tuple[object, int]]
) -> None:
    if (keep is None) == (alpha is None):
        raise FairprunerError(
            f"Pruning needs either a tolerance or a budget, found alpha={alpha} and keep={keep}: for example"
            " alpha=0.1 or keep=Budget('flops', 0.5)."
        )
    if alpha is not None:
        check_alpha(alpha)
    for name, (value, least) in numbers.items():
        check_whole_number(name, value, least)


def _check_preset(preset: str, methods: Sequence[str] | None, options: Options) -> None:
    """Refuse arguments that contradict preset="paper"."""
    if preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    given = [f"{stage} {name}" for stage, name in PAPER if options[stage].get(name) is not None]
    given += [f"repair {', '.join(methods)}"] if methods else []
    if preset == "paper" and given:
        raise FairprunerError(
            f"preset='paper' fixes the signals and the rule and does not repair, found {' and '.join(given)}:"
            " leave them out, or leave out the preset."
        )


def _checked(options: Options) -> Options:
    """The options of every stage, checked to be keyword arguments that it has."""
    for stage, given in options.items():
        if stage not in STAGES:
            raise unknown("stage", stage, STAGES)
        known = [
            p.name
            for p in inspect.signature(STAGES[stage]).parameters.values()
            if p.kind is p.KEYWORD_ONLY and p.name not in OWN
        ]
        for name in given:
            if name not in known:
                raise unknown(f"option of {stage}", name, known)
    recipe = options.get("recover", {}).get("recipe")
    if isinstance(recipe, Mapping):
        known = [field.name for field in fields(Recipe)]
        for name in recipe:
            if name not in known:
                raise unknown("setting of a recipe", name, known)
    return {stage: options.get(stage, {}) for stage in STAGES}
