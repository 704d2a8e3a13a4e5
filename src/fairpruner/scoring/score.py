"""Score: one pass over the data gives every unit its removal and protection numbers, for all signals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fairpruner.core.arrays import Floats
from fairpruner.core.scores import Scores
from fairpruner.core.spaces import Spaces
from fairpruner.inputs.batches import Batch, in_halves, read_batches
from fairpruner.inputs.losses import Loss
from fairpruner.inputs.workers import naming_dead_workers
from fairpruner.models.attention import plain_attention
from fairpruner.models.calling import evaluating
from fairpruner.models.devices import device_of_model
from fairpruner.models.supported import check_has_numbers
from fairpruner.scoring.feeding import RunningSignal
from fairpruner.scoring.gradients import only_gradients_of
from fairpruner.scoring.noise import warn_of_noise
from fairpruner.scoring.objective import Objective
from fairpruner.scoring.preparing import class_groups, prepare, spaces_of, with_first
from fairpruner.scoring.processes import Processes
from fairpruner.scoring.signals.base import Context, Result, Side
from fairpruner.scoring.signals.selection import Asked, ByKind, Selection, parse_signals
from fairpruner.terminal import progress

Results = Mapping[Side, Mapping[str, Result]]  # side -> name of the selection -> its result


@naming_dead_workers()
def score(
    model: nn.Module,
    data: Iterable[Any],
    *,
    spaces: Spaces | None = None,
    loss: Loss | str | None = None,
    removal: Asked | None = None,
    protection: Asked | None = None,
    groups: int | None = None,
    seed: int = 0,
) -> Scores:
    """Give every unit a removal number (the paper's U-Score) and a protection number (its R-Score).

    The model is not changed. `data` yields batches: (input, label), dicts, or inputs without labels. The
    labels show the task, and the task decides on the loss and the signals; `scores.settings["why"]` names
    them and the reason. `loss(output, label)`, a mean over the batch, replaces the loss. `loss="regression"`,
    or another of fp.signals.TASKS, names the task. `removal` and `protection` name one signal or several, of
    which the first is active. A mapping from kinds of spaces, such as {"head": "activation", "expert":
    "reap"}, counts as one signal. `groups` compares groups of similar classes instead of single classes. If
    `torchrun` started several processes, give each the same data: they divide the batches among them, and all
    return the same scores.

    >>> from fairpruner.discovery import discover
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> data = [(torch.randn(16, 4), torch.arange(16) % 2) for _ in range(2)]
    >>> scores = score(net, data, spaces=discover(net, torch.zeros(1, 4)))
    >>> scores.samples, scores.active, scores.removal["0"].shape
    (32, ('wasserstein', 'taylor'), (8,))
    """
    asked: dict[Side, tuple[ByKind, ...] | None] = {
        "removal": parse_signals("removal", removal),
        "protection": parse_signals("protection", protection),
    }
    check_has_numbers(model)
    # Loaders draw from the random state too, so reading the data is part of what is undone.
    with torch.inference_mode(False), torch.enable_grad(), evaluating(model):
        device = device_of_model(model)
        processes = Processes.current(device)
        grouping = None if groups is None else class_groups(model, data, device, groups=groups, seed=seed)
        first, batches = with_first(read_batches(data, device, model))
        spaces = spaces_of(model, spaces, first)
        objective = Objective.of(model, first, loss, seed)
        spaces, selections, calibration = prepare(
            model, spaces, first, asked=asked, objective=objective, grouping=grouping
        )
        classes = calibration.classes if groups is None else groups
        rereadable = not isinstance(data, Iterator)
        running = {
            side: _started(of_side, Context(model, spaces, side, classes, seed, rereadable))
            for side, of_side in selections.items()
        }
        signals = [one for of_side in running.values() for one in of_side]
        with (
            objective.mode(model),
            plain_attention(model),
            only_gradients_of(model, calibration.weights),
        ):
            with progress("scoring", data) as advance:
                shown = processes.share(batches) if calibration.needs_data else iter(())
                samples = _pass(calibration.step, shown, signals, advance)
            if processes.size > 1:
                samples = sum(processes.gathered(samples))
            asking = _asking(signals, processes, rereadable)
            while asking:
                with progress("scoring, once more", data) as advance:
                    again = processes.share(read_batches(data, device, model))
                    _pass(calibration.show_activations, again, asking, advance)
                asking = _asking(asking, processes, rereadable)
        with torch.autocast(device.type, enabled=False):
            results = {side: _results(of_side) for side, of_side in running.items()}
    settings: dict[str, Any] = {
        "seed": seed,
        "groups": groups,
        "loss": objective.name,
        "task": objective.task,
    }
    if None in asked.values():
        settings["why"] = objective.sentence(*(list(results[side]) for side in results))
    scores = _scores(spaces, results, samples, settings)
    warn_of_noise(scores)
    return scores


def _pass(
    show: Callable[[Batch, int, Sequence[RunningSignal]], None],
    batches: Iterator[Batch],
    signals: Sequence[RunningSignal],
    advance: Callable[[int], None],
) -> int:
    """Show every batch to the signals; the number of samples."""
    samples = 0
    for half, batch in in_halves(batches):
        show(batch, half, signals)
        samples += batch.size
        advance(batch.size)
    return samples


def _asking(signals: Sequence[RunningSignal], processes: Processes, rereadable: bool) -> list[RunningSignal]:
    """Join what all processes showed these signals in a pass: those that ask for one more."""
    if processes.size > 1:
        for one in signals:
            one.accumulator.join(processes)
    return [one for one in signals if rereadable and one.accumulator.asks_again()]


def _started(selections: Sequence[Selection], context: Context) -> list[RunningSignal]:
    """Start the signals of all selections, each on the spaces of its kinds."""
    started = []
    for selection in selections:
        for signal in selection.signals:
            kinds = selection.kinds_of(signal)
            accumulator = signal.start(replace(context, spaces=context.spaces.only(kinds)))
            started.append(RunningSignal(selection.name, signal, kinds, accumulator))
    return started


def _results(signals: Sequence[RunningSignal]) -> dict[str, Result]:
    """The result of every selection: those of its signals, merged."""
    found: dict[str, Result] = {}
    for running in signals:
        result, before = running.accumulator.result(), found.get(running.selection, Result({}))
        found[running.selection] = Result(
            {**before.scores, **result.scores},
            {**before.halves, **result.halves},
            {**before.settings, **result.settings},
        )
    return found


def _scores(spaces: Spaces, results: Results, samples: int, settings: Mapping[str, Any]) -> Scores:
    """The results of all signals as one value, with the settings of the call and of each signal."""
    values: dict[Side, dict[str, Mapping[str, Floats]]] = {
        side: {name: result.scores for name, result in of_side.items()} for side, of_side in results.items()
    }
    by_name = {name: result for of_side in results.values() for name, result in of_side.items()}
    halves = {name: result.halves for name, result in by_name.items() if result.halves}
    of_signals = {name: dict(result.settings) for name, result in by_name.items() if result.settings}
    return Scores(
        spaces, values["removal"], values["protection"], samples, halves, {**settings, **of_signals}
    )
