"""The one calibration pass: each batch goes forward and backward once, and every signal sees what it asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import torch
from torch import Tensor, nn

from .batches import Batch, Loss, forward, logits_of, mean_loss
from .calling import describe
from .errors import FairprunerError
from .observing import Read, find_hooks, reads_of, watching
from .signals.base import Meter, Need, Signal, Step
from .signals.classes import ClassGroups
from .tokens import mean_over_tokens, real_tokens
from .types import Spaces, UnitSpace

Meters = Sequence[tuple[str, Meter]]  # with the names of their signals


class Calibration:
    """The forward and backward that all signals share."""

    def __init__(self, model: nn.Module, spaces: Spaces, loss: Loss | None, signals: Sequence[Signal], grouping: ClassGroups | None) -> None:
        self._model, self._loss, self._grouping = model, loss, grouping
        self.needs: frozenset[Need] = frozenset[Need]().union(*(signal.needs for signal in signals))
        self._backward = bool(self.needs & {"gradients", "gates"})
        self._comparing = [signal.name for signal in signals if signal.compares_classes]
        self._on_tokens = False  # the loss is a mean over tokens, not over samples
        watched = self.needs & {"activations", "gates", "deletions"}
        self._reads = reads_of(model, spaces, observed_only=watched == {"activations"}) if watched else ()
        self._observed = {read for read in self._reads if read.part is read.space.observed} if "activations" in self.needs else set()
        self._hooked: dict[Read, nn.Module] = {}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        owned = {part.tensor for space in spaces for part in space.slices}
        self.weights = {name: p for name, p in parameters.items() if name in owned and p.is_floating_point()}

    def look(self, first: Batch) -> int:
        """Run one sample to learn which weights can be seen reading, and how many classes to expect."""
        labels = self._labels(first)
        outputs = []

        def run() -> None:
            with torch.no_grad():
                outputs.append(forward(self._model, first.rows(0, 1)))

        self._hooked = find_hooks(self._model, self._reads, run)
        logits = logits_of(outputs[0])
        self._on_tokens = self._loss is None and logits is not None and logits.ndim == 3
        named = int(labels.max()) + 1 if self._comparing else 1
        return max(named, logits.shape[1]) if logits is not None and logits.ndim == 2 else named

    def step(self, batch: Batch, half: int, meters: Meters) -> None:
        """Show one batch to all meters."""
        step = Step(batch.predicted_tokens() if self._on_tokens else batch.size, half)
        labels = self._labels(batch)
        gates: list[tuple[Read, Tensor, int]] = []
        shown: set[Read] = set()

        def visit(read: Read, source: Tensor, axis: int) -> Tensor:
            # A weight that is called several times is observed at its first call, at once: later the tensor may have been changed in place.
            if read in self._observed and read not in shown:
                shown.add(read)
                _show(read, source.detach(), axis, labels, batch, meters)
            if "gates" not in self.needs:
                return source
            # A view of its own: its gradient comes through this consumer alone.
            gate = source.view_as(source) if source.requires_grad else source.detach().requires_grad_()
            gates.append((read, gate, axis))
            return gate

        if self._backward or self._observed:
            with torch.set_grad_enabled(self._backward), watching(self._reads, visit, self._hooked):
                output = forward(self._model, batch)
        if self._backward:
            gradients, of_gates = self._gradients(mean_loss(self._loss, output, batch), [gate for _, gate, _ in gates], batch)
            terms = _gate_terms(gates, of_gates, batch.size, step)
            for _, meter in meters:
                meter.see_gradients(gradients, step)
                meter.see_gates(terms, step)
        if "deletions" in self.needs:
            change = self._loss_changes(batch)
            for _, meter in meters:
                meter.see_deletions(change, step)

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


def _show(read: Read, source: Tensor, axis: int, labels: Tensor, batch: Batch, meters: Meters) -> None:
    with torch.autocast(source.device.type, enabled=False):  # the model may run in low precision, the signals do not
        for pooled, some in groupby(sorted(meters, key=_pools), key=_pools):
            activation, own = _seen(read, source, axis, labels, batch, pooled=pooled)
            # The sum is quick and shows nearly every flaw; only if it looks bad are all values examined.
            if not torch.isfinite(activation.sum()) and not torch.isfinite(activation).all():
                raise FairprunerError(
                    f"Space {read.space.name!r} has NaN or infinite activations in batch {batch.position}: look at that batch and at the weights before {read.part.tensor}."
                )
            for name, meter in some:
                with _blaming(name, read.space):
                    meter.see_activation(read.space, activation, own)


def _pools(named: tuple[str, Meter]) -> bool:
    return named[1].pools_tokens


def _seen(read: Read, source: Tensor, axis: int, labels: Tensor, batch: Batch, *, pooled: bool) -> tuple[Tensor, Tensor]:
    """What a signal is shown, [N, J, F], and the labels: of texts, each real token is a sample, or if `pooled` their mean; padding is never seen."""
    real = real_tokens(batch.inputs, read.part.tensor)
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
def thawed(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Frozen parameters get gradients inside, and are frozen again afterwards."""
    frozen = [p for p in parameters if not p.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
