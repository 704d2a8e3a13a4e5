"""The one calibration pass: each batch goes forward and backward once, and every signal sees what it
asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fairpruner.core.spaces import Kind, Spaces, UnitSpace
from fairpruner.errors import FairprunerError
from fairpruner.inputs.batches import Batch, Loss, forward, logits_of, mean_loss, token_losses
from fairpruner.inputs.tokens import counted_tokens, real_tokens
from fairpruner.models.calling import describe
from fairpruner.models.experts import expert_blocks, expert_lists
from fairpruner.models.observing import NotObservable, Read, find_hooks, observed_parts, reads_of, watching
from fairpruner.models.routing import RouterOutput, gates_of, loss_position_terms, slopes_of, watching_experts
from fairpruner.models.silencing import without_expert
from fairpruner.scoring.samples import RunningSignal, gate_terms, rows_along, show, show_experts
from fairpruner.scoring.signals.base import BatchInfo, Observation
from fairpruner.scoring.signals.classes import ClassGroups
from fairpruner.scoring.signals.selection import Selection


class Calibration:
    """The forward and backward that all signals share."""

    def __init__(
        self,
        model: nn.Module,
        spaces: Spaces,
        loss: Loss | None,
        selections: Sequence[Selection],
        grouping: ClassGroups | None,
    ) -> None:
        self._model, self._loss, self._grouping = model, loss, grouping
        kinds: dict[Observation, set[Kind]] = {}  # of the spaces on which each need arises
        for selection in selections:
            for kind, signal in selection.by_kind.items():
                for need in signal.needs:
                    kinds.setdefault(need, set()).add(kind)

        def needing(*needs: Observation) -> list[UnitSpace]:
            return [space for space in spaces if any(space.kind in kinds.get(need, ()) for need in needs)]

        self.needs = frozenset(kinds)
        self._backward = bool(self.needs & {"gradients", "gates", "routed_gradients"})
        self._comparing = [
            signal.name for selection in selections for signal in selection.signals if signal.compares_classes
        ]
        self._on_tokens = False  # the loss is a mean over tokens, not over samples
        watched: tuple[Observation, ...] = ("activations", "gates", "deletions")
        blocks = expert_blocks(model)
        lists = expert_lists(model)
        self._reads = reads_of(
            model, needing(*watched), observed_only=not self.needs & {"gates", "deletions"}, lists=lists
        )
        observing = needing("activations")
        self._observed = {
            read
            for read in self._reads
            if read.space in observing and read.part in observed_parts(read.space, lists)
        }
        self._hooked: dict[Read, nn.Module] = {}
        routed = {space.name for space in needing("routing", "routed_gradients", "routed_losses")}
        holders = {
            read.expert[0] if read.expert else read.part.tensor.rpartition(".")[0] for read in self._reads
        }  # of hidden units inside experts, too
        self._blocks = tuple(block for block in blocks if block.name in routed or block.experts in holders)
        self._fused = tuple(block for block in self._blocks if block.experts not in lists)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        owned = {part.tensor for space in needing("gradients", "gates") for part in space.slices}
        self.weights = {name: p for name, p in parameters.items() if name in owned and p.is_floating_point()}

    def look(self, first: Batch) -> int:
        """Run one sample to learn which weights can be seen reading, and how many classes to expect."""
        labels = self._labels(first)
        outputs = []

        calls: list[RouterOutput] = []

        def run() -> None:
            with (
                torch.set_grad_enabled(bool(self._blocks)),
                watching_experts(self._model, self._blocks, calls.append),
            ):
                outputs.append(forward(self._model, first.rows(0, 1)))

        self._hooked = find_hooks(self._model, self._reads, run)
        logits = logits_of(outputs[0])
        self._on_tokens = self._loss is None and logits is not None and logits.ndim == 3
        self._check_routing(calls)
        named = int(labels.max()) + 1 if self._comparing else 1
        return max(named, logits.shape[1]) if logits is not None and logits.ndim == 2 else named

    def spaces_at(self, name: str) -> set[str]:
        """The spaces that cannot be scored if what has this name, a space or a block of experts, is not
        seen.
        """
        experts = tuple(f"{block.experts}." for block in self._blocks if block.name == name)
        return {name, *(read.space.name for read in self._reads if read.part.tensor.startswith(experts))}

    def step(self, batch: Batch, half: int, parts: Sequence[RunningSignal]) -> None:
        """Show one batch to all accumulators."""
        info = BatchInfo(batch.predicted_tokens() if self._on_tokens else batch.size, half)
        labels = self._labels(batch)
        gates: list[tuple[Read, Tensor, int]] = []
        calls: list[RouterOutput] = []
        shown: set[Read] = set()
        parted: dict[
            Read, list[Tensor]
        ] = {}  # what listed experts read, each of tokens of its own: [rows, C] of every call

        def visit(read: Read, source: Tensor, axis: int) -> Tensor:
            # A weight that is called several times is observed at its first call, at once: later the
            # tensor
            # may have been changed in place.
            if read in self._observed and read.expert:
                parted.setdefault(read, []).append(rows_along(source.detach(), axis).clone())
            elif read in self._observed and read not in shown:
                shown.add(read)
                show(read, source.detach(), axis, labels, batch, parts)
            if "gates" not in self.needs:
                return source
            # A view of its own: its gradient comes through this consumer alone.
            gate = source.view_as(source) if source.requires_grad else source.detach().requires_grad_()
            gates.append((read, gate, axis))
            return gate

        if self._backward or self._observed or self._blocks:
            routing = watching_experts(self._model, self._blocks, calls.append)
            with (
                torch.set_grad_enabled(self._backward or bool(self._blocks)),
                watching(self._reads, visit, self._hooked),
                routing,
            ):
                output = forward(self._model, batch)
            tallies = self._tallies(calls, output, batch)
            show_experts(parted, calls, labels, batch, parts)
        if self._backward:
            followed = calls if "routed_gradients" in self.needs else []
            watched = [*(gate for _, gate, _ in gates), *gates_of(followed)]
            gradients, found = self._gradients(mean_loss(self._loss, output, batch), watched, batch)
            terms = gate_terms(gates, found[: len(gates)], calls, batch, info)
            for part in parts:
                part.accumulator.see_gradients(gradients, info)
                part.accumulator.see_gates(terms, info)
            for call, slopes in zip(followed, slopes_of(followed, found[len(gates) :]), strict=True):
                # The gradient is that of the mean loss: times the samples, it is the sum over them.
                _add(
                    tallies[call.block.name],
                    "weighted_term",
                    call.by_expert(slopes * call.weight) * info.samples,
                )
        if self._blocks:
            for part in parts:
                part.accumulator.see_routing(tallies, info)
        if "deletions" in self.needs:
            change = self._loss_changes(batch)
            for part in parts:
                part.accumulator.see_deletions(change, info)

    def _check_routing(self, calls: Sequence[RouterOutput]) -> None:
        """Refuse experts whose calls were not understood, or whose parameters cannot all be followed."""
        exact = {call.block.name: bool(call.gates) for call in calls}
        for block in self._blocks:
            experts = self._model.get_submodule(block.experts)
            if block.name not in exact:
                raise NotObservable(
                    block.name,
                    f"Block {block.name!r} calls its {type(experts).__name__} in a way that is not known, so"
                    f" its routing cannot be seen: leave it out with skip={block.name!r} in discover, or"
                    " score experts with removal='l2' and protection='deletion'.",
                )
            if not exact[block.name] and self.needs & {"routed_gradients", "routed_losses"}:
                raise FairprunerError(
                    f"The experts of block {block.name!r} hold parameters outside of linear and norm modules,"
                    " so routed_taylor cannot follow them: give another protection signal for experts, such"
                    " as 'deletion'."
                )
        if "routed_losses" in self.needs and not self._on_tokens:
            raise FairprunerError(
                "Signal 'routed_taylor_exact' needs the loss of every token, which only the default loss of a"
                " language model has: use protection='routed_taylor'."
            )

    def _tallies(
        self, calls: Sequence[RouterOutput], output: Any, batch: Batch
    ) -> dict[str, dict[str, Tensor]]:
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
                f"Signal {self._comparing[0]!r} compares classes, and batch {batch.position} has none: its"
                f" labels are {describe(batch.labels)}. Give each sample a class, or choose a removal signal"
                " without: activation, reconstruction, l2."
            )
        return batch.class_labels() if self._comparing else batch.labels

    def _gradients(
        self, loss: Tensor, gates: Sequence[Tensor], batch: Batch
    ) -> tuple[dict[str, Tensor], list[Tensor | None]]:
        """Gradients of the mean loss by parameter and for the gates; no `.grad` is touched."""
        if not loss.requires_grad:
            raise FairprunerError(
                "The loss has no gradient: compute it from the model's output with torch functions, without"
                " detach or item."
            )
        weights = self.weights if "gradients" in self.needs else {}
        try:
            found = torch.autograd.grad(loss, [*weights.values(), *gates], allow_unused=True)
        except RuntimeError as error:
            raise FairprunerError(f"The backward pass failed on batch {batch.position}: {error}") from error
        named = zip(weights, found[: len(weights)], strict=True)
        return {name: gradient for name, gradient in named if gradient is not None}, list(
            found[len(weights) :]
        )

    def _loss_changes(self, batch: Batch) -> Callable[[UnitSpace, int], float]:
        def loss_without(space: UnitSpace | None, unit: int) -> float:
            def visit(read: Read, source: Tensor, axis: int) -> Tensor:
                if read.space is not space:
                    return source
                kept = torch.from_numpy(read.owner(source.shape[axis]) != unit).to(source)  # [C]
                return (source.movedim(axis, -1) * kept).movedim(-1, axis)

            with ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                stack.enter_context(watching(self._reads, visit, self._hooked))
                stack.enter_context(
                    watching_experts(self._model, self._fused, lambda call: None)
                )  # shows what fused experts read
                if space is not None and space.kind == "expert":
                    stack.enter_context(without_expert(self._model, space, unit))
                return float(mean_loss(self._loss, forward(self._model, batch), batch))

        whole = loss_without(None, -1)
        return lambda space, unit: loss_without(space, unit) - whole


def _add(sums: dict[str, Tensor], quantity: str, total: Tensor) -> None:
    sums[quantity] = sums[quantity] + total if quantity in sums else total


@contextmanager
def learning(model: nn.Module, weights: Collection[nn.Parameter]) -> Iterator[None]:
    """Only these weights get gradients inside, so that nothing is kept for those of the others;
    afterwards all are as they were.
    """
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise FairprunerError(
            f"The {type(model).__name__} was made under torch.inference_mode, so that no gradient can pass:"
            " make it outside, or give copy.deepcopy(model)."
        )
    wanted = {id(weight) for weight in weights}
    changed = [
        parameter for parameter in model.parameters() if parameter.requires_grad != (id(parameter) in wanted)
    ]
    try:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)
