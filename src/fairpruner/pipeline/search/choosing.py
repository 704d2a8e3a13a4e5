"""Cut, repair and compare candidates within an effort, and choose the one nearest to the original.

1. All candidates get a cheap repair from sums. The best of them go to step 2.
2. They are repaired on a part of the samples. The best of them go to step 3.
3. They are repaired on all samples except those that judge. The best one is chosen.
4. Gradient steps improve it further, as far as the effort allows. If none are taken, or if they do not help,
   the best repair is done once more, with the samples that judged.
"""

from __future__ import annotations

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
from fairpruner.models.copying import deep_copy
from fairpruner.models.devices import device_of_model
from fairpruner.pipeline.search.candidates import Candidate
from fairpruner.pipeline.search.judging import Judge
from fairpruner.pipeline.search.samples import SHARES, SampleSet, split
from fairpruner.pipeline.search.screening import EACH, FITTING, GATHERING, Screen, can_screen
from fairpruner.repair import repair, repaired_by
from fairpruner.repair.targets import Targets
from fairpruner.repair.tuning import EPOCHS, narrow_types, tune
from fairpruner.surgery import cut
from fairpruner.terminal.progress import announce

EFFORT = 60  # forward passes of the original over the calibration data
PREPARING = 5  # passes that discovery and the scores took: forward, backward and the signals
SEMIFINALISTS, FEW = 6, SHARES // 4  # most candidates of step 2, and the shares of the samples they see
FINALISTS = 2  # most candidates of step 3
NEAR = 1.1  # candidates of step 3 are at most this many times as far from the original as the best one
PASSES = {"sequential": 4.5}  # the cost of a repair in forward passes; 1 for any other method
SOLVING = 1  # the part of these passes that does not depend on the number of samples
JUDGING = 1 - FITTING  # passes: the cut model runs over the judging samples; the original ran once before
TUNE = "tune"  # the method of gradient steps
MOST_EPOCHS = 60  # of gradient steps; more did not help
LEAST_TUNING = 5  # with fewer passes left, no gradient steps are taken
TUNING = 3.6  # an epoch of gradient steps costs this many forward passes of the cut model
TARGETS = 1.4 * FITTING  # passes: the original runs once more, and the outputs of its blocks are kept


@dataclass(frozen=True, eq=False)
class Search:
    """The budget and the effort of a search, and its repair methods; None: those that suit each plan."""

    keep: Budget
    effort: int = EFFORT
    repair: Sequence[str] | None = None
    loss: Loss | str | None = None  # which the methods in `repair` may not raise
    task: Task | None = None  # determines whether the outputs are logits

    def methods(self, plan: Plan) -> tuple[str, ...]:
        """The repair methods for a plan."""
        if self.repair is not None:
            return tuple(self.repair)
        kinds = {space.kind for space in plan.spaces if plan.removed[space.name]}
        dense = ["sequential"] if kinds - {"expert"} else []
        if dense and self.task == "language":
            dense = ["least_squares", "sequential"]  # on SmolLM2 better than either alone
        return (*dense, *(["experts"] if "expert" in kinds else []))

    @property
    def takes_steps(self) -> bool:
        """Whether gradient steps may follow the repair.

        On SmolLM2 they brought less than repairing it once more with the samples that judged, and took far
        longer.
        """
        return self.repair is None and self.task != "language"

    def passes(self, plan: Plan, shares: int = SHARES) -> float:
        """The cost, in forward passes, of repairing a cut on these shares of the samples and judging it.

        The cut is judged before and after each method, and at the end.
        """
        methods = self.methods(plan)
        whole = cost_of(methods, plan)
        fixed = min(SOLVING, whole)
        return FITTING * (fixed + (whole - fixed) * shares / SHARES) + JUDGING * (2 + len(methods))

    def epoch(self, plan: Plan, held: float) -> float:
        """The cost of an epoch of gradient steps, in forward passes.

        It is TUNING forward passes of the cut model, and one of the original on samples whose activations are
        not held in memory. The time falls as the root of the FLOPs, because narrow layers are less efficient.
        """
        return FITTING * (1 - held + TUNING * math.sqrt(plan.share("flops")))


def cost_of(methods: Sequence[str], plan: Plan) -> float:
    """The cost of a repair on all samples, in forward passes."""
    blocks = sum(space.kind == "expert" and bool(plan.removed[space.name]) for space in plan.spaces)
    tuning = TARGETS + EPOCHS * TUNING * math.sqrt(plan.share("flops"))
    costs = {**PASSES, "experts": 2 + blocks, "merge": 2 + blocks, TUNE: tuning}  # one pass for each block
    return sum(costs.get(method, 1) for method in methods)


def choose(
    model: nn.Module,
    data: Iterable[Any],
    candidates: Sequence[Candidate],
    search: Search,
) -> tuple[nn.Module, Plan]:
    """The repaired cut of the candidate nearest to the original on samples that no repair saw, and its plan.

    `plan.tried` lists all candidates that were compared.
    """
    fitting, judging = split(data, model)
    bench = _Bench(model, fitting, Judge(model, judging, task=search.task), search)
    for candidate in bench.screened(candidates):
        bench.repair(candidate, SHARES)
    if search.takes_steps and bench.left >= LEAST_TUNING and not narrow_types(bench.best.small):
        bench.tune_best()
    best, small = bench.best, bench.best.small
    plan = replace(best.candidate.plan, tried=bench.table())
    if search.repair:
        small = cut(model, plan)
        return repair(small, model, plan, data, method=search.repair, loss=search.loss), plan
    if best.methods and TUNE not in best.methods and bench.left >= cost_of(best.methods, plan):
        again = bench.repaired_again(data)
        small = again if bench.judge.distance(again) <= best.distance else small
    return small, plan


@dataclass(eq=False)
class _RepairedCut:
    """The repaired cut of a candidate."""

    candidate: Candidate
    small: nn.Module
    methods: tuple[str, ...]
    distance: float = math.inf  # until it is judged


@dataclass(eq=False)
class _Bench:
    """The state of a search: the original, the samples, the judge, the trials and the effort spent so far."""

    model: nn.Module
    fitting: SampleSet
    judge: Judge
    search: Search
    spent: float = PREPARING
    whole: list[_RepairedCut] = field(default_factory=list)  # the best of step 3 so far, or empty
    trials: list[Trial] = field(default_factory=list)

    @property
    def left(self) -> float:
        return self.search.effort - self.spent

    @property
    def best(self) -> _RepairedCut:
        (best,) = self.whole
        return best

    def screened(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The candidates of step 3, the best first; steps 1 and 2 may each use a third of the passes left.

        Where the sums gave `least_squares`, from all samples, step 2 would only repeat it on fewer.
        """
        if self.search.repair is None and can_screen(candidates):
            ranked = self._from_sums(candidates, self.left / 3)[:SEMIFINALISTS]
            if not all("least_squares" in self.search.methods(candidate.plan) for candidate, _ in ranked):
                ranked = self._on_few_samples([candidate for candidate, _ in ranked], [FEW], self.left / 3)
        else:
            ranked = self._on_few_samples(candidates, [SHARES // 2, SHARES // 4, SHARES // 8], self.left / 3)
        cost = self.search.passes(ranked[0][0].plan)
        near = [candidate for candidate, distance in ranked if distance <= NEAR * ranked[0][1]]
        return near[: max(1, min(FINALISTS, int(self.left / 3 / cost)))]

    def _from_sums(self, candidates: Sequence[Candidate], passes: float) -> list[tuple[Candidate, float]]:
        """Step 1: as many candidates as these passes allow, sorted by their distances after this repair."""
        tried = candidates[: max(1, int((passes - GATHERING) / EACH))]
        if len(tried) == 1:
            return [(tried[0], 0.0)]
        self._announce("sums of the original")
        screen = Screen(self.model, tried[0].plan.spaces, self.fitting)
        self.spent += GATHERING
        found = []
        for candidate in tried:
            self._announce(f"{candidate.name}, repaired from sums")
            repaired = _RepairedCut(candidate, screen.repaired(candidate.plan), screen.methods)
            self.spent += EACH
            found.append((candidate, self._judge(repaired, self.fitting)))
        return sorted(found, key=lambda pair: pair[1])  # stable: promising ones first

    def _on_few_samples(
        self, candidates: Sequence[Candidate], shares: Sequence[int], passes: float
    ) -> list[tuple[Candidate, float]]:
        """Step 2: as many candidates as these passes allow, sorted by their distances after this repair.

        Each is repaired on the first of `shares` that is affordable for all.
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
        """Repair a candidate's cut on this many shares of the samples, and return its distance."""
        self._announce(f"{candidate.name}, repaired on {shares}/{SHARES} of the samples")
        methods, plan = self.search.methods(candidate.plan), candidate.plan
        small, part = cut(self.model, plan), self.fitting if shares == SHARES else self.fitting.share(shares)
        if methods:
            small, notes = repaired_by(methods, small, self.model, plan, part, error=self.judge.distance)
            dropped = {note.subject for note in notes}  # others are about weights
            methods = tuple(method for method in methods if method not in dropped)
        self.spent += self.search.passes(plan, shares)
        return self._judge(_RepairedCut(candidate, small, methods), part)

    def repaired_again(self, data: Iterable[Any]) -> nn.Module:
        """The best cut, repaired by the same methods on all samples."""
        one, plan = self.best, self.best.candidate.plan
        return repaired_by(one.methods, cut(self.model, plan), self.model, plan, data, error=None).model

    def tune_best(self) -> None:
        """Take gradient steps from the best cut, for as many epochs as the effort allows."""
        one = self.best
        self._announce(f"{one.candidate.name}, the original's activations")
        small = deep_copy(one.small).eval()  # not `evaluating`, which would undo the steps
        device = device_of_model(self.model)

        def read() -> Iterator[Batch]:
            return read_batches(self.fitting, device, self.model)

        with torch.inference_mode(False), evaluating(self.model):
            targets = Targets(small, self.model, one.candidate.plan, read)
            self.spent += TARGETS + JUDGING
            epoch = self.search.epoch(one.candidate.plan, targets.held)
            epochs = max(1, min(MOST_EPOCHS, int(self.left / epoch)))
            self._announce(f"{one.candidate.name}, {epochs} epochs of gradient steps")
            notes = tune(small, targets, read, epochs=epochs)
        self.spent += epochs * epoch
        for before, module in zip(one.small.modules(), small.modules(), strict=True):
            module.training = before.training
        if any(note.outcome == "repaired" for note in notes):
            self._judge(_RepairedCut(one.candidate, small, (*one.methods, TUNE)), self.fitting)

    def table(self) -> tuple[Trial, ...]:
        """All trials, those on the most samples first; the chosen one is marked."""
        lines = sorted(self.trials, key=lambda t: (-t.samples, t.distance))
        chosen = next(n for n, trial in enumerate(lines) if trial.distance == self.best.distance)
        return tuple(replace(trial, chosen=n == chosen) for n, trial in enumerate(lines))

    def _announce(self, step: str) -> None:
        announce(f"search, {self.spent:.0f} of {self.search.effort} passes: {step}")

    def _judge(self, one: _RepairedCut, part: SampleSet) -> float:
        """The distance of a cut that was repaired on `part`; the best one on all samples is kept."""
        one.distance, candidate = self.judge.distance(one.small), one.candidate
        kept = candidate.plan.share(self.search.keep.counted_in)
        made = candidate.removal, candidate.rule, candidate.spaces
        repaired = "+".join(one.methods) or "none"
        self.trials.append(Trial(*made, repaired, part.samples, kept, one.distance))
        if part is self.fitting:
            self.whole = [min([*self.whole, one], key=lambda repaired: repaired.distance)]
        return one.distance
