"""Signals from their start to the scores of all spaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fairpruner.core.arrays import Floats
from fairpruner.core.scores import Scores
from fairpruner.core.spaces import Spaces
from fairpruner.scoring.feeding import RunningSignal
from fairpruner.scoring.objective import Objective
from fairpruner.scoring.processes import Processes
from fairpruner.scoring.signals.base import Context, Result, Side
from fairpruner.scoring.signals.selection import Selection

Results = Mapping[Side, Mapping[str, Result]]  # side -> name of the selection -> its result


def start_signals(selections: Sequence[Selection], context: Context) -> list[RunningSignal]:
    """Start the signals of all selections, each on the spaces of its kinds."""
    started = []
    for selection in selections:
        for signal in selection.signals:
            kinds = selection.kinds_of(signal)
            own, whole = context.spaces.only(kinds), context.all_spaces.only(kinds)
            accumulator = signal.start(replace(context, spaces=own, whole=whole))
            started.append(RunningSignal(selection.name, signal, kinds, accumulator))
    return started


def asking_again(
    signals: Sequence[RunningSignal], processes: Processes, rereadable: bool
) -> list[RunningSignal]:
    """Join what all processes showed these signals in a pass: those that ask for one more."""
    if processes.size > 1:
        for one in signals:
            one.accumulator.join(processes)
    return [one for one in signals if rereadable and one.accumulator.asks_again()]


def results_of(signals: Sequence[RunningSignal]) -> dict[str, Result]:
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


def scores_of(spaces: Spaces, results: Results, samples: int, settings: Mapping[str, Any]) -> Scores:
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


def settings_of(objective: Objective, seed: int, chosen: Results | None) -> dict[str, Any]:
    """How scores were made; with `chosen`, the results of signals that the caller did not name, also why."""
    settings: dict[str, Any] = {"seed": seed, "groups": None, "loss": objective.name, "task": objective.task}
    if chosen is not None:
        settings["why"] = objective.sentence(*(list(chosen[side]) for side in chosen))
    return settings
