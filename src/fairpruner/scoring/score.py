"""Score: one pass over the data gives every unit its removal and protection numbers, for all signals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fairpruner.core.scores import Scores
from fairpruner.core.spaces import Spaces
from fairpruner.errors import FairprunerError, check_whole_number
from fairpruner.inputs.batches import Batch, check_same_samples, in_halves, read_batches, with_first
from fairpruner.inputs.losses import Loss
from fairpruner.inputs.streamed import Streamed
from fairpruner.inputs.workers import naming_dead_workers
from fairpruner.models.attention import plain_attention
from fairpruner.models.calling import evaluating
from fairpruner.models.devices import device_of_model
from fairpruner.models.precision import without_autocast
from fairpruner.models.supported import check_has_numbers
from fairpruner.scoring.calibration import Calibration
from fairpruner.scoring.feeding import RunningSignal
from fairpruner.scoring.gradients import only_gradients_of
from fairpruner.scoring.noise import warn_of_noise
from fairpruner.scoring.objective import Objective
from fairpruner.scoring.preparing import class_groups, prepare, spaces_of
from fairpruner.scoring.processes import Processes
from fairpruner.scoring.running import asking_again, results_of, scores_of, settings_of, start_signals
from fairpruner.scoring.signals.base import Context, Side
from fairpruner.scoring.signals.selection import Asked, ByKind, parse_signals
from fairpruner.scoring.streamed import score_streamed
from fairpruner.terminal.progress import progress


@naming_dead_workers()
def score(
    model: nn.Module | Streamed,
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
    check_whole_number("seed", seed, at_least=0)
    if groups is not None:
        check_whole_number("groups", groups)
    asked: dict[Side, tuple[ByKind, ...] | None] = {
        "removal": parse_signals("removal", removal),
        "protection": parse_signals("protection", protection),
    }
    if isinstance(model, Streamed):
        if groups is not None:
            raise FairprunerError(
                "groups= looks at the whole model, which --stream does not load: leave it out."
            )
        scores = score_streamed(model, data, spaces, loss=loss, asked=asked, seed=seed)
        warn_of_noise(scores)
        return scores
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
            side: start_signals(of_side, Context(model, spaces, side, classes, seed, rereadable))
            for side, of_side in selections.items()
        }
        signals = [one for of_side in running.values() for one in of_side]
        with (
            objective.mode(model),
            plain_attention(model),
            only_gradients_of(model, calibration.weights),
        ):
            samples = _passes(
                calibration,
                signals,
                data,
                processes=processes,
                first=batches,
                read=lambda: read_batches(data, device, model),
            )
        with without_autocast(device):
            results = {side: results_of(of_side) for side, of_side in running.items()}
    settings = settings_of(objective, seed, results if None in asked.values() else None)
    scores = scores_of(spaces, results, samples, {**settings, "groups": groups})
    warn_of_noise(scores)
    return scores


def _passes(
    calibration: Calibration,
    signals: Sequence[RunningSignal],
    data: Iterable[Any],
    *,
    processes: Processes,
    first: Iterator[Batch],
    read: Callable[[], Iterator[Batch]],
) -> int:
    """Show the data to all signals, and again to those that ask for it; the number of samples."""
    rereadable = not isinstance(data, Iterator)
    with progress("scoring", data) as advance:
        batches = processes.share(first) if calibration.needs_data else iter(())
        own = _pass(calibration.step, batches, signals, advance)
    samples = sum(processes.gathered(own))
    asking = asking_again(signals, processes, rereadable)
    while asking:
        with progress("scoring, once more", data) as advance:
            again = _pass(calibration.show_again, processes.share(read()), asking, advance)
        check_same_samples(own, again)
        asking = asking_again(asking, processes, rereadable)
    return samples


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
