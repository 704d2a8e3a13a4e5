"""Cut, repair and judge candidates within an effort, and keep the one nearest to the original.

All candidates are repaired on few samples first. The best of them are repaired on all samples that do
not judge, and the winner is then tuned by gradient steps with the effort that is left.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fairpruner.core.budget import Budget
from fairpruner.core.plan import Plan
from fairpruner.core.trials import Trial
from fairpruner.inputs.batches import read_batches
from fairpruner.inputs.losses import Loss
from fairpruner.models.calling import evaluating
from fairpruner.models.devices import device_of_model
from fairpruner.repair import repair
from fairpruner.repair.tuning import tune
from fairpruner.search.candidates import Candidate
from fairpruner.search.judging import Judge
from fairpruner.search.samples import JUDGED, SHARES, SampleSet, split
from fairpruner.surgery import cut
from fairpruner.terminal import announce

EFFORT = 60  # forward passes of the original over the calibration data
SCORING = 3  # passes that the scores took: one forward and one backward
FINALISTS = 3  # at most
NEAR = 1.25  # times the least distance: those farther away are not worth a whole repair
PASSES = {"sequential": 6}  # that a repair costs; one for any other method
FITTING = (JUDGED - 1) / JUDGED  # share of the samples that repairs look at
JUDGING = 1 / JUDGED  # passes: the cut model runs over the other samples; the original did so once
MOST_EPOCHS = 60  # of tuning; more changed nothing


@dataclass(frozen=True, eq=False)
class Search:
    """What a search may spend, and how it repairs: by default as suits the plan."""

    keep: Budget
    effort: int = EFFORT
    repair: Sequence[str] | None = None
    loss: Loss | None = None

    def methods(self, plan: Plan) -> tuple[str, ...]:
        """The repair of a plan's cut."""
        if self.repair is not None:
            return tuple(self.repair)
        kinds = {space.kind for space in plan.spaces if plan.removed[space.name]}
        return (*(["sequential"] if kinds - {"expert"} else []), *(["experts"] if "expert" in kinds else []))

    def passes(self, plan: Plan) -> float:
        """Forward passes that repairing a cut on all samples but the judging ones costs, about."""
        blocks = sum(space.kind == "expert" and bool(plan.removed[space.name]) for space in plan.spaces)
        costs = {**PASSES, "experts": 2 + blocks, "merge": 2 + blocks}  # they sweep once for each block
        return FITTING * sum(costs.get(method, 1) for method in self.methods(plan))

    def epoch(self, plan: Plan) -> float:
        """Forward passes that an epoch of tuning costs: the original's, and three times the cut model's."""
        return FITTING * (1 + 3 * plan.share("flops"))


def choose(
    model: nn.Module,
    data: Iterable[Any],
    candidates: Sequence[Candidate],
    search: Search,
) -> tuple[nn.Module, Plan]:
    """The repaired cut of the candidate nearest to the original on samples that no repair saw, and its plan.

    The plan's `tried` tells of all that were compared.
    """
    device = device_of_model(model)
    fitting, judging = split(data, device)
    judge = Judge(model, judging, logits=search.loss is None)
    bench = _Bench(model, fitting, judge, device, search)
    cost = max(search.passes(candidate.plan) for candidate in candidates) + JUDGING
    left = float(search.effort - SCORING)
    finalists, shares = _affordable(candidates, cost, left / 3)
    if len(finalists) > 1:
        left -= len(finalists) * _screening(cost, shares)
        distances = [bench.repaired(candidate, shares).distance for candidate in finalists]
        order = sorted(range(len(finalists)), key=distances.__getitem__)  # of equals the more promising
        near = [n for n in order if distances[n] <= NEAR * distances[order[0]]]
        finalists = [finalists[n] for n in near[: max(1, min(FINALISTS, int(left / 2 / cost)))]]
    best = min((bench.repaired(candidate, SHARES) for candidate in finalists), key=lambda one: one.distance)
    left -= len(finalists) * cost
    epochs = min(MOST_EPOCHS, int((left - JUDGING) / search.epoch(best.candidate.plan)))
    if search.repair is None and epochs > 0:
        best = min(best, bench.tuned(best, epochs), key=lambda one: one.distance)
    plan, small = replace(best.candidate.plan, tried=bench.table(best.distance)), best.small
    if search.repair:  # no gradient step could overfit, so that no sample need stay unseen
        small = repair(cut(model, plan), model, plan, data, method=search.repair, loss=search.loss)
    return small, plan


def _affordable(
    candidates: Sequence[Candidate], cost: float, passes: float
) -> tuple[Sequence[Candidate], int]:
    """The candidates to screen, and on how many shares of the samples, so that it costs at most `passes`."""
    for shares in (SHARES // 2, SHARES // 4, SHARES // 8):
        if len(candidates) * _screening(cost, shares) <= passes:
            return candidates, shares
    return candidates[: max(1, int(passes / _screening(cost, 1)))], 1


def _screening(cost: float, shares: int) -> float:
    """Passes that it takes to repair one candidate on so many shares of the samples, and to judge it."""
    return (cost - JUDGING) * shares / SHARES + JUDGING


@dataclass(frozen=True, eq=False)
class _Repaired:
    """A candidate's cut, repaired and judged."""

    candidate: Candidate
    small: nn.Module
    method: str
    distance: float


@dataclass(frozen=True, eq=False)
class _Bench:
    """The original, the samples to repair on, who judges, and what was tried so far."""

    model: nn.Module
    fitting: SampleSet
    judge: Judge
    device: torch.device
    search: Search
    trials: list[Trial] = field(default_factory=list)

    def repaired(self, candidate: Candidate, shares: int) -> _Repaired:
        """A candidate's cut, repaired on so many shares of the samples."""
        announce(f"search: {candidate.name}, on {shares}/{SHARES} of the data")
        methods, plan = self.search.methods(candidate.plan), candidate.plan
        small, part = cut(self.model, plan), self.fitting.share(shares)
        if methods:
            small = repair(small, self.model, plan, part, method=methods, loss=self.search.loss)
        return self._judged(candidate, small, "+".join(methods) or "none", part)

    def tuned(self, one: _Repaired, epochs: int) -> _Repaired:
        """The same after so many epochs of gradient steps."""
        announce(f"search: {epochs} epochs of gradient steps for {one.candidate.name}")
        small = copy.deepcopy(one.small).eval()  # not `evaluating`, which would undo the steps
        with torch.inference_mode(False), evaluating(self.model):
            notes = tune(small, self.model, lambda: read_batches(self.fitting, self.device), epochs=epochs)
        for before, module in zip(one.small.modules(), small.modules(), strict=True):
            module.training = before.training
        if all(note.outcome == "skipped" for note in notes):
            return one
        return self._judged(one.candidate, small, f"{one.method}+tune", self.fitting)

    def table(self, least: float) -> tuple[Trial, ...]:
        """All trials, those on most samples first, the chosen one marked."""
        lines = sorted(self.trials, key=lambda trial: (-trial.samples, trial.distance))
        chosen = next(n for n, trial in enumerate(lines) if trial.distance == least)
        return tuple(replace(trial, chosen=n == chosen) for n, trial in enumerate(lines))

    def _judged(self, candidate: Candidate, small: nn.Module, method: str, part: SampleSet) -> _Repaired:
        found = self.judge.distance(small)
        kept = candidate.plan.share(self.search.keep.counted_in)
        made = candidate.removal, candidate.rule, candidate.spaces
        self.trials.append(Trial(*made, method, part.samples, kept, found))
        return _Repaired(candidate, small, method, found)
