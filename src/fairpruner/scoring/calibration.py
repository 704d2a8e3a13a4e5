"""The one calibration pass: one forward and one backward pass for each batch serve all signals.

The walk of a batch through `Calibration.step`:

1. Forward, with two observers. Observed weights hand what they read to the signals at once, and every block
   of routed experts reports a `RouterOutput`.
2. Backward from the mean loss, if a signal needs gradients: those of the parameters ("gradients"), of what
   weights read ("gates"), and of the gates inside experts ("routed_gradients").
3. The routing tallies of the batch go to the signals that score experts.
4. For "deletions" the batch runs forward once more for every unit, without that unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from fairpruner.core.spaces import Spaces
from fairpruner.inputs.batches import Batch
from fairpruner.models.observing import watching
from fairpruner.models.reads import Read
from fairpruner.models.routing import RouterOutput, gates_of, watching_experts
from fairpruner.models.visibility import find_visibility
from fairpruner.scoring.deletions import loss_changes
from fairpruner.scoring.demand import Demand, Watched
from fairpruner.scoring.feeding import RunningSignal, SignalFeed
from fairpruner.scoring.gates import GateInput, gate_terms
from fairpruner.scoring.gradients import gradients_of, only_gradients_of
from fairpruner.scoring.labels import SignalLabels
from fairpruner.scoring.objective import Objective
from fairpruner.scoring.residual import showing_block_slopes, showing_blocks
from fairpruner.scoring.routed import (
    Tallies,
    add_exact_terms,
    add_weighted_terms,
    check_signals,
    not_shown,
    tallies_of,
)
from fairpruner.scoring.samples import rows_along
from fairpruner.scoring.signals.base import BatchInfo
from fairpruner.scoring.signals.classes import ClassGroups
from fairpruner.scoring.signals.selection import Selection

LOOKED_AT = 2  # samples of the first batch that show how the model can be observed


@dataclass(frozen=True, eq=False)
class _ForwardPass:
    """The result of one forward pass, besides the activations that the signals have already seen."""

    output: Any
    feed: SignalFeed
    gates: list[GateInput]
    routing: list[RouterOutput]


class Calibration:
    """The forward and backward pass that all signals share; call `look` once, then `step` on each batch."""

    def __init__(
        self,
        model: nn.Module,
        spaces: Spaces,
        selections: Sequence[Selection],
        *,
        objective: Objective,
        grouping: ClassGroups | None,
    ) -> None:
        self._model, self._objective = model, objective
        self._demand = Demand(spaces, selections)
        self._watched = Watched.of(model, self._demand)
        self._labels = SignalLabels(objective, grouping, self._demand.comparing)
        # `look` finds both of these:
        self._hooked: dict[Read, nn.Module] = {}  # reads that are seen only as inputs of a module
        self.classes = 1  # how many to expect

    @property
    def weights(self) -> list[nn.Parameter]:
        """The parameters that must require gradients during `step`."""
        return list(self._watched.weights.values())

    @property
    def needs_data(self) -> bool:
        return self._demand.needs_data

    def look(self, first: Batch) -> dict[str, str]:
        """Run two samples to learn what can be observed: the spaces that cannot, each with the reason."""
        few = first.rows(0, LOOKED_AT)
        labels = self._labels.of(first)
        if self._demand.needs_backward and self._objective.uses_class_labels:
            first.class_labels()  # refuses labels of a wrong form before anything is computed
        output: Any = None
        routing: list[RouterOutput] = []
        problems: dict[str, str] = {}  # block -> why its routing cannot be observed

        def run() -> None:
            nonlocal output
            routing.clear()
            with (
                only_gradients_of(self._model, self.weights),
                torch.set_grad_enabled(bool(self._watched.blocks)),
                watching_experts(
                    self._model,
                    self._watched.blocks,
                    routing.append,
                    on_problem=lambda problem: problems.update({problem.name: str(problem)}),
                ),
            ):
                output = self._objective.run(self._model, few)

        # A weight may read any number of rows if no signal asks which sample a row belongs to. The box heads
        # of a detector do so.
        by_sample = bool(self._demand.comparing) or self._demand.any_of("gates")
        visibility = find_visibility(self._model, self._watched.reads, few.size if by_sample else 1, run)
        self._hooked = dict(visibility.hooked)
        self.classes = self._labels.classes(labels, output)
        check_signals(self._demand, routing, on_tokens=self._objective.on_tokens)
        shown = {router_output.block.name for router_output in routing}
        for block in self._watched.blocks:
            if block.name not in shown:
                problems.setdefault(block.name, not_shown(self._model, block))
        hidden = dict(visibility.hidden)
        for name, problem in problems.items():
            hidden |= dict.fromkeys(self._watched.spaces_of(name), problem)
        return hidden

    def step(self, batch: Batch, half: int, signals: Sequence[RunningSignal]) -> None:
        """Show one batch to all signals."""
        info = self._info(batch, half)
        residual = self._demand.any_of("blocks")
        if self._demand.needs_backward or self._watched.observed or self._watched.blocks or residual:
            observed = self._forward(batch, signals, info)
            tallies = tallies_of(observed.routing, self._watched.blocks, batch)
            if self._demand.any_of("routed_losses"):
                add_exact_terms(tallies, observed.routing, observed.output, batch)
            if self._demand.needs_backward:
                self._backward(observed, tallies, batch, info=info, signals=signals)
            if self._watched.blocks:
                for running in signals:
                    running.accumulator.see_routing(tallies, info)
        if self._demand.any_of("deletions"):
            changes = loss_changes(
                self._model, self._watched, self._hooked, objective=self._objective, batch=batch
            )
            for running in signals:
                running.accumulator.see_deletions(changes, info)

    def show_again(self, batch: Batch, half: int, signals: Sequence[RunningSignal]) -> None:
        """Show the activations of one batch, and slopes if one needs them, to signals that asked for it."""
        info = self._info(batch, half)
        observed = self._forward(batch, signals, info)
        if any("slopes" in running.signal.needs for running in signals):
            tallies = tallies_of(observed.routing, self._watched.blocks, batch)
            self._backward(observed, tallies, batch, info=info, signals=signals)

    def _info(self, batch: Batch, half: int) -> BatchInfo:
        return BatchInfo(self._objective.count(batch), half)

    def _forward(self, batch: Batch, signals: Sequence[RunningSignal], info: BatchInfo) -> _ForwardPass:
        """Run the model on a batch and show the activations to the signals."""
        torch.clear_autocast_cache()  # torch 2.7 keeps copies of weights that were cast without gradients
        feed = SignalFeed(batch, self._labels.of(batch), signals)
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
                feed.activation(read, source.detach(), axis)
            if not self._demand.any_of("gates", "slopes"):
                return source
            gate = source.view_as(source) if source.requires_grad else source.detach().requires_grad_()
            gates.append(GateInput(read, gate, axis))
            return gate

        with (
            torch.set_grad_enabled(self._demand.needs_backward or bool(self._watched.blocks)),
            watching(self._watched.reads, visit, self._hooked),
            watching_experts(self._model, self._watched.blocks, routing.append),
            showing_blocks(self._model, self._demand.spaces("blocks"), feed, info),
            showing_block_slopes(self._model, self._demand.spaces("slopes"), feed, info),
        ):
            output = self._objective.run(self._model, batch)
        feed.expert_activations(expert_inputs, routing)
        return _ForwardPass(output, feed, gates, routing)

    def _backward(
        self,
        observed: _ForwardPass,
        tallies: Tallies,
        batch: Batch,
        *,
        info: BatchInfo,
        signals: Sequence[RunningSignal],
    ) -> None:
        """One backward pass from the mean loss, for parameters, gates of weights and gates of experts."""
        weights = self._watched.weights if self._demand.any_of("gradients") else {}
        gates = [gate.tensor for gate in observed.gates]
        routing = observed.routing if self._demand.any_of("routed_gradients") else []

        loss = self._objective.mean(observed.output, batch)
        inside, entered = gates_of(routing), self._objective.entered(self._model)
        found = iter(gradients_of(loss, [*weights.values(), *gates, *inside, *entered], batch))
        of_weights, of_gates, of_experts, of_entered = (
            list(islice(found, len(wanted))) for wanted in (weights, gates, inside, entered)
        )
        self._objective.receive(of_entered)

        gradients = {
            name: gradient for name, gradient in zip(weights, of_weights, strict=True) if gradient is not None
        }
        if self._demand.any_of("slopes"):
            for gate, slope in zip(observed.gates, of_gates, strict=True):
                if slope is not None and gate.read in self._watched.observed:
                    observed.feed.slope(gate.read, slope * info.samples, gate.axis, info)
        terms = gate_terms(observed.gates, of_gates, observed.routing, batch=batch, scale=info.samples)
        for running in signals:
            running.accumulator.see_gradients(gradients, info)
            running.accumulator.see_gates(terms, info)
        add_weighted_terms(tallies, routing, of_experts, samples=info.samples)
