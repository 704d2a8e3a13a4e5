"""Score: one pass over the data gives every unit its removal and protection numbers, for all signals."""

from __future__ import annotations

import itertools
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fairpruner.core.arrays import Floats
from fairpruner.core.correlation import spearman
from fairpruner.core.scores import Scores
from fairpruner.core.spaces import Spaces
from fairpruner.discovery import discover
from fairpruner.errors import FairprunerError, FairprunerWarning
from fairpruner.inputs.batches import (
    Batch,
    check_rereadable,
    forward,
    in_halves,
    no_samples,
    read_batches,
)
from fairpruner.inputs.losses import Loss
from fairpruner.inputs.tokens import real_tokens
from fairpruner.inputs.workers import naming_dead_workers
from fairpruner.models.attention import plain_attention
from fairpruner.models.calling import evaluating
from fairpruner.models.devices import device_of_model
from fairpruner.models.features import LastInput
from fairpruner.models.fingerprint import check_same_model
from fairpruner.models.reads import NotObservable
from fairpruner.models.supported import check_has_numbers
from fairpruner.scoring.calibration import Calibration
from fairpruner.scoring.gradients import only_gradients_of
from fairpruner.scoring.objective import Objective
from fairpruner.scoring.processes import Processes
from fairpruner.scoring.samples import RunningSignal
from fairpruner.scoring.signals.base import Context, Result, Side
from fairpruner.scoring.signals.classes import ClassGroups, group_classes
from fairpruner.scoring.signals.selection import (
    Asked,
    ByKind,
    Selection,
    default_signals,
    parse_signals,
    select_signals,
)
from fairpruner.terminal import progress

# Below these rank correlations between two halves of the data, the ranks of experts are noise. 60 experts
# reach them with about 50,000 tokens (benchmarks/routing.py).
STABLE: dict[Side, float] = {"removal": 0.9, "protection": 0.4}
MORE = "Give more tokens, of all kinds of text that matter; 100,000 are a good start."
CALLER = 4  # stacklevel of the code that called `score`, in a function that `score` calls

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
        grouping = None if groups is None else _group(model, data, device, groups=groups, seed=seed)
        first, batches = _with_first(read_batches(data, device, model))
        spaces = _spaces(model, spaces, first)
        objective = Objective.of(model, first, loss, seed)
        wanted = {side: signals or (_default(side, objective),) for side, signals in asked.items()}
        spaces, chosen, calibration = _prepared(
            model, spaces, first, wanted=wanted, objective=objective, grouping=grouping
        )
        classes = calibration.classes if groups is None else groups
        running = {
            side: _started(selections, Context(model, spaces, side, classes, seed))
            for side, selections in chosen.items()
        }
        signals = [one for of_side in running.values() for one in of_side]
        with (
            objective.mode(model),
            plain_attention(model),
            only_gradients_of(model, calibration.weights),
            progress("scoring", data) as advance,
        ):
            samples = _pass(calibration, processes.share(batches), signals, advance)
        if processes.size > 1:
            samples = sum(processes.gathered(samples))
            for one in signals:
                one.accumulator.join(processes)
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
    _warn_of_noise(scores)
    return scores


def _with_first(batches: Iterator[Batch]) -> tuple[Batch, Iterator[Batch]]:
    """The first batch, and all batches from the first on."""
    first = next(batches, None)
    if first is None:
        raise no_samples()
    return first, itertools.chain([first], batches)


def _default(side: Side, objective: Objective) -> ByKind:
    return default_signals(side, classes=objective.has_classes, drawn=objective.draws_labels)


def _prepared(
    model: nn.Module,
    spaces: Spaces,
    first: Batch,
    *,
    wanted: Mapping[Side, Sequence[ByKind]],
    objective: Objective,
    grouping: ClassGroups | None,
) -> tuple[Spaces, dict[Side, tuple[Selection, ...]], Calibration]:
    """The spaces that can be observed, as the first batch shows, with their signals and the calibration."""

    def prepare(spaces: Spaces) -> tuple[dict[Side, tuple[Selection, ...]], Calibration, dict[str, str]]:
        chosen = {side: select_signals(side, signals, spaces) for side, signals in wanted.items()}
        calibration = Calibration(model, spaces, _distinct(chosen), objective=objective, grouping=grouping)
        with objective.mode(model), plain_attention(model):
            return chosen, calibration, calibration.look(first)

    chosen, calibration, hidden = prepare(spaces)
    if hidden:
        spaces = _without_hidden(spaces, hidden)
        chosen, calibration, _ = prepare(spaces)
    return spaces, chosen, calibration


def _pass(
    calibration: Calibration,
    batches: Iterator[Batch],
    signals: Sequence[RunningSignal],
    advance: Callable[[int], None],
) -> int:
    """Show every batch to the signals; the number of samples."""
    samples = 0
    if calibration.needs_data:
        for half, batch in in_halves(batches):
            calibration.step(batch, half, signals)
            samples += batch.size
            advance(batch.size)
    return samples


def _without_hidden(spaces: Spaces, hidden: Mapping[str, str]) -> Spaces:
    """The spaces that can be observed, with a warning that names the others; an error if none is left."""
    gone = {name: reason for name, reason in hidden.items() if name in spaces.names}
    reasons = list(dict.fromkeys(gone.values()))
    if len(gone) == len(spaces):
        raise NotObservable(next(iter(gone)), reasons[0])
    for reason in reasons:
        names = sorted(name for name in gone if gone[name] == reason)
        warnings.warn(
            f"Left out of the scores: {', '.join(names)}. {reason}", FairprunerWarning, stacklevel=CALLER + 1
        )
    return spaces.without(gone)


def _distinct(chosen: Mapping[Side, Sequence[Selection]]) -> list[Selection]:
    """The selections of both sides, refused if two that see data share a name.

    The scores of the two halves of the data are stored under the name alone, without the side.
    """
    selections = [selection for of_side in chosen.values() for selection in of_side]
    names = [selection.name for selection in selections if any(signal.needs for signal in selection.signals)]
    if len(set(names)) != len(names):
        raise FairprunerError(
            f"A removal and a protection signal share a name, found {sorted(names)}: rename one."
        )
    return selections


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


def _spaces(model: nn.Module, spaces: Spaces | None, first: Batch) -> Spaces:
    """The given spaces, checked to be this model's, or those that discovery finds from the first sample."""
    if spaces is None:
        spaces = discover(model, first.rows(0, 1).inputs)
    check_same_model(model, spaces.fingerprint, "The spaces belong", step="Discover them again.")
    if not len(spaces):
        raise FairprunerError(
            f"There is nothing to score in {type(model).__name__}: no spaces were given, and"
            f" {len(spaces.left_out)} were left out."
        )
    return spaces


def _group(
    model: nn.Module, data: Iterable[Any], device: torch.device, *, groups: int, seed: int
) -> ClassGroups:
    """Cluster the classes by their mean penultimate features, in a forward pass of its own."""
    check_rereadable(data, f"groups={groups} reads it twice")

    def features() -> Iterator[tuple[Tensor, Tensor]]:
        with progress("grouping classes", data) as advance, torch.no_grad():
            for batch in read_batches(data, device, model):
                with LastInput() as last:
                    forward(model, batch)
                advance(batch.size)
                yield last.features(batch.size, real_tokens(batch.inputs)), batch.class_labels()

    return group_classes(features(), groups, seed)


def _warn_of_noise(scores: Scores) -> None:
    """Warn if two halves of the data rank the experts too differently.

    Experts that are used rarely need many tokens.
    """
    if scores.samples == 1 and any(space.kind == "expert" for space in scores.spaces):
        warnings.warn(
            f"One sample cannot rank experts: no second one shows how far the ranks vary. {MORE}",
            FairprunerWarning,
            stacklevel=CALLER,
        )
    for (side, expected), signal in zip(STABLE.items(), scores.active, strict=True):
        halves = scores.halves.get(signal, {})
        agreement = [
            spearman(*halves[space.name]) or 0.0
            for space in scores.spaces
            if space.kind == "expert" and space.name in halves
        ]
        if agreement and (found := statistics.median(agreement)) < expected:
            warnings.warn(
                f"The {scores.samples:,} samples are too few to rank experts for {side} by {signal!r}:"
                f" between two halves of them the ranks correlate by {found:.2f}, expected at least"
                f" {expected}. {MORE}",
                FairprunerWarning,
                stacklevel=CALLER,
            )


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
