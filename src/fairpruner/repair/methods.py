"""The repair methods by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fairpruner.repair.batchnorm import reestimate
from fairpruner.repair.constants import replace_by_constants
from fairpruner.repair.experts import refit_experts
from fairpruner.repair.job import Job
from fairpruner.repair.least_squares import predict_removed
from fairpruner.repair.merging import merge_experts
from fairpruner.repair.notes import Note
from fairpruner.repair.renormalising import renormalise
from fairpruner.repair.sequential import refit
from fairpruner.repair.statistics import JUDGES
from fairpruner.repair.targets import Targets
from fairpruner.repair.tuning import tune

METHODS: dict[str, Callable[[Job], list[Note]]] = {
    **{name: partial(predict_removed, judge=judge) for name, judge in JUDGES.items()},
    "sequential": refit,
    "merge": merge_experts,
    "constants": replace_by_constants,
    "experts": refit_experts,
    "renormalise": renormalise,
    "batchnorm": reestimate,
    "tune": lambda job: tune(job.small, Targets(job.small, job.model, job.plan, job.read), job.read),
}
