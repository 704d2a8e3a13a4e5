"""The one calibration pass: each batch goes forward and backward once, and every signal sees what it needs.

The walk of a batch through `Calibration.step`:

1. Forward, with two observers. Observed weights hand what they read to the signals at once, and every block
   of routed experts reports a `RouterOutput`.
2. Backward from the mean loss, if a signal needs gradients: those of the parameters ("gradients"), of what
   weights read ("gates"), and of the gates inside experts ("routed_gradients").
3. The routing tallies of the batch go to the signals that score experts.
4. For "deletions" the batch runs forward once more for every unit, without that unit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fairpruner.core.spaces import Spaces
from fairpruner.core.units import Kind, UnitSpace
from fairpruner.errors import FairprunerError
from fairpruner.inputs.batches import Batch
from fairpruner.inputs.losses import logits_of, pixel_labels, token_losses
from fairpruner.inputs.tokens import counted_tokens
from fairpruner.models.calling import describe
from fairpruner.models.experts import ExpertBlock, expert_blocks, expert_lists
from fairpruner.models.observing import (
    Read,
    find_visibility,
    observed_parts,
    reads_of,
    watching,
)
from fairpruner.models.routing import (
    RouterOutput,
    gates_of,
    loss_position_terms,
    slopes_of,
    watching_experts,
)
from fairpruner.models.silencing import without_expert
from fairpruner.scoring.objective import Objective
from fairpruner.scoring.samples import GateInput, RunningSignal, Showing, gate_terms, rows_along
from fairpruner.scoring.signals.base import BatchInfo, Observation
from fairpruner.scoring.signals.classes import ClassGroups
from fairpruner.scoring.signals.selection import Selection

Tallies = dict[str, dict[str, Tensor]]  # block -> quantity -> its sum over the batch's tokens, [E]

LOOKED_AT = 2  # samples of the first batch that show how the model can be observed


class _Demand:
    """Which observations the selected signals need, and on which spaces."""

    def __init__(self, spaces: Spaces, selections: Sequence[Selection]) -> None:
        self._spaces = spaces
        self._kinds: dict[Observation, set[Kind]] = {}
        for selection in selections:
            for kind, signal in selection.by_kind.items():
                for need in signal.needs:
                    self._kinds.setdefault(need, set()).add(kind)

    def any_of(self, *observations: Observation) -> bool:
        return any(observation in self._kinds for observation in observations)

    def spaces(self, *observations: Observation) -> list[UnitSpace]:
        """The spaces on which a signal needs one of the observations."""
        kinds = set().union(*(self._kinds.get(observation, set()) for observation in observations))
        return [space for space in self._spaces if space.kind in kinds]


@dataclass(frozen=True, eq=False)
class _Watched:
    """The parts of the model that are observed."""

    reads: tuple[Read, ...]
    observed: frozenset[Read]  # those that activation signals see; the others only serve gates and deletions
    blocks: tuple[ExpertBlock, ...]
    fused: tuple[ExpertBlock, ...]  # those of the blocks whose experts are stacks of matrices

    @staticmethod
    def of(model: nn.Module, demand: _Demand) -> _Watched:
        lists = expert_lists(model)
        reads = reads_of(
            model,
            demand.spaces("activations", "gates", "deletions"),
            observed_only=not demand.any_of("gates", "deletions"),
            lists=lists,
        )
        for_activations = demand.spaces("activations")
        observed = frozenset(
            read
            for read in reads
            if read.space in for_activations and read.part in observed_parts(read.space, lists)
        )
        routed = {space.name for space in demand.spaces("routing", "routed_gradients", "routed_losses")}
        # Hidden units inside experts are observed through the routing of their block, too.
        holders = {read.expert[0] if read.expert else read.part.tensor.rpartition(".")[0] for read in reads}
        blocks = tuple(
            block for block in expert_blocks(model) if block.name in routed or block.experts in holders
        )
        return _Watched(reads, observed, blocks, tuple(b for b in blocks if b.experts not in lists))

    def spaces_of(self, name: str) -> set[str]:
        """The spaces that depend on the space or block of experts of this name."""
        experts = tuple(f"{block.experts}." for block in self.blocks if block.name == name)
        return {name, *(read.space.name for read in self.reads if read.part.tensor.startswith(experts))}


@dataclass(frozen=True, eq=False)
class _Observed:
    """What one forward pass showed, besides the activations that the signals have already seen."""

    output: Any
    gates: list[GateInput]
    routing: list[RouterOutput]


class Calibration:
    """The forward and backward pass that all signals share."""

    def __init__(
        self,
        model: nn.Module,
        spaces: Spaces,
        selections: Sequence[Selection],
        *,
        objective: Objective,
        grouping: ClassGroups | None,
    ) -> None:
        self._model, self._objective, self._grouping = model, objective, grouping
        self._demand = _Demand(spaces, selections)
        self._watched = _Watched.of(model, self._demand)
        self._comparing = [
            signal.name for selection in selections for signal in selection.signals if signal.compares_classes
        ]
        owned = {part.tensor for space in self._demand.spaces("gradients", "gates") for part in space.slices}
        self.weights = {
            name: parameter
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if name in owned and parameter.is_floating_point()
        }
        self._hooked: dict[Read, nn.Module] = {}
        self.classes = 1  # how many to expect

    @property
    def needs_data(self) -> bool:
        return self._demand.any_of(
            "activations", "gradients", "gates", "deletions", "routing", "routed_gradients", "routed_losses"
        )

    @property
    def _needs_backward(self) -> bool:
        return self._demand.any_of("gradients", "gates", "routed_gradients")

    def look(self, first: Batch) -> dict[str, str]:
        """Run two samples to learn what can be observed: the spaces that cannot, each with the reason."""
        few = first.rows(0, LOOKED_AT)
        labels = self._labels(first)
        if self._needs_backward and self._objective.task == "classification" and not self._objective.loss:
            first.class_labels()  # refuses labels of a wrong form before anything is computed
        model_outputs: list[Any] = []
        routing: list[RouterOutput] = []
        problems: dict[str, str] = {}

        def run() -> None:
            routing.clear()
            with (
                learning(self._model, self.weights.values()),
                torch.set_grad_enabled(bool(self._watched.blocks)),
                watching_experts(
                    self._model,
                    self._watched.blocks,
                    routing.append,
                    on_problem=lambda problem: problems.update({problem.name: str(problem)}),
                ),
            ):
                model_outputs.append(self._objective.run(self._model, few))

        # Where nothing depends on whose sample it is, a weight may read any number of rows, as the box heads
        # of a detector do.
        whose = bool(self._comparing) or self._demand.any_of("gates")
        visibility = find_visibility(self._model, self._watched.reads, few.size if whose else 1, run)
        self._hooked = dict(visibility.hooked)
        logits = logits_of(model_outputs[-1])
        self._check_routing(routing, problems)
        self.classes = int(labels.max()) + 1 if self._comparing and labels is not None else 1
        if self._comparing and logits is not None and logits.ndim in (2, 4):
            self.classes = max(self.classes, logits.shape[1])
        hidden = dict(visibility.hidden)
        for name, problem in problems.items():
            hidden |= dict.fromkeys(self._watched.spaces_of(name), problem)
        return hidden

    def _check_routing(self, routing: Sequence[RouterOutput], problems: dict[str, str]) -> None:
        """Add the blocks whose routing was not shown to the problems; refuse signals that cannot follow."""
        shown = {output.block.name: bool(output.gates) for output in routing}
        for block in self._watched.blocks:
            if block.name not in shown:
                experts = type(self._model.get_submodule(block.experts)).__name__
                problems.setdefault(
                    block.name,
                    f"Block {block.name!r} calls its {experts} in a way that is not known, so its routing"
                    f" cannot be observed: leave it out with skip={block.name!r} in discover, or score"
                    " experts with removal='l2' and protection='deletion'.",
                )
            elif not shown[block.name] and self._demand.any_of("routed_gradients", "routed_losses"):
                raise FairprunerError(
                    f"The experts of block {block.name!r} hold parameters outside of linear and norm modules,"
                    " so routed_taylor cannot follow them: give another protection signal for experts, such"
                    " as 'deletion'."
                )
        if self._demand.any_of("routed_losses") and not self._objective.on_tokens:
            raise FairprunerError(
                "Signal 'routed_taylor_exact' needs the loss of every token, which only the default loss of a"
                " language model has: use protection='routed_taylor'."
            )

    def step(self, batch: Batch, half: int, signals: Sequence[RunningSignal]) -> None:
        """Show one batch to all signals."""
        info = BatchInfo(batch.predicted_tokens() if self._objective.on_tokens else batch.size, half)
        backward = self._needs_backward
        if backward or self._watched.observed or self._watched.blocks:
            observed = self._forward(batch, signals, with_graph=backward or bool(self._watched.blocks))
            tallies = self._tallies(observed, batch)
            if backward:
                self._backward(observed, tallies, batch, info=info, signals=signals)
            if self._watched.blocks:
                for running in signals:
                    running.accumulator.see_routing(tallies, info)
        if self._demand.any_of("deletions"):
            loss_change = self._loss_changes(batch)
            for running in signals:
                running.accumulator.see_deletions(loss_change, info)

    def _forward(self, batch: Batch, signals: Sequence[RunningSignal], *, with_graph: bool) -> _Observed:
        """Run the model on a batch and show the activations to the signals."""
        showing = Showing(batch, self._labels(batch), signals)
        gates: list[GateInput] = []
        routing: list[RouterOutput] = []
        expert_inputs: dict[Read, list[Tensor]] = {}  # [rows, C] of every call of an expert in a list
        shown: set[Read] = set()

        def visit(read: Read, source: Tensor, axis: int) -> Tensor:
            if read in self._watched.observed and read.expert:
                # Which samples the rows belong to is known only after the block has run.
                expert_inputs.setdefault(read, []).append(rows_along(source.detach(), axis).clone())
            elif read in self._watched.observed and read not in shown:
                # A weight that is called several times is observed at its first call. It is shown at once,
                # because the model may change the tensor in place later.
                shown.add(read)
                showing.activation(read, source.detach(), axis)
            if not self._demand.any_of("gates"):
                return source
            gate = source.view_as(source) if source.requires_grad else source.detach().requires_grad_()
            gates.append(GateInput(read, gate, axis))
            return gate

        with (
            torch.set_grad_enabled(with_graph),
            watching(self._watched.reads, visit, self._hooked),
            watching_experts(self._model, self._watched.blocks, routing.append),
        ):
            output = self._objective.run(self._model, batch)
        showing.expert_activations(expert_inputs, routing)
        return _Observed(output, gates, routing)

    def _backward(
        self,
        observed: _Observed,
        tallies: Tallies,
        batch: Batch,
        *,
        info: BatchInfo,
        signals: Sequence[RunningSignal],
    ) -> None:
        """One backward pass from the mean loss, for parameters, gates of weights and gates of experts."""
        routing = observed.routing if self._demand.any_of("routed_gradients") else []
        loss = self._objective.mean(observed.output, batch)
        weights = self.weights if self._demand.any_of("gradients") else {}
        gates = [gate.tensor for gate in observed.gates]
        found = _gradients(loss, [*weights.values(), *gates, *gates_of(routing)], batch)
        of_weights, rest = found[: len(weights)], found[len(weights) :]
        of_gates, of_experts = rest[: len(gates)], rest[len(gates) :]
        gradients = {
            name: gradient for name, gradient in zip(weights, of_weights, strict=True) if gradient is not None
        }
        terms = gate_terms(observed.gates, of_gates, observed.routing, batch=batch, scale=info.samples)
        for running in signals:
            running.accumulator.see_gradients(gradients, info)
            running.accumulator.see_gates(terms, info)
        for output, slopes in zip(routing, slopes_of(routing, of_experts), strict=True):
            # The gradient is that of the mean loss: times the samples, it is the sum over them.
            total = output.by_expert(slopes * output.weight) * info.samples
            _add(tallies[output.block.name], "weighted_term", total)

    def _tallies(self, observed: _Observed, batch: Batch) -> Tallies:
        """The sums over the tokens of a batch, for each expert of each block."""
        tallies: Tallies = {}
        exact: Sequence[Tensor] = ()
        if self._demand.any_of("routed_losses"):
            losses = token_losses(observed.output, batch)
            assert losses is not None  # the first batch has shown that the default loss is one of tokens
            exact = loss_position_terms(observed.routing, losses)
        for position, output in enumerate(observed.routing):
            counted = counted_tokens(batch.inputs, batch.labels, output.block.name)
            if counted is None or counted.numel() != output.tokens:
                counted = torch.ones(output.tokens, dtype=torch.bool)
            sums = tallies.setdefault(output.block.name, {})
            for quantity, total in output.tally(counted.reshape(-1)).items():
                _add(sums, quantity, total)
            if exact:
                _add(sums, "exact_term", exact[position])
        for block in self._watched.blocks:
            if block.name not in tallies:
                raise FairprunerError(
                    f"Block {block.name!r} was not called in batch {batch.position}, so its experts cannot be"
                    f" scored: give inputs that use it, or leave it out with skip={block.name!r}."
                )
        return tallies

    def _labels(self, batch: Batch) -> Tensor | None:
        """The labels that signals see: classes, groups or maps of classes, or what the data has."""
        if self._grouping is not None:
            return self._grouping(batch.class_labels())
        if not self._comparing:
            return batch.labels if isinstance(batch.labels, Tensor) else None
        if self._objective.task == "segmentation":
            return pixel_labels(batch.labels)
        if not self._objective.has_classes:
            found = "none" if batch.labels is None else describe(batch.labels)
            raise FairprunerError(
                f"Signal {self._comparing[0]!r} compares classes, and batch {batch.position} has none: its"
                f" labels are {found}. Use a removal signal that needs no classes (activation,"
                " reconstruction, l2), for example removal='activation', or give a class for each sample."
            )
        return batch.class_labels()

    def _loss_changes(self, batch: Batch) -> Callable[[UnitSpace, int], float]:
        """A function (space, unit) -> the change of the mean loss without that unit."""

        def loss_without(space: UnitSpace | None, unit: int) -> float:
            def visit(read: Read, source: Tensor, axis: int) -> Tensor:
                if read.space is not space:
                    return source
                kept = torch.from_numpy(read.owner(source.shape[axis]) != unit).to(source)  # [C]
                return (source.movedim(axis, -1) * kept).movedim(-1, axis)

            with ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                stack.enter_context(watching(self._watched.reads, visit, self._hooked))
                # Run by our function, fused experts show what their last matrices read.
                stack.enter_context(watching_experts(self._model, self._watched.fused, lambda output: None))
                if space is not None and space.kind == "expert":
                    stack.enter_context(without_expert(self._model, space, unit))
                return float(self._objective.mean(self._objective.run(self._model, batch), batch))

        whole = loss_without(None, -1)
        return lambda space, unit: loss_without(space, unit) - whole


def _gradients(loss: Tensor, inputs: Sequence[Tensor], batch: Batch) -> Sequence[Tensor | None]:
    """The gradient of the loss for each input, None where there is none; no `.grad` is touched."""
    if not loss.requires_grad:
        raise FairprunerError(
            "The loss has no gradient: compute it from the model's output with torch functions, without"
            " detach or item."
        )
    try:
        return torch.autograd.grad(loss, inputs, allow_unused=True)
    except RuntimeError as error:
        raise FairprunerError(f"The backward pass failed on batch {batch.position}: {error}") from error


def _add(sums: dict[str, Tensor], quantity: str, total: Tensor) -> None:
    sums[quantity] = sums[quantity] + total if quantity in sums else total


@contextmanager
def learning(model: nn.Module, weights: Collection[nn.Parameter]) -> Iterator[None]:
    """Inside, only these weights get gradients, which saves the memory for the others; afterwards every
    `requires_grad` is as before.
    """
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise FairprunerError(
            f"The {type(model).__name__} was made under torch.inference_mode, so it cannot have gradients:"
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
