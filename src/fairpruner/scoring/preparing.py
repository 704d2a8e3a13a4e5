"""What `score` prepares before it reads all data: spaces, signals, groups of classes, the calibration."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairpruner.core.plan import Plan
from fairpruner.core.spaces import Spaces
from fairpruner.discovery import discover
from fairpruner.errors import FairprunerError, FairprunerWarning
from fairpruner.inputs.batches import Batch, check_rereadable, forward, read_batches
from fairpruner.inputs.streamed import Streamed
from fairpruner.inputs.tokens import real_tokens
from fairpruner.models.attention import plain_attention
from fairpruner.models.calling import describe
from fairpruner.models.features import LastInput
from fairpruner.models.fingerprint import check_same_model
from fairpruner.models.fitting import check_fits
from fairpruner.models.reads import NotObservable
from fairpruner.scoring.calibration import Calibration
from fairpruner.scoring.objective import Objective
from fairpruner.scoring.signals.base import Side
from fairpruner.scoring.signals.classes import ClassGroups, group_classes
from fairpruner.scoring.signals.selection import ByKind, Selection, default_signals, select_signals
from fairpruner.terminal.progress import progress

CALLER = 5  # stacklevel of the code that called `score`, in `without_hidden`


def spaces_of(model: nn.Module | Streamed, spaces: Spaces | None, first: Batch) -> Spaces:
    """The given spaces, checked to be this model's, or those that discovery finds from the first sample."""
    if spaces is None:
        spaces = discover(model, first.rows(0, 1).inputs)
    if not isinstance(spaces, Spaces):
        raise FairprunerError(f"spaces is {describe(spaces)}, expected what discover returned.")
    model = model.model if isinstance(model, Streamed) else model
    check_same_model(model, spaces.fingerprint, "The spaces belong", step="Discover them again.")
    if spaces.from_file:
        check_fits(model, Plan.removing(spaces, {}))
    if not len(spaces):
        raise FairprunerError(
            f"There is nothing to score in {type(model).__name__}: the spaces are empty, and"
            f" {len(spaces.left_out)} were left out. spaces.left_out has the reasons."
        )
    return spaces


def class_groups(
    model: nn.Module, data: Iterable[Any], device: torch.device, *, groups: int, seed: int
) -> ClassGroups:
    """Cluster the classes by their mean penultimate features, in a separate forward pass."""
    check_rereadable(data, f"groups={groups} reads it twice")

    def features() -> Iterator[tuple[Tensor, Tensor]]:
        with progress("grouping classes", data) as advance, torch.no_grad():
            for batch in read_batches(data, device, model):
                with LastInput() as last:
                    forward(model, batch)
                advance(batch.size)
                yield last.features(batch.size, real_tokens(batch.inputs)), batch.class_labels()

    return group_classes(features(), groups, seed)


class Prepared(NamedTuple):
    """The spaces that can be observed, the signals of each side, and their calibration."""

    spaces: Spaces
    selections: dict[Side, tuple[Selection, ...]]
    calibration: Calibration


def prepare(
    model: nn.Module,
    spaces: Spaces,
    first: Batch,
    *,
    asked: Mapping[Side, Sequence[ByKind] | None],
    objective: Objective,
    grouping: ClassGroups | None,
) -> Prepared:
    """Look at the first batch, and leave out the spaces that cannot be observed, with a warning.

    `asked` holds the signals that the caller named; None is the default for this objective.
    """
    wanted = wanted_signals(asked, objective)

    def attempt(spaces: Spaces) -> tuple[dict[Side, tuple[Selection, ...]], Calibration, dict[str, str]]:
        chosen = {side: select_signals(side, signals, spaces) for side, signals in wanted.items()}
        calibration = Calibration(model, spaces, distinct(chosen), objective=objective, grouping=grouping)
        with objective.mode(model), plain_attention(model):
            return chosen, calibration, calibration.look(first)

    chosen, calibration, hidden = attempt(spaces)
    if hidden:
        spaces = without_hidden(spaces, hidden)
        chosen, calibration, _ = attempt(spaces)
    return Prepared(spaces, chosen, calibration)


def wanted_signals(
    asked: Mapping[Side, Sequence[ByKind] | None], objective: Objective
) -> dict[Side, Sequence[ByKind]]:
    """The signals that the caller named, or the default for this objective."""
    return {
        side: signals or (default_signals(side, classes=objective.has_classes, drawn=objective.draws_labels),)
        for side, signals in asked.items()
    }


def without_hidden(spaces: Spaces, hidden: Mapping[str, str]) -> Spaces:
    """The spaces that can be observed, with a warning that names the others; an error if none is left."""
    gone = {name: reason for name, reason in hidden.items() if name in spaces.names}
    reasons = list(dict.fromkeys(gone.values()))
    if len(gone) == len(spaces):
        raise NotObservable(next(iter(gone)), reasons[0])
    for reason in reasons:
        names = sorted(name for name in gone if gone[name] == reason)
        warnings.warn(
            f"Left out of the scores: {', '.join(names)}. {reason}", FairprunerWarning, stacklevel=CALLER
        )
    return spaces.without(gone)


def distinct(chosen: Mapping[Side, Sequence[Selection]]) -> list[Selection]:
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
