"""A cheap repair of many plans: one pass of the original model collects sums that serve every plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fairpruner.core.plan import Plan
from fairpruner.core.spaces import Spaces
from fairpruner.inputs.batches import read_batches
from fairpruner.models.calling import in_eval_mode
from fairpruner.models.devices import device_of_model
from fairpruner.models.torch_private import AnyBatchNorm
from fairpruner.pipeline.search.candidates import Candidate
from fairpruner.pipeline.search.samples import JUDGED, SHARES, SampleSet
from fairpruner.repair import Statistics
from fairpruner.repair.batchnorm import reestimate
from fairpruner.repair.job import Job
from fairpruner.surgery import cut

NORMED = 2  # shares of the samples from which running statistics are estimated again
MOST_PAIRS = 2**27  # pairs of channels whose sums are held in memory

FITTING = (JUDGED - 1) / JUDGED  # the share of the samples that repairs use
GATHERING = 1.5 * FITTING  # passes: the original runs once, and sums are computed
EACH = FITTING * NORMED / SHARES + 1 / JUDGED  # passes for each plan: the cut model runs on few samples


def can_screen(candidates: Sequence[Candidate]) -> bool:
    """Whether sums can repair all these plans: none removes experts, and the sums fit in memory."""
    plans = [candidate.plan for candidate in candidates]
    experts = any(s.kind == "expert" and plan.removed[s.name] for plan in plans for s in plan.spaces)
    readers = [part.owner.size for s in plans[0].spaces for part in s.slices_of("read")]
    return not experts and sum(size**2 for size in readers) <= MOST_PAIRS


class Screen:
    """Cuts and repairs any plan of one model without another pass over all samples."""

    def __init__(self, model: nn.Module, spaces: Spaces, fitting: SampleSet) -> None:
        self._model, self._few = model, fitting.share(NORMED)
        self._statistics = Statistics(model, spaces, fitting)
        self._normed = any(isinstance(module, AnyBatchNorm) for module in model.modules())

    @property
    def methods(self) -> tuple[str, ...]:
        return ("least_squares", "batchnorm") if self._normed else ("least_squares",)

    def repaired(self, plan: Plan) -> nn.Module:
        """The cut, repaired by `least_squares`, and by `batchnorm` if the model has batch norms."""
        small, _ = self._statistics.repair(cut(self._model, plan), plan)
        if not self._normed:
            return small
        device = device_of_model(self._model)
        with torch.inference_mode(False), torch.no_grad(), in_eval_mode(small):
            reestimate(Job(small, self._model, plan, lambda: read_batches(self._few, device, self._model)))
        return small
