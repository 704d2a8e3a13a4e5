"""Statistics of the original model that repair any plan without another pass over the data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fairpruner.core.plan import Plan, check_plan
from fairpruner.core.spaces import Spaces
from fairpruner.errors import another_model, unknown
from fairpruner.inputs.batches import read_batches, with_first
from fairpruner.models.calling import evaluating
from fairpruner.models.copying import deep_copy
from fairpruner.models.devices import device_of_model
from fairpruner.models.fingerprint import check_same_model
from fairpruner.models.fitting import check_fits
from fairpruner.repair.consumers import consumers_of
from fairpruner.repair.least_squares import JudgingFit, apply, gather, sort_out
from fairpruner.repair.notes import Repaired
from fairpruner.repair.regression import judged_fit, judged_mean
from fairpruner.repair.shapes import Shapes
from fairpruner.repair.tensors import tensors_by_name
from fairpruner.repair.weight_uses import find_weight_uses

JUDGES: dict[str, JudgingFit] = {"mean": judged_mean, "least_squares": judged_fit}


class Statistics:
    """Second moments of the inputs of all weights that read prunable units, in the original model.

    They are collected in one forward pass. Each repair then only solves small systems of equations, so many
    plans can be tried. The model must not change in between.
    """

    def __init__(self, model: nn.Module, spaces: Spaces, data: Iterable[Any]) -> None:
        """Collect them for all units of `spaces`; a consumer of C channels needs C² numbers of memory.

        >>> import fairpruner as fp
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).double()  # 8 units that 4 inputs determine
        >>> inputs = torch.randn(64, 4).double()
        >>> spaces = fp.discover(net, inputs[:1])
        >>> statistics = fp.RepairStatistics(net, spaces, [(inputs, torch.zeros(64))])
        >>> for removed in [(1, 5, 6), (0, 2, 3, 7)]:
        ...     plan = fp.Plan.removing(spaces, {"0": removed})
        ...     small, notes = statistics.repair(fp.cut(net, plan), plan)
        ...     print(torch.allclose(small(inputs), net(inputs), atol=1e-6))
        True
        True
        """
        check_same_model(
            model, spaces.fingerprint, "The spaces belong", step="Give the model they were found in."
        )
        check_fits(model, Plan.removing(spaces, {}))
        self._fingerprint, self._shapes = spaces.fingerprint, Shapes.of(model)
        device = device_of_model(model)
        with torch.inference_mode(False), torch.no_grad(), evaluating(model):
            first, batches = with_first(read_batches(data, device, model))
            self._uses = find_weight_uses(model, first)
            consumers, self._skipped = sort_out(consumers_of(spaces, model), self._uses, model)
            self._moments = gather(model, consumers, batches)

    def repair(self, small: nn.Module, plan: Plan, method: str = "least_squares") -> Repaired:
        """A copy of `small`, the cut by `plan`, after `least_squares` or `mean`; no loss is compared."""
        if method not in JUDGES:
            raise unknown("repair from statistics", method, JUDGES)
        check_plan(plan)
        if plan.spaces.fingerprint != self._fingerprint:
            raise another_model(
                "The plan belongs", plan.spaces.fingerprint, self._fingerprint, "Give its statistics."
            )
        self._shapes.check_cut(small, plan)
        lost = {part.tensor for s in plan.spaces if plan.removed[s.name] for part in s.slices_of("read")}
        repaired = deep_copy(small)
        lost &= set(tensors_by_name(repaired))  # a removed block takes its consumers with it
        notes = [note for note in self._skipped if note.subject in lost]
        for name, moments in self._moments.items():
            if name in lost:
                notes.append(apply(repaired, plan, moments, self._uses[name].offset, JUDGES[method]))
        return Repaired(repaired, tuple(notes))
