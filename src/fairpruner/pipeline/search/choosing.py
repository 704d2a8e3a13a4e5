"""Cut, repair and judge candidates within an effort, and keep the one nearest to the original.

Candidates are screened by a cheap repair first, and the best of them by a repair on few samples. What is then
best is repaired on all samples that do not judge, and tuned by gradient steps with the effort that is left.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fairpruner.core.budget import Budget
from fairpruner.core.plan import Plan
from fairpruner.core.trials import Trial
from fairpruner.inputs.batches import Batch, read_batches
from fairpruner.inputs.losses import Loss, Task
from fairpruner.models.calling import evaluating
from fairpruner.models.devices import device_of_model
from fairpruner.pipeline.search.candidates import Candidate
from fairpruner.pipeline.search.judging import Judge
from fairpruner.pipeline.search.samples import SHARES, SampleSet, split
from fairpruner.pipeline.search.screening import EACH, FITTING, GATHERING, Screen, can_screen
from fairpruner.repair import repair
from fairpruner.repair.targets import Targets
from fairpruner.repair.tuning import narrow_types, tune
from fairpruner.surgery import cut
from fairpruner.terminal import announce

EFFORT = 60  # forward passes of the original over the calibration data
PREPARING = 5  # passes that discovery and the scores took: forward, backward and the signals
SEMIFINALISTS, FEW = 6, SHARES // 4  # candidates, at most, and the shares of the samples they are repaired on
FINALISTS = 2  # at most
NEAR = 1.1  # times the least distance: those farther away are not worth a whole repair
PASSES = {"sequential": 4.5}  # that a repair costs; one for any other method
SOLVING = 1  # of these passes, whatever the number of samples
JUDGING = 1 - FITTING  # passes: the cut model runs over the other samples; the original did so once
MOST_EPOCHS = 60  # of tuning; more changed nothing
LEAST_TUNING = 5  # passes below which it does not begin
TUNING = 3.6  # forward passes of the cut model that cost as much as an epoch: backward, errors and steps
TARGETS = 1.4 * FITTING  # passes: the original runs once more, and what its blocks give is held


@dataclass(frozen=True, eq=False)
class Search:
    """What a search may spend, and how it repairs: by default as suits the plan."""

    keep: Budget
    effort: int = EFFORT
    repair: Sequence[str] | None = None
    loss: Loss | None = None
    task: Task | None = None  # which tells whether the outputs are logits

    def methods(self, plan: Plan) -> tuple[str, ...]:
        """The repair of a plan's cut."""
        if self.repair is not None:
            return tuple(self.repair)
        kinds = {space.kind for space in plan.spaces if plan.removed[space.name]}
        return (*(["sequential"] if kinds - {"expert"} else []), *(["experts"] if "expert" in kinds else []))

    def passes(self, plan: Plan, shares: int = SHARES) -> float:
        """Forward passes that it costs to repair a cut on these shares of the samples, and to judge it."""
        blocks = sum(space.kind == "expert" and bool(plan.removed[space.name]) for space in plan.spaces)
        costs = {**PASSES, "experts": 2 + blocks, "merge": 2 + blocks}  # they sweep once for each block
        whole = sum(costs.get(method, 1) for method in self.methods(plan))
        fixed = min(SOLVING, whole)
        return FITTING * (fixed + (whole - fixed) * shares / SHARES) + JUDGING

    def epoch(self, plan: Plan, held: float) -> float:
        """Forward passes that an epoch of tuning costs, with one of the original where its activations are
        not held. Narrow layers are less efficient: time falls as the root of the FLOPs.
        """
        return FITTING * (1 - held + TUNING * math.sqrt(plan.share("flops")))


def choose(
    model: nn.Module,
    data: Iterable[Any],
    candidates: Sequence[Candidate],
    search: Search,
) -> tuple[nn.Module, Plan]:
    """The repaired cut of the candidate nearest to the original on samples that no repair saw, and its plan.

    The plan's `tried` tells of all that were compared.
    """
    fitting, judging = split(data, model)
    bench = _Bench(model, fitting, Judge(model, judging, task=search.task), search)
    for candidate in bench.screened(candidates):
        bench.repair(candidate, SHARES)
    if search.repair is None and bench.left >= LEAST_TUNING and not narrow_types(bench.best.small):
        bench.tune_best()
    plan, small = replace(bench.best.candidate.plan, tried=bench.table()), bench.best.small
    if search.repair:  # no gradient step could overfit, so that no sample need stay unseen
        small = repair(cut(model, plan), model, plan, data, method=search.repair, loss=search.loss)
    return small, plan


@dataclass(eq=False)
class _Repaired:
    """A candidate's cut, repaired."""

    candidate: Candidate
    small: nn.Module
    method: str
    distance: float = math.inf  # until it is judged


@dataclass(eq=False)
class _Bench:
    """The original, the samples to repair on, who judges, and what was tried and spent so far."""

    model: nn.Module
    fitting: SampleSet
    judge: Judge
    search: Search
    spent: float = PREPARING
    whole: list[_Repaired] = field(default_factory=list)  # repaired on all samples: the best so far, or none
    trials: list[Trial] = field(default_factory=list)

    @property
    def left(self) -> float:
        return self.search.effort - self.spent

    @property
    def best(self) -> _Repaired:
        (best,) = self.whole
        return best

    def screened(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The candidates that are worth a whole repair, the best first; each step may take a third of the
        passes that are left.
        """
        if self.search.repair is None and can_screen(candidates):
            candidates = self._from_sums(candidates, self.left / 3)[:SEMIFINALISTS]
            shares = [FEW]
        else:
            shares = [SHARES // 2, SHARES // 4, SHARES // 8]
        ranked = self._on_few_samples(candidates, shares, self.left / 3)
        cost = self.search.passes(ranked[0][0].plan)
        near = [candidate for candidate, distance in ranked if distance <= NEAR * ranked[0][1]]
        return near[: max(1, min(FINALISTS, int(self.left / 3 / cost)))]

    def _from_sums(self, candidates: Sequence[Candidate], passes: float) -> Sequence[Candidate]:
        """As many candidates as these passes allow, the best after a repair from sums first."""
        tried = candidates[: max(1, int((passes - GATHERING) / EACH))]
        if len(tried) == 1:
            return tried
        self._say("sums of the original")
        screen = Screen(self.model, tried[0].plan.spaces, self.fitting)
        self.spent += GATHERING
        distances = {}
        for candidate in tried:
            self._say(f"{candidate.name}, repaired from sums")
            small = screen.repaired(candidate.plan)
            self.spent += EACH
            distances[candidate.name] = self._judge(_Repaired(candidate, small, screen.method), self.fitting)
        return sorted(tried, key=lambda candidate: distances[candidate.name])  # of equals the more promising

    def _on_few_samples(
        self, candidates: Sequence[Candidate], shares: Sequence[int], passes: float
    ) -> list[tuple[Candidate, float]]:
        """As many candidates as these passes allow, and their distances, the least first, after a repair on
        the first of these shares of the samples that is affordable for all.
        """
        if len(candidates) == 1:
            return [(candidates[0], 0.0)]

        def affordable(few: int) -> int:
            return int(passes / max(self.search.passes(candidate.plan, few) for candidate in candidates))

        few = next((few for few in shares if affordable(few) >= len(candidates)), shares[-1])
        tried = candidates[: max(1, affordable(few))]
        if len(tried) == 1:
            return [(tried[0], 0.0)]
        return sorted(((c, self.repair(c, few)) for c in tried), key=lambda pair: pair[1])

    def repair(self, candidate: Candidate, shares: int) -> float:
        """Repair a candidate's cut on so many shares of the samples: its distance."""
        self._say(f"{candidate.name}, repaired on {shares}/{SHARES} of the samples")
        methods, plan = self.search.methods(candidate.plan), candidate.plan
        small, part = cut(self.model, plan), self.fitting if shares == SHARES else self.fitting.share(shares)
        if methods:
            small = repair(small, self.model, plan, part, method=methods, loss=self.search.loss)
        self.spent += self.search.passes(plan, shares)
        return self._judge(_Repaired(candidate, small, "+".join(methods) or "none"), part)

    def tune_best(self) -> None:
        """Take gradient steps from the best, for as many epochs as the effort allows."""
        one = self.best
        self._say(f"{one.candidate.name}, the original's activations")
        small = copy.deepcopy(one.small).eval()  # not `evaluating`, which would undo the steps
        device = device_of_model(self.model)

        def read() -> Iterator[Batch]:
            return read_batches(self.fitting, device, self.model)

        with torch.inference_mode(False), evaluating(self.model):
            targets = Targets(small, self.model, one.candidate.plan, read)
            self.spent += TARGETS + JUDGING
            epoch = self.search.epoch(one.candidate.plan, targets.held)
            epochs = max(1, min(MOST_EPOCHS, int(self.left / epoch)))
            self._say(f"{one.candidate.name}, {epochs} epochs of gradient steps")
            notes = tune(small, targets, read, epochs=epochs)
        self.spent += epochs * epoch
        for before, module in zip(one.small.modules(), small.modules(), strict=True):
            module.training = before.training
        if any(note.outcome == "repaired" for note in notes):
            self._judge(_Repaired(one.candidate, small, f"{one.method}+tune"), self.fitting)

    def table(self) -> tuple[Trial, ...]:
        """All trials, those on most samples first, the chosen one marked."""
        lines = sorted(self.trials, key=lambda t: (-t.samples, t.distance))
        chosen = next(n for n, trial in enumerate(lines) if trial.distance == self.best.distance)
        return tuple(replace(trial, chosen=n == chosen) for n, trial in enumerate(lines))

    def _say(self, step: str) -> None:
        announce(f"search, {self.spent:.0f} of {self.search.effort} passes: {step}")

    def _judge(self, one: _Repaired, part: SampleSet) -> float:
        """The distance of a cut repaired on these samples; the best of those on all samples is kept."""
        one.distance, candidate = self.judge.distance(one.small), one.candidate
        kept = candidate.plan.share(self.search.keep.counted_in)
        made = candidate.removal, candidate.rule, candidate.spaces
        self.trials.append(Trial(*made, one.method, part.samples, kept, one.distance))
        if part is self.fitting:
            self.whole = [min([*self.whole, one], key=lambda repaired: repaired.distance)]
        return one.distance
