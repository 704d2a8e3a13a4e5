"""Repair: a cut model gets better weights of the same shapes, in closed form, from a few samples and the
original model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from fairpruner.core.plan import Plan
from fairpruner.errors import FairprunerError, unknown
from fairpruner.inputs.batches import Batch, check_rereadable, forward, read_batches
from fairpruner.inputs.losses import Loss, loss_or_distance
from fairpruner.models.calling import evaluating
from fairpruner.models.devices import device_of_model
from fairpruner.models.fingerprint import check_same_model
from fairpruner.models.supported import check_supported
from fairpruner.repair.arrivals import Sweep
from fairpruner.repair.batchnorm import reestimate
from fairpruner.repair.experts import refit_experts
from fairpruner.repair.folding import fold
from fairpruner.repair.merging import merge_experts
from fairpruner.repair.notes import Note
from fairpruner.repair.regression import choose, choose_mean
from fairpruner.repair.sequential import refit
from fairpruner.repair.tuning import tune
from fairpruner.repair.wiring import Wire, find_wires, kept_by_place, tensors_by_name
from fairpruner.terminal import progress

__all__ = ["METHODS", "Note", "repair"]

Method = Callable[[nn.Module, nn.Module, Plan, Sweep, Mapping[str, Wire]], list[Note]]

METHODS: dict[str, Method] = {
    "mean": partial(fold, choose=choose_mean),
    "least_squares": partial(fold, choose=choose),
    "sequential": refit,
    "merge": merge_experts,
    "experts": refit_experts,
    "batchnorm": lambda small, model, plan, sweep, wires: reestimate(small, sweep()),
    "tune": lambda small, model, plan, sweep, wires: tune(small, model, sweep),
}


def repair(
    small: nn.Module,
    model: nn.Module,
    plan: Plan,
    data: Iterable[Any],
    *,
    method: str | Sequence[str] = "least_squares",
    loss: Loss | None = None,
    notes: list[Note] | None = None,
) -> nn.Module:
    """A copy of `small`, the cut of `model` by `plan`, with weights that make up for what was removed; no
    training, inputs untouched.

    `mean` gives consumers the mean of what they lost; `least_squares` predicts it from what they kept;
    `sequential` refits every weight in the order of the forward pass; `merge` moves kept experts towards
    removed ones; `experts` refits what the kept experts of each block and a shared one give; `batchnorm`
    estimates running statistics again. Several methods are applied one after the other, and each only if
    it does not raise the `loss` on the data (cross-entropy by default). `notes` is a list that gets one
    line for each weight: repaired, kept or skipped.

    >>> import fairpruner as fp
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).double()  # 8 units that 4 inputs determine
    >>> inputs = torch.randn(64, 4).double()
    >>> plan = fp.Plan.removing(fp.discover(net, inputs[:1]), {"0": (1, 5, 6)})
    >>> data = [(inputs, net(inputs).detach())]
    >>> small = fp.repair(fp.cut(net, plan), net, plan, data, loss=nn.functional.mse_loss)
    >>> torch.allclose(small(inputs), net(inputs), atol=1e-6)
    True
    """
    methods = (method,) if isinstance(method, str) else tuple(method)
    for name in methods:
        if name not in METHODS:
            raise unknown("repair method", name, METHODS)
    check_rereadable(data, "repair reads it several times")
    _check(small, model, plan)
    told = [] if notes is None else notes
    device = device_of_model(model)
    with torch.inference_mode(False), torch.no_grad(), evaluating(model), evaluating(small):
        first = next(read_batches(data, device, model), None)
        if first is None:
            raise FairprunerError(
                "The data holds no samples: give a loader, or a list of batches, that yields at least one."
            )
        wires = find_wires(model, first)
        best = copy.deepcopy(small)
        least = _loss(best, model, data, loss=loss)
        for name in methods:
            trial = copy.deepcopy(best)
            lines = METHODS[name](trial, model, plan, partial(_sweep, name, data, device, model), wires)
            after = _loss(trial, model, data, loss=loss)
            if after <= least:
                best, least = trial, after
                told += lines
            else:
                told.append(
                    Note(name, "kept", f"the loss on the data would rise from {least:.4g} to {after:.4g}")
                )
    for before, module in zip(small.modules(), best.modules(), strict=True):
        module.training = before.training
    return best


def _sweep(method: str, data: Iterable[Any], device: torch.device, model: nn.Module) -> Iterator[Batch]:
    with progress(f"repair: {method}", data) as advance:
        for batch in read_batches(data, device, model):
            yield batch
            advance(batch.size)


def _loss(small: nn.Module, model: nn.Module, data: Iterable[Any], *, loss: Loss | None) -> float:
    """The mean loss of the samples, or their distance to the original if they have no labels."""
    total, samples = 0.0, 0
    for batch in read_batches(data, device_of_model(model), model):
        total += (
            loss_or_distance(loss, forward(small, batch), batch, partial(forward, model, batch)) * batch.size
        )
        samples += batch.size
    return total / samples


def _check(small: nn.Module, model: nn.Module, plan: Plan) -> None:
    check_supported(small)
    check_supported(model)
    check_same_model(
        model, plan.spaces.fingerprint, "The plan belongs", step="Give the model that was scored."
    )
    kept, found = kept_by_place(plan), tensors_by_name(small)
    lists = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and (name, 0) in kept
    )
    for name, tensor in tensors_by_name(model).items():
        if name.startswith(lists):
            continue  # modules of a list move up as others go
        expected = [
            len(kept[name, dim]) if (name, dim) in kept else size for dim, size in enumerate(tensor.shape)
        ]
        shape = list(found[name].shape) if name in found else None
        if shape != expected:
            raise FairprunerError(
                f"The model to repair is not the cut of this plan: {name} has the shape {shape}, expected"
                f" {expected}. Give fp.cut(model, plan)."
            )
