"""Predict removed units from kept units, and add the prediction to the weights that read them.

Only the original model is observed, so one collection of sums serves every plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from fairpruner.core.plan import Plan
from fairpruner.inputs.batches import Batch, forward
from fairpruner.models.experts import expert_lists
from fairpruner.models.precision import forget_casts
from fairpruner.repair.consumers import Consumer, Moments, consumers_of
from fairpruner.repair.interceptor import Interceptor
from fairpruner.repair.job import Job
from fairpruner.repair.notes import ROUTED, UNSEEN, USED_ELSEWHERE, Note
from fairpruner.repair.products import Product
from fairpruner.repair.regression import Halves, JudgedFit, float64
from fairpruner.repair.tensors import KeptByDim, kept_by_dim, tensors_by_name
from fairpruner.repair.weight_uses import Offset, WeightUse, find_weight_uses

MOST_CHANNELS = 2**14  # that one weight reads: the products of all their pairs are held
MOST_NUMBERS = 2**27  # in the products of pairs, over all weights, that one sweep gathers

JudgingFit = Callable[[Halves, bool], JudgedFit]


def predict_removed(job: Job, judge: JudgingFit) -> list[Note]:
    """Add to every consumer in the cut model the prediction of what the removed units gave it."""
    spaces = [space for space in job.plan.spaces if job.plan.removed[space.name]]
    uses = find_weight_uses(job.model, next(job.read()))
    left = tensors_by_name(job.small)  # without the consumers inside removed blocks
    consumers = [consumer for consumer in consumers_of(spaces, job.model) if consumer.name in left]
    usable, notes = sort_out(consumers, uses, job.model)
    for group in _groups(usable):
        gathered = gather(job.model, group, job.read())
        notes += [
            apply(job.small, job.plan, moments, uses[name].offset, judge)
            for name, moments in gathered.items()
        ]
    return notes


def sort_out(
    consumers: Sequence[Consumer], uses: Mapping[str, WeightUse], model: nn.Module
) -> tuple[list[Consumer], list[Note]]:
    """The consumers that can be repaired, and notes on the others."""
    inside_experts = tuple(f"{path}." for path in expert_lists(model))

    def obstacle(consumer: Consumer) -> str:
        if consumer.name.startswith(inside_experts):
            return ROUTED
        if consumer.name not in uses:
            return UNSEEN
        if not uses[consumer.name].only_multiplies:
            return USED_ELSEWHERE
        many = consumer.channels > MOST_CHANNELS
        return f"it reads {consumer.channels} channels, more than {MOST_CHANNELS}" if many else ""

    obstacles = [(consumer, obstacle(consumer)) for consumer in consumers]
    return (
        [consumer for consumer, reason in obstacles if not reason],
        [Note(consumer.name, "skipped", reason) for consumer, reason in obstacles if reason],
    )


def _groups(consumers: Iterable[Consumer]) -> Iterator[list[Consumer]]:
    """Groups of consumers whose moments fit in memory together; a very large one is a group by itself."""
    group: list[Consumer] = []
    room = MOST_NUMBERS
    for consumer in consumers:
        if group and consumer.channels**2 > room:
            yield group
            group, room = [], MOST_NUMBERS
        group.append(consumer)
        room -= consumer.channels**2
    if group:
        yield group


def gather(model: nn.Module, consumers: Iterable[Consumer], batches: Iterable[Batch]) -> dict[str, Moments]:
    """The moments of all these consumers, in one pass over the data."""
    moments: dict[str, Moments] = {}
    by_name = {consumer.name: consumer for consumer in consumers}
    for batch in batches:
        with _Reading(model, by_name, moments, batch):
            forward(model, batch)
    return moments


class _Reading(Interceptor):
    """Adds what consumers read in one batch to their moments."""

    def __init__(
        self, model: nn.Module, consumers: Mapping[str, Consumer], moments: dict[str, Moments], batch: Batch
    ) -> None:
        super().__init__(model)
        self._consumers, self._moments, self._batch = consumers, moments, batch

    def product(self, product: Product) -> Tensor:
        consumer = self._consumers.get(product.name)
        if consumer is not None:
            if product.name not in self._moments:
                self._moments[product.name] = Moments(consumer, product)
            self._moments[product.name].add(product, self._batch)
        return product.run()


def apply(small: nn.Module, plan: Plan, moments: Moments, offset: Offset | None, judge: JudgingFit) -> Note:
    """Add to one consumer in the cut model what the removed units gave it."""
    consumer, product, kept = moments.consumer, moments.product, kept_by_dim(plan)
    name = consumer.name
    keep = consumer.kept_in_group(kept[name, product.read_dim], product)
    if keep is None:
        return Note(name, "skipped", "its groups lose different channels")
    matrix = consumer.by_unit(product.matrix(float64(product.weight.detach())))  # [G, c, taps, q]
    found = judge(moments.equations(matrix, keep), offset is not None)
    if found.fit is not None:
        change = torch.zeros_like(matrix)
        change[:, keep] = found.fit.slope.unflatten(2, matrix.shape[2:])
        tensors = tensors_by_name(small)
        with torch.no_grad():
            tensors[name].add_(
                _narrowed(product.stored(consumer.by_column(change), product.weight), name, kept)
            )
            if offset is not None:
                # Every tap reads the constant: [outputs].
                constant = found.fit.offset.unflatten(1, matrix.shape[2:]).sum(1).flatten()
                target = tensors[offset.tensor]
                target.add_(offset.sign * constant[product.kept_outputs(kept)].to(target))
        forget_casts()
    return Note.of(name, found)


def _narrowed(weight: Tensor, name: str, kept: KeptByDim) -> Tensor:
    """The part of a tensor that a cut keeps."""
    for dim in range(weight.ndim):
        if (name, dim) in kept:
            weight = weight.index_select(dim, torch.from_numpy(kept[name, dim]).to(weight.device))
    return weight
