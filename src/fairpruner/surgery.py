"""Cut and mask: the same plan applied physically, and as zeros and silenced routes in a full-size model."""

from __future__ import annotations

from torch import nn

from fairpruner.core.plan import Plan
from fairpruner.models.fingerprint import check_same_model
from fairpruner.models.narrowing import cut_units, mask_units
from fairpruner.models.supported import check_supported


def cut(model: nn.Module, plan: Plan) -> nn.Module:
    """A smaller model without the plan's units; the model given is untouched.

    >>> import fairpruner as fp
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> spaces = fp.discover(net, torch.zeros(1, 4))
    >>> small = fp.cut(net, fp.Plan.removing(spaces, {"0": (1, 5)}))
    >>> small[0]
    Linear(in_features=4, out_features=6, bias=True)
    """
    _check(model, plan)
    return cut_units(model, plan.spaces, plan.removed)


def mask(model: nn.Module, plan: Plan) -> nn.Module:
    """A full-size copy in which nothing reads the plan's units: it computes what `cut` computes."""
    _check(model, plan)
    return mask_units(model, plan.spaces, plan.removed)


def _check(model: nn.Module, plan: Plan) -> None:
    check_supported(model)
    check_same_model(
        model,
        plan.spaces.fingerprint,
        "The plan belongs",
        step="Score and allocate this model, or give the original one.",
    )
