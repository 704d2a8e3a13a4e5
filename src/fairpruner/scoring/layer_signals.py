"""Signals on one layer of a streamed model: the calibration pass of a whole model, with the layer's part of
the loss.

On the way back the loss of a layer is the product of its output with the gradient that came down to it. Its
derivatives are those of the whole model's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from fairpruner.core.spaces import Spaces
from fairpruner.core.units import UnitSpace
from fairpruner.inputs.batches import Batch, forward
from fairpruner.inputs.streamed import ORIGINAL
from fairpruner.inputs.walking import Walk, stage
from fairpruner.models.calling import in_eval_mode
from fairpruner.models.layer_calls import CALLS, LayerModel
from fairpruner.scoring.calibration import Calibration
from fairpruner.scoring.gradients import only_gradients_of
from fairpruner.scoring.layer_results import RESULT, Selections, keep_results
from fairpruner.scoring.objective import Objective
from fairpruner.scoring.preparing import distinct
from fairpruner.scoring.processes import Processes
from fairpruner.scoring.running import asking_again, results_of, start_signals
from fairpruner.scoring.signals.base import Context

FEW = 0  # the index of the batch of two samples that `look` runs first


@dataclass(frozen=True, eq=False)
class ScoringJob:
    """What the passes over all layers share."""

    walk: Walk
    spaces: Spaces
    selections: Selections
    objective: Objective
    halves: Sequence[int]  # of the data that the batches after the first few samples belong to
    processes: Processes

    def layer_of(self, space: UnitSpace) -> int:
        """The layer that holds a space."""
        layer = self.walk.streamed.layer_of(space.slices[0].tensor)
        assert layer is not None  # `score_streamed` has refused others
        return layer

    def spaces_of(self, layer: int) -> Spaces:
        """The spaces of one layer."""
        others = [space.name for space in self.spaces if self.layer_of(space) != layer]
        return self.spaces.without(dict.fromkeys(others, "in another layer"))


@dataclass
class PassedOn:
    """What comes out of a layer and down to it in one batch."""

    output: Tensor | None = None  # of the layer, [N, T, H]
    slope: Tensor | None = None  # the gradient of the loss for that output; None on the way forward
    below: Tensor | None = None  # the gradient of the loss for the stream that the layer read


@dataclass(frozen=True, eq=False)
class LayerObjective(Objective):
    """An objective as one layer sees it."""

    passed: PassedOn = field(default_factory=PassedOn)

    def run(self, model: nn.Module, batch: Batch) -> Any:
        self.passed.output = forward(model, batch)
        return self.passed.output

    def mean(self, output: Any, batch: Batch) -> Tensor:
        assert self.passed.slope is not None  # there is no mean on the way forward
        product: Tensor = (output * self.passed.slope).sum()
        return product

    def entered(self, model: nn.Module) -> Sequence[Tensor]:
        assert isinstance(model, LayerModel)
        assert model.entered is not None  # `run` comes first
        return [model.entered] if model.entered.requires_grad else []

    def receive(self, gradients: Sequence[Tensor | None]) -> None:
        self.passed.below = gradients[0] if gradients else None


class LayerSignals:
    """The signals of one layer, from their start to their results."""

    def __init__(self, job: ScoringJob, layer: int, *, lowest: int) -> None:
        """Read the layer, and look at a few samples; no gradient goes below the layer `lowest`."""
        self._job, self._layer, self._goes_on = job, layer, layer > lowest
        self._model = job.walk.streamed.layer(layer)
        shared = {f.name: getattr(job.objective, f.name) for f in fields(Objective)}
        self._objective = LayerObjective(**shared)
        spaces = job.spaces_of(layer)
        self._calibration, hidden = self._look(spaces)
        self._hidden = {name: hidden[name] for name in spaces.names if name in hidden}
        if self._hidden:
            spaces = spaces.without(self._hidden)
            self._calibration, _ = self._look(spaces)
        context = Context(
            self._model, spaces, "removal", self._calibration.classes, job.objective.seed, True, job.spaces
        )
        self._running = {
            side: start_signals(chosen, replace(context, side=side))
            for side, chosen in job.selections.items()
        }
        self._signals = [one for of_side in self._running.values() for one in of_side]

    def _look(self, spaces: Spaces) -> tuple[Calibration, dict[str, str]]:
        """The calibration of the layer, and the spaces that it cannot observe."""
        signals = distinct(self._job.selections)
        calibration = Calibration(self._model, spaces, signals, objective=self._objective, grouping=None)
        with in_eval_mode(self._model), torch.enable_grad():
            return calibration, calibration.look(self._batch(FEW)) if len(spaces) else {}

    def _batch(self, index: int) -> Batch:
        return self._job.walk.batch(index, self._layer, [ORIGINAL])

    def forward(self, index: int) -> Tensor:
        """Show one batch to the signals on the way forward: what the layer returns."""
        batch, passed = self._batch(index), self._objective.passed
        passed.output = None
        if index != FEW:
            self._step(batch, index)
        # No signal may look at this layer.
        output: Tensor = forward(self._model, batch) if passed.output is None else passed.output
        return output

    def backward(self, index: int, slope: Tensor) -> Tensor:
        """Show one batch to the signals on the way back: the gradient of the loss for what the layer reads.

        `slope` is the gradient for what it returns. The result is empty if no layer below needs it.
        """
        batch, passed = self._batch(index), self._objective.passed
        passed.slope, passed.below = slope, None
        batch.inputs[CALLS][ORIGINAL].stream.requires_grad_(self._goes_on)
        self._step(batch, index)
        return slope.new_zeros(0) if passed.below is None else passed.below

    def _step(self, batch: Batch, index: int) -> None:
        with self._observed():
            self._calibration.step(batch, self._job.halves[index - 1], self._signals)

    @contextmanager
    def _observed(self) -> Iterator[None]:
        with (
            in_eval_mode(self._model),
            torch.enable_grad(),
            only_gradients_of(self._model, self._calibration.weights),
        ):
            yield

    def finish(self, above: Callable[[int], Tensor] | None = None) -> None:
        """Show batches again to signals that ask for it, and keep the results.

        `above` gives the gradient for what the layer returns in a batch, if gradients are needed.
        """
        asking = asking_again(self._signals, self._job.processes, rereadable=True)
        while asking:
            for index, half in enumerate(self._job.halves, start=1):
                self._objective.passed.slope = None if above is None else above(index)
                with self._observed():
                    self._calibration.show_again(self._batch(index), half, asking)
            asking = asking_again(asking, self._job.processes, rereadable=True)
        results = {side: results_of(of_side) for side, of_side in self._running.items()}
        keep_results(self._job.walk.folder, stage(RESULT, self._layer), results, self._hidden)
