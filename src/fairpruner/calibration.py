"""The one calibration pass: each batch goes forward and backward once, and every signal sees what it asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .calling import describe
from .errors import FairprunerError
from .experts import expert_blocks
from .inputs.batches import Batch, Loss, forward, logits_of, mean_loss, token_losses
from .inputs.tokens import counted_tokens, mean_over_tokens, real_tokens
from .observing import Read, find_hooks, reads_of, watching
from .routing import Call, gates_of, loss_position_terms, slopes_of, watching_experts
from .signals.base import Meter, Need, Signal, Step
from .signals.choosing import Choice
from .signals.classes import ClassGroups
from .types import Kind, Spaces, UnitSpace


class Part(NamedTuple):
    """A signal at work on the spaces of some kinds."""

    name: str  # of what was asked for, to which it belongs
    signal: Signal
    kinds: tuple[Kind, ...]
    meter: Meter


Parts = Sequence[Part]


class Calibration:
    """The forward and backward that all signals share."""

    def __init__(self, model: nn.Module, spaces: Spaces, loss: Loss | None, choices: Sequence[Choice], grouping: ClassGroups | None) -> None:
        self._model, self._loss, self._grouping = model, loss, grouping
        kinds: dict[Need, set[Kind]] = {}  # of the spaces on which each need arises
        for choice in choices:
            for kind, signal in choice.by_kind.items():
                for need in signal.needs:
                    kinds.setdefault(need, set()).add(kind)

        def needing(*needs: Need) -> list[UnitSpace]:
            return [space for space in spaces if any(space.kind in kinds.get(need, ()) for need in needs)]

        self.needs = frozenset(kinds)
        self._backward = bool(self.needs & {"gradients", "gates", "routed_gradients"})
        self._comparing = [signal.name for choice in choices for signal in choice.signals if signal.compares_classes]
        self._on_tokens = False  # the loss is a mean over tokens, not over samples
        watched: tuple[Need, ...] = ("activations", "gates", "deletions")
        self._reads = reads_of(model, needing(*watched), observed_only=not self.needs & {"gates", "deletions"})
        observing = needing("activations")
        self._observed = {read for read in self._reads if read.space in observing and read.part is read.space.observed}
        self._hooked: dict[Read, nn.Module] = {}
        routed = {space.name for space in needing("routing", "routed_gradients", "routed_losses")}
        holders = {read.part.tensor.rpartition(".")[0] for read in self._reads}  # of hidden units inside experts, too
        blocks = expert_blocks(model)
        self._blocks = tuple(block for block in blocks if block.name in routed or block.experts in holders)
        for read in self._reads:
            if any(read.part.tensor.startswith(f"{block.experts}.{number}.") for block in blocks for number in range(block.size)):
                raise FairprunerError(
                    f"Space {read.space.name!r} lies inside experts that are modules of a list, each called on tokens of its own, so that its activations cannot be seen: give its kind a signal that looks at weights, such as {read.space.kind}=l2+expert=soft_activation, or leave it out with skip={read.space.name!r}."
                )
        parameters = dict(model.named_parameters(remove_duplicate=False))
        owned = {part.tensor for space in needing("gradients", "gates") for part in space.slices}
        self.weights = {name: p for name, p in parameters.items() if name in owned and p.is_floating_point()}

    def look(self, first: Batch) -> int:
        """Run one sample to learn which weights can be seen reading, and how many classes to expect."""
        labels = self._labels(first)
        outputs = []

        calls: list[Call] = []

        def run() -> None:
            with torch.set_grad_enabled(bool(self._blocks)), watching_experts(self._model, self._blocks, calls.append):
                outputs.append(forward(self._model, first.rows(0, 1)))

        self._hooked = find_hooks(self._model, self._reads, run)
        logits = logits_of(outputs[0])
        self._on_tokens = self._loss is None and logits is not None and logits.ndim == 3
        self._check_routing(calls)
        named = int(labels.max()) + 1 if self._comparing else 1
        return max(named, logits.shape[1]) if logits is not None and logits.ndim == 2 else named

    def step(self, batch: Batch, half: int, parts: Parts) -> None:
        """Show one batch to all meters."""
        step = Step(batch.predicted_tokens() if self._on_tokens else batch.size, half)
        labels = self._labels(batch)
        gates: list[tuple[Read, Tensor, int]] = []
        calls: list[Call] = []
        shown: set[Read] = set()

        def visit(read: Read, source: Tensor, axis: int) -> Tensor:
            # A weight that is called several times is observed at its first call, at once: later the tensor may have been changed in place.
            if read in self._observed and read not in shown:
                shown.add(read)
                _show(read, source.detach(), axis, labels, batch, [part for part in parts if read.space.kind in part.kinds])
            if "gates" not in self.needs:
                return source
            # A view of its own: its gradient comes through this consumer alone.
            gate = source.view_as(source) if source.requires_grad else source.detach().requires_grad_()
            gates.append((read, gate, axis))
            return gate

        if self._backward or self._observed or self._blocks:
            routing = watching_experts(self._model, self._blocks, calls.append)
            with torch.set_grad_enabled(self._backward or bool(self._blocks)), watching(self._reads, visit, self._hooked), routing:
                output = forward(self._model, batch)
            tallies = self._tallies(calls, output, batch)
        if self._backward:
            followed = calls if "routed_gradients" in self.needs else []
            watched = [*(gate for _, gate, _ in gates), *gates_of(followed)]
            gradients, found = self._gradients(mean_loss(self._loss, output, batch), watched, batch)
            terms = _gate_terms(gates, found[: len(gates)], batch.size, step)
            for part in parts:
                part.meter.see_gradients(gradients, step)
                part.meter.see_gates(terms, step)
            for call, slopes in zip(followed, slopes_of(followed, found[len(gates) :]), strict=True):
                # The gradient is that of the mean loss: times the samples, it is the sum over them.
                _add(tallies[call.block.name], "weighted_term", call.by_expert(slopes * call.weight) * step.samples)
        if self._blocks:
            for part in parts:
                part.meter.see_routing(tallies, step)
        if "deletions" in self.needs:
            change = self._loss_changes(batch)
            for part in parts:
                part.meter.see_deletions(change, step)

    def _check_routing(self, calls: Sequence[Call]) -> None:
        """Refuse experts whose calls were not understood, or whose parameters cannot all be followed."""
        exact = {call.block.name: bool(call.gates) for call in calls}
        for block in self._blocks:
            experts = self._model.get_submodule(block.experts)
            if block.name not in exact:
                raise FairprunerError(
                    f"Block {block.name!r} calls its {type(experts).__name__} in a way that is not known, so its routing cannot be seen: leave it out with skip={block.name!r} in discover, or score experts with 'random'."
                )
            if not exact[block.name] and self.needs & {"routed_gradients", "routed_losses"}:
                raise FairprunerError(
                    f"The experts of block {block.name!r} hold parameters outside of linear and norm modules, so routed_taylor cannot follow them: give another protection signal for experts, such as 'random'."
                )
        if "routed_losses" in self.needs and not self._on_tokens:
            raise FairprunerError(
                "Signal 'routed_taylor_exact' needs the loss of every token, which only the default loss of a language model has: use protection='routed_taylor'."
            )

    def _tallies(self, calls: Sequence[Call], output: Any, batch: Batch) -> dict[str, dict[str, Tensor]]:
        """What the tokens of a batch sum up to for each expert of each block."""
        tallies: dict[str, dict[str, Tensor]] = {}
        exact: Sequence[Tensor] = ()
        if "routed_losses" in self.needs:
            losses = token_losses(output, batch)
            assert losses is not None  # the first batch has shown that the default loss is one of tokens
            exact = loss_position_terms(calls, losses)
        for position, call in enumerate(calls):
            counted = counted_tokens(batch.inputs, batch.labels, call.block.name)
            if counted is None or counted.numel() != call.tokens:
                counted = torch.ones(call.tokens, dtype=torch.bool)
            sums = tallies.setdefault(call.block.name, {})
            for quantity, total in call.tally(counted.reshape(-1)).items():
                _add(sums, quantity, total)
            if exact:
                _add(sums, "exact_term", exact[position])
        return tallies

    def _labels(self, batch: Batch) -> Tensor:
        if self._grouping is not None:
            return self._grouping(batch.class_labels())
        if self._comparing and batch.labels.ndim > 1 and real_tokens(batch.inputs) is not None:
            raise FairprunerError(
                f"Signal {self._comparing[0]!r} compares classes, and batch {batch.position} has none: its labels are {describe(batch.labels)}. Give each sample a class, or choose a removal signal without: activation, reconstruction, l2."
            )
        return batch.class_labels() if self._comparing else batch.labels

    def _gradients(self, loss: Tensor, gates: Sequence[Tensor], batch: Batch) -> tuple[dict[str, Tensor], list[Tensor | None]]:
        """Gradients of the mean loss by parameter and for the gates; no `.grad` is touched."""
        if not loss.requires_grad:
            raise FairprunerError("The loss has no gradient: compute it from the model's output with torch functions, without detach or item.")
        weights = self.weights if "gradients" in self.needs else {}
        try:
            found = torch.autograd.grad(loss, [*weights.values(), *gates], allow_unused=True)
        except RuntimeError as error:
            raise FairprunerError(f"The backward pass failed on batch {batch.position}: {error}") from error
        named = zip(weights, found[: len(weights)], strict=True)
        return {name: gradient for name, gradient in named if gradient is not None}, list(found[len(weights) :])

    def _loss_changes(self, batch: Batch) -> Callable[[UnitSpace, int], float]:
        def loss_without(space: UnitSpace | None, unit: int) -> float:
            def visit(read: Read, source: Tensor, axis: int) -> Tensor:
                if read.space is not space:
                    return source
                kept = torch.from_numpy(read.owner(source.shape[axis]) != unit).to(source)  # [C]
                return (source.movedim(axis, -1) * kept).movedim(-1, axis)

            with torch.no_grad(), watching(self._reads, visit, self._hooked):
                return float(mean_loss(self._loss, forward(self._model, batch), batch))

        whole = loss_without(None, -1)
        return lambda space, unit: loss_without(space, unit) - whole


def _add(sums: dict[str, Tensor], quantity: str, total: Tensor) -> None:
    sums[quantity] = sums[quantity] + total if quantity in sums else total


def _show(read: Read, source: Tensor, axis: int, labels: Tensor, batch: Batch, parts: Parts) -> None:
    with torch.autocast(source.device.type, enabled=False):  # the model may run in low precision, the signals do not
        for pooled, some in groupby(sorted(parts, key=_pools), key=_pools):
            activation, own = _seen(read, source, axis, labels, batch, pooled=pooled)
            # The sum is quick and shows nearly every flaw; only if it looks bad are all values examined.
            if not torch.isfinite(activation.sum()) and not torch.isfinite(activation).all():
                raise FairprunerError(
                    f"Space {read.space.name!r} has NaN or infinite activations in batch {batch.position}: look at that batch and at the weights before {read.part.tensor}."
                )
            for part in some:
                with _blaming(part.signal.name, read.space):
                    part.meter.see_activation(read.space, activation, own)


def _pools(part: Part) -> bool:
    return part.meter.pools_tokens


def _seen(read: Read, source: Tensor, axis: int, labels: Tensor, batch: Batch, *, pooled: bool) -> tuple[Tensor, Tensor]:
    """What a signal is shown, [N, J, F], and the labels: of texts, each real token is a sample, or if `pooled` their mean; padding is never seen."""
    real = real_tokens(batch.inputs, read.part.tensor)
    if real is not None and read.weight.ndim == 3:  # stacked experts read a token once for each that it was sent to
        real = real.repeat_interleave(max(1, source.shape[0] // real.numel()), dim=1)
    if real is None or axis != -1 or source.shape[:-1].numel() != real.numel():
        return read.by_unit(source, axis, batch.size), labels
    source = source.reshape(*real.shape, -1)  # [N, T, C]; some models fold texts and tokens into one dim
    if pooled:
        return read.by_unit(mean_over_tokens(source, real), axis, batch.size), labels
    rows = source[real]  # [tokens, C]
    return read.by_unit(rows, axis, len(rows)), labels.repeat_interleave(real.sum(1), dim=0)


@contextmanager
def _blaming(signal: str, space: UnitSpace) -> Iterator[None]:
    """An own signal's failure told as such: it comes up inside the model's forward, which is not to blame."""
    try:
        yield
    except FairprunerError:
        raise
    except Exception as error:
        raise FairprunerError(f"Signal {signal!r} failed on space {space.name!r}: {type(error).__name__}: {error}") from error


def _gate_terms(gates: Sequence[tuple[Read, Tensor, int]], gradients: Sequence[Tensor | None], samples: int, step: Step) -> dict[str, Tensor]:
    """<activation, gradient of each sample's own loss> of every unit, over all that read it: space -> [N, J]."""
    terms: dict[str, Tensor] = {}
    for (read, gate, axis), gradient in zip(gates, gradients, strict=True):
        if gradient is not None:
            activation, slope = (read.by_unit(t.detach(), axis, samples) for t in (gate, gradient))  # [N, J, F]
            term = (activation * slope).sum(2, dtype=torch.float64 if gate.dtype == torch.float64 else torch.float32) * step.samples
            terms[read.space.name] = terms[read.space.name] + term if read.space.name in terms else term
    return terms


@contextmanager
def learning(model: nn.Module, weights: Collection[nn.Parameter]) -> Iterator[None]:
    """Only these weights get gradients inside, so that nothing is kept for those of the others; afterwards all are as they were."""
    wanted = {id(weight) for weight in weights}
    changed = [parameter for parameter in model.parameters() if parameter.requires_grad != (id(parameter) in wanted)]
    try:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)
