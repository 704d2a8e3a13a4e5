"""Score a model that is larger than memory: the same signals, with one layer in memory at a time.

1. Forward, layer by layer. The stream that each layer reads is kept on disk.
2. The loss, from what the last layer returned, and its gradient there.
3. Backward, from the last layer to the first. Each layer is read again and runs once more on its stream, in
   the same calibration pass as a whole model. Signals start and end with their layer.

If no signal needs a gradient, signals see the layers on the way forward, and there is no way back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fairpruner.core.scores import Scores
from fairpruner.core.sealed import Json
from fairpruner.core.spaces import Spaces
from fairpruner.errors import FairprunerError
from fairpruner.inputs.batches import Batch, in_halves, read_batches, with_first
from fairpruner.inputs.losses import Loss
from fairpruner.inputs.streamed import ORIGINAL, Streamed
from fairpruner.inputs.walking import Disk, walking
from fairpruner.scoring.calibration import LOOKED_AT
from fairpruner.scoring.demand import Demand
from fairpruner.scoring.layer_passes import score_backward, score_forward
from fairpruner.scoring.layer_results import Selections, merged_results
from fairpruner.scoring.layer_signals import ScoringJob
from fairpruner.scoring.objective import Objective
from fairpruner.scoring.preparing import distinct, spaces_of, wanted_signals, without_hidden
from fairpruner.scoring.processes import Processes
from fairpruner.scoring.running import scores_of, settings_of
from fairpruner.scoring.signals.base import Observation, Side
from fairpruner.scoring.signals.selection import ByKind, select_signals

# What signals cannot be shown layer by layer, with the reason.
REFUSED: dict[Observation, str] = {
    "deletions": "runs the whole model once for each unit",
    "routed_losses": "takes a backward pass through the whole model for every position",
    "blocks": "compares blocks of all layers",
}


def score_streamed(
    streamed: Streamed,
    data: Iterable[Any],
    spaces: Spaces | None,
    *,
    loss: Loss | str | None,
    asked: Mapping[Side, Sequence[ByKind] | None],
    seed: int,
) -> Scores:
    """`score` for a model in a folder, of which one layer at a time is in memory."""
    device = torch.device("cpu")
    processes = Processes.current(device)
    first, batches = with_first(read_batches(data, device, streamed.model))
    spaces = spaces_of(streamed, spaces, first)
    _check_layers(streamed, spaces)
    objective = _objective(streamed, first.rows(0, LOOKED_AT), loss, seed)
    wanted = wanted_signals(asked, objective)
    selections: Selections = {side: select_signals(side, signals, spaces) for side, signals in wanted.items()}
    demand = Demand(spaces, distinct(selections))
    for need, reason in REFUSED.items():
        if demand.any_of(need):
            raise FairprunerError(
                f"A signal that {reason} cannot be computed with --stream: choose another signal."
            )
    halved = list(in_halves(processes.share(batches))) if demand.needs_data else []
    walked = [first.rows(0, LOOKED_AT), *(batch for _, batch in halved)]
    job: Json = {
        "job": "score",
        "signals": {side: [selection.name for selection in chosen] for side, chosen in selections.items()},
        "spaces": spaces.to_json(),
        "settings": settings_of(objective, seed, None),
        "processes": [processes.rank, processes.size],
    }
    backward = demand.needs_backward
    streams, passes = (streamed.count + 3, 2) if backward else (2, 1)
    with walking(streamed, walked, job, disk=Disk(streams), passes=passes, process=processes.rank) as walk:
        walk.start(ORIGINAL)
        halves = [half for half, _ in halved]
        scoring = ScoringJob(walk, spaces, selections, objective, halves, processes)
        (score_backward if backward else score_forward)(scoring)
        results, hidden = merged_results(walk.folder, selections)
    samples = sum(processes.gathered(sum(batch.size for _, batch in halved)))
    spaces = without_hidden(spaces, hidden) if hidden else spaces
    settings = settings_of(objective, seed, results if None in asked.values() else None)
    return scores_of(spaces, results, samples, settings)


def _check_layers(streamed: Streamed, spaces: Spaces) -> None:
    for space in spaces:
        layers = {streamed.layer_of(part.tensor) for part in space.slices}
        if len(layers) != 1 or None in layers:
            raise FairprunerError(
                f"Space {space.name!r} lies in several layers, and --stream has one layer in memory: leave it"
                f" out with skip={space.name!r} in discover."
            )


def _objective(streamed: Streamed, few: Batch, loss: Loss | str | None, seed: int) -> Objective:
    """The objective that a few samples show; for that, only the form of the model's output matters."""
    shell = streamed.shell()
    with torch.no_grad():
        stream = shell.calls(few.inputs)[0].stream
    with shell.ending_in(stream):
        return Objective.of(shell.model, few, loss, seed)
