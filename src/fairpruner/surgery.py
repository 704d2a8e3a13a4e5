"""Cut and mask: a plan applied by removing its units, or by silencing them in a full-size copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fairpruner.core.plan import Plan, check_plan
from fairpruner.core.reading import understanding
from fairpruner.core.units import UnitSpace
from fairpruner.discovery.agreeing import untraced
from fairpruner.discovery.lively import with_pools
from fairpruner.discovery.verify import disagreement, runs_without_numbers
from fairpruner.errors import FairprunerError
from fairpruner.models.counting import count_params
from fairpruner.models.devices import device_of_model
from fairpruner.models.experts import plain_experts
from fairpruner.models.fingerprint import check_same_model
from fairpruner.models.fitting import check_fits
from fairpruner.models.narrowing import cut_units, mask_units
from fairpruner.models.recorded import draw_example
from fairpruner.models.supported import check_supported

# The class of the model that a plan from a file was verified on, so that it is verified only once.
_VERIFIED: WeakKeyDictionary[Plan, type[nn.Module]] = WeakKeyDictionary()


def cut(model: nn.Module, plan: Plan, *, example: Any = None) -> nn.Module:
    """A smaller model without the plan's units; the model given is not changed.

    A plan that was read from a file is verified first: the smaller model must give the same output as the
    masked one, on `example` or on a random input of the kind that the plan records.

    >>> import torch, fairpruner as fp
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> spaces = fp.discover(net, torch.zeros(1, 4))
    >>> small = fp.cut(net, fp.Plan.removing(spaces, {"0": (1, 5)}))
    >>> small[0]
    Linear(in_features=4, out_features=6, bias=True)
    """
    _check(model, plan, example)
    small = cut_units(model, plan.spaces, plan.removed)
    _check_params(model, small, plan)
    return small


def mask(model: nn.Module, plan: Plan, *, example: Any = None) -> nn.Module:
    """A full-size copy in which nothing reads the plan's units; its outputs are those of the cut model.

    `example` is used as by `cut`.
    """
    _check(model, plan, example)
    return mask_units(model, plan.spaces, plan.removed)


def cut_without_weights(model: nn.Module, plan: Plan, *, room: int) -> nn.Module:
    """`cut` for a model on the device "meta", whose tensors have shapes but no numbers.

    A plan from a file is verified with random weights, in parts that take at most `room` bytes, and the
    shapes of the whole cut model once more on the device "meta".
    """
    _check_fits(model, plan)
    small = cut_units(model, plan.spaces, plan.removed)
    _check_params(model, small, plan)
    if _is_unverified(model, plan):
        examples = _examples(plan, torch.device("cpu"))
        _verify(model, plan, examples, room=room)
        _refuse(model, next(filter(None, (runs_without_numbers(model, small, e) for e in examples)), ""))
        _VERIFIED[plan] = type(model)
    return small


def _check(model: nn.Module, plan: Plan, example: Any) -> None:
    """Refuse a plan of another model, and verify a plan from a file."""
    _check_fits(model, plan)
    if _is_unverified(model, plan):
        examples = _examples(plan, device_of_model(model)) if example is None else [example]
        _verify(model, plan, examples)
        _VERIFIED[plan] = type(model)


def _check_params(model: nn.Module, small: nn.Module, plan: Plan) -> None:
    """Refuse a plan from a file whose costs are not those of the cut model."""
    found, predicted = count_params(small), plan.predicted["params"]
    if plan.spaces.from_file and found != predicted:
        _refuse(model, f"it predicts {predicted:,} params, and the cut model has {found:,}")


def _is_unverified(model: nn.Module, plan: Plan) -> bool:
    """Whether a plan is from a file, removes something, and was not verified in this process."""
    return plan.spaces.from_file and any(plan.removed.values()) and _VERIFIED.get(plan) is not type(model)


def _check_fits(model: nn.Module, plan: Plan) -> None:
    check_supported(model)
    check_plan(plan)
    check_same_model(
        model,
        plan.spaces.fingerprint,
        "The plan belongs",
        step="Score and allocate this model, or give the original one.",
    )
    check_fits(model, plan)


def _examples(plan: Plan, device: torch.device) -> list[Any]:
    """Random inputs of the kinds that a plan from a file records."""
    if plan.spaces.examples is None:
        raise FairprunerError(
            "The plan was read from a file and records no example to verify it on: give example=, an"
            " input of the model."
        )
    with understanding("the examples that the plan's file records"):
        examples = draw_example(plan.spaces.examples, device)
    if not isinstance(examples, list) or not examples:
        raise FairprunerError("The plan's file has no list of examples: score and allocate again.")
    return examples


def _verify(model: nn.Module, plan: Plan, examples: list[Any], room: int | None = None) -> None:
    """Refuse a plan from a file unless cut and mask agree, and its units are those of this model.

    Its digest is no proof, because anyone can make one.
    """
    touched = [space for space in plan.spaces if plan.removed[space.name]]

    def why_wrong(spaces: Sequence[UnitSpace]) -> str:
        return disagreement(model, examples, spaces, plan.removed, room=room)

    with plain_experts(model):
        _refuse(model, why_wrong(touched))
        traced = model if room is None else with_pools(model)
        _refuse(model, untraced(traced, examples, touched, is_cut_right=lambda spaces: not why_wrong(spaces)))


def _refuse(model: nn.Module, reason: str) -> None:
    if reason:
        raise FairprunerError(
            f"The plan was read from a file, and it does not cut {type(model).__name__} correctly: {reason}."
            " Score and allocate this model again, or give example= if it needs inputs of a special kind."
        )
