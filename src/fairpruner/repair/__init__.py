"""Repair: better weights of the same shapes for a cut model, from a few samples and without labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from fairpruner.core.plan import Plan, check_plan
from fairpruner.errors import unknown
from fairpruner.inputs.batches import Batch, check_rereadable, forward, read_batches, read_once
from fairpruner.inputs.losses import Loss, loss_or_distance
from fairpruner.inputs.same_order import SameOrder
from fairpruner.inputs.workers import naming_dead_workers
from fairpruner.models.calling import evaluating
from fairpruner.models.copying import deep_copy
from fairpruner.models.devices import device_of_model
from fairpruner.models.fingerprint import check_same_model
from fairpruner.models.supported import check_supported
from fairpruner.repair.job import Job, compared, first_batch, would_raise_loss
from fairpruner.repair.methods import METHODS
from fairpruner.repair.notes import Note, Repaired
from fairpruner.repair.shapes import Shapes
from fairpruner.repair.statistics import Statistics
from fairpruner.repair.streamed import cut_files
from fairpruner.terminal.progress import progress

__all__ = [
    "METHODS",
    "Note",
    "Repaired",
    "Statistics",
    "cut_files",
    "repair",
    "repair_with_notes",
    "repaired_by",
]


@naming_dead_workers()
def repair(
    small: nn.Module,
    model: nn.Module,
    plan: Plan,
    data: Iterable[Any],
    *,
    method: str | Sequence[str] = "least_squares",
    loss: Loss | str | None = None,
) -> nn.Module:
    """A copy of `small`, the cut of `model` by `plan`, whose weights compensate for the removed units.

    No labels are needed, and neither model changes. The methods:

    - `mean` adds the mean of the removed units' contribution to each weight that read them.
    - `least_squares` predicts this contribution from the kept units.
    - `sequential` refits every weight in the order of the forward pass.
    - `merge` moves kept experts towards removed ones.
    - `constants` lets removed experts of transformers models leave their mean outputs behind.
    - `experts` refits the last matrices of the kept experts, and of a shared expert, of each block.
    - `renormalise` lets routers divide the weights of a token's experts by their sum.
    - `batchnorm` estimates running statistics again.
    - `tune` takes gradient steps towards the original's activations; all other methods are closed-form.

    Several methods are applied one after the other. Each is applied only if it does not raise the `loss` on
    the first samples: that of the task that the labels show, of a task that you name, or your function.

    >>> import fairpruner as fp
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).double()  # 8 units that 4 inputs determine
    >>> inputs = torch.randn(64, 4).double()
    >>> plan = fp.Plan.removing(fp.discover(net, inputs[:1]), {"0": (1, 5, 6)})
    >>> data = [(inputs, net(inputs).detach())]
    >>> small = fp.repair(fp.cut(net, plan), net, plan, data, loss=nn.functional.mse_loss)
    >>> torch.allclose(small(inputs), net(inputs), atol=1e-6)
    True
    """
    return repair_with_notes(small, model, plan, data, method=method, loss=loss).model


def repair_with_notes(
    small: nn.Module,
    model: nn.Module,
    plan: Plan,
    data: Iterable[Any],
    *,
    method: str | Sequence[str] = "least_squares",
    loss: Loss | str | None = None,
) -> Repaired:
    """The same as `repair`, with a note for each weight: `repaired`, `kept` or `skipped`, and why."""
    methods = (method,) if isinstance(method, str) or not isinstance(method, Iterable) else tuple(method)
    for name in methods:
        if name not in METHODS:
            raise unknown("repair method", name, METHODS)
    check_rereadable(data, "repair reads it several times")
    data = SameOrder(data)  # the loss before and after a repair must be that of the same samples
    return repaired_by(
        methods, small, model, plan, data, error=partial(_loss, model=model, data=data, loss=loss)
    )


def repaired_by(
    methods: Sequence[str],
    small: nn.Module,
    model: nn.Module,
    plan: Plan,
    data: Iterable[Any],
    *,
    error: Callable[[nn.Module], float] | None,
) -> Repaired:
    """Apply methods, each only if it does not raise `error`, a function of the smaller model; None: all."""
    _check_cut(small, model, plan)
    device = device_of_model(model)
    notes: list[Note] = []
    with torch.inference_mode(False), torch.no_grad(), evaluating(model), evaluating(small):
        first_batch(data, model)
        best = deep_copy(small)
        least = error(best) if error else math.inf
        for name in methods:
            trial = deep_copy(best)
            found = METHODS[name](Job(trial, model, plan, partial(_read, name, data, device, model)))
            after = error(trial) if error else least
            if after <= least:
                best, least = trial, after
                notes += found
            else:
                notes.append(would_raise_loss(name, least, after))
    modes = {path: module.training for path, module in small.named_modules()}
    for path, module in best.named_modules():
        module.training = modes.get(path, small.training)  # constants of experts are new modules
    return Repaired(best, tuple(notes))


def _read(method: str, data: Iterable[Any], device: torch.device, model: nn.Module) -> Iterator[Batch]:
    with progress(f"repair: {method}", data) as advance:
        batch = None
        for batch in read_batches(data, device, model):
            yield batch
            advance(batch.size)
    if batch is None:
        raise read_once()


def _loss(small: nn.Module, *, model: nn.Module, data: Iterable[Any], loss: Loss | str | None) -> float:
    """The mean loss of the compared batches, or their distance to the original if they have no labels."""
    total, samples = 0.0, 0
    for batch in compared(read_batches(data, device_of_model(model), model)):
        found = loss_or_distance(loss, forward(small, batch), batch, partial(forward, model, batch))
        total += found * batch.size
        samples += batch.size
    if not samples:
        raise read_once()
    return total / samples


def _check_cut(small: nn.Module, model: nn.Module, plan: Plan) -> None:
    check_supported(small)
    check_supported(model)
    check_plan(plan)
    check_same_model(
        model, plan.spaces.fingerprint, "The plan belongs", step="Give the model that was scored."
    )
    Shapes.of(model).check_cut(small, plan)
