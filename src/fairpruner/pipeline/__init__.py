"""The whole job in one call: score, search or allocate, cut, repair and recover, in one round or several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fairpruner.allocation import (
    KINDS_OF_METRIC,
    allocate,
    cannot_be_met,
    warn_if_far,
    without_miss_warnings,
)
from fairpruner.allocation.composition import compose, remaining
from fairpruner.core.budget import Budget
from fairpruner.core.costs import metrics_of
from fairpruner.core.plan import Plan
from fairpruner.core.spaces import Spaces
from fairpruner.discovery import discover
from fairpruner.errors import unknown
from fairpruner.inputs.batches import check_rereadable, read_batches
from fairpruner.inputs.datasets import example_of
from fairpruner.inputs.tokens import real_tokens
from fairpruner.inputs.workers import naming_dead_workers
from fairpruner.models.calling import evaluating
from fairpruner.models.devices import device_of_model, devices_of_model
from fairpruner.models.randomness import random_state_kept
from fairpruner.models.supported import check_has_numbers
from fairpruner.pipeline.learning import Learning
from fairpruner.pipeline.options import (
    Options,
    check_latency,
    check_min_keep,
    check_preset,
    check_recovery,
    check_schedule,
    checked,
    repair_options,
)
from fairpruner.pipeline.search import (
    EFFORT,
    SEARCHED_RULES,
    Search,
    choose,
    make_candidates,
    useful_removals,
)
from fairpruner.repair import METHODS
from fairpruner.repair import repair as repair_cut
from fairpruner.scoring.objective import Objective
from fairpruner.scoring.score import score
from fairpruner.surgery import cut

MORE_KINDS = "prune more kinds of units"  # brings a plan nearer to its budget


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
    options = checked(options or {})
    check_schedule(
        keep, alpha, {"rounds": (rounds, 1), "recover_epochs": (recover_epochs, 0), "effort": (effort, 1)}
    )
    methods = (repair,) if isinstance(repair, str) else repair
    for method in methods or ():
        if method not in METHODS:
            raise unknown("repair method", method, METHODS)
    check_preset(preset, methods, options)
    check_min_keep(options["allocate"].get("min_keep"), rounds)
    check_latency(keep, options["allocate"].get("latency"), rounds)
    check_rereadable(data, "every round reads it")
    check_rereadable(train, "every epoch reads it", name="training data")
    check_recovery(recover_epochs, train, options)
    learning = Learning(model, data if train is None else train, recover_epochs, preset == "best", options)
    with random_state_kept(devices_of_model(model)):
        example = example_of(data, device_of_model(model), model)
        spaces = discover(model, example, **options["discover"])
        if keep is not None and keep.counted_in not in (*metrics_of(spaces), "latency_ms"):
            raise cannot_be_met(keep)
        if keep is not None and rounds == 1 and preset == "best":
            small, plan = _searched(model, data, spaces, Search(keep, effort, methods), options)
            return learning.learn(small, 1, repaired=True), plan
        current, whole = model, Plan.removing(spaces, {})
        for done in range(1, rounds + 1):
            scores = score(current, data, spaces=spaces, **options["score"])
            budget = keep and _share_of(keep, whole, done / rounds)
            with without_miss_warnings():
                plan = allocate(scores, alpha=alpha, keep=budget, **options["allocate"])
            small = cut(current, plan)
            if methods is not None:
                small = repair_cut(small, current, plan, data, method=methods, **repair_options(options))
            spaces = remaining(plan, small)
            current, whole = learning.learn(small, done), plan if done == 1 else compose(whole, plan)
    if keep is not None:
        exact = options["allocate"].get("exact")
        warn_if_far(whole, keep, MORE_KINDS if exact else 'give options={"allocate": {"exact": True}}')
    return current, whole


def _searched(
    model: nn.Module, data: Iterable[Any], spaces: Spaces, search: Search, options: Options
) -> tuple[nn.Module, Plan]:
    """The best smaller model that a search finds, and its plan; `options` restrict the search."""
    if search.keep.metric in KINDS_OF_METRIC:  # a budget of experts removes nothing else
        spaces = spaces.only(kinds=KINDS_OF_METRIC[search.keep.metric])
    first = next(read_batches(data, device_of_model(model), model))
    scoring, limits = dict(options["score"]), {"exact": True, **options["allocate"]}
    loss = repair_options(options).get("loss")
    with evaluating(model):
        objective = Objective.of(model, first, loss, seed=0)
    if scoring.get("removal") is None:
        scoring["removal"] = useful_removals(
            spaces,
            classes=objective.has_classes and first.has_classes and _several_classes(data, model),
            texts=real_tokens(first.inputs) is not None,
        )
    scores = score(model, data, spaces=spaces, **scoring)
    rules = (limits.pop("rule"),) if "rule" in limits else SEARCHED_RULES
    with without_miss_warnings():
        candidates = make_candidates(scores, search.keep, rules, **limits)
    task = objective.task if objective.loss is None else None  # a caller's loss may take outputs of any form
    small, plan = choose(model, data, candidates, replace(search, loss=loss, task=task))
    warn_if_far(plan, search.keep, MORE_KINDS)
    return small, plan


def _several_classes(data: Iterable[Any], model: nn.Module) -> bool:
    """Whether not all samples have the same class; reads no further than to a second class."""
    found: set[int] = set()
    for batch in read_batches(data, device_of_model(model), model):
        found.update(batch.labels.tolist() if batch.has_classes else ())
        if len(found) > 1:
            return True
    return False


def _share_of(keep: Budget, so_far: Plan, done: float) -> Budget:
    """The budget after this share of the rounds, as a count.

    The amounts of the rounds form a geometric sequence from the original to `keep`.
    """
    if keep.counted_in == "latency_ms":  # in a single round
        return keep
    original = so_far.original[keep.metric]
    amount = round(original ** (1 - done) * keep.target(original) ** done)
    # An earlier round may already keep less than this.
    return Budget(keep.metric, max(1, min(amount, so_far.predicted[keep.metric])))
