"""Score: spaces + calibration data -> removal and protection numbers, in one forward and backward over
the data for all signals.
"""

from __future__ import annotations

import itertools
import statistics
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from fairpruner.core.arrays import Floats
from fairpruner.core.correlation import spearman
from fairpruner.core.scores import Scores
from fairpruner.core.spaces import Spaces
from fairpruner.discovery import discover
from fairpruner.errors import FairprunerError, FairprunerWarning
from fairpruner.inputs.batches import Batch, Loss, forward, in_halves, read_batches
from fairpruner.inputs.tokens import real_tokens
from fairpruner.models.calling import evaluating
from fairpruner.models.fingerprint import check_same_model
from fairpruner.models.observing import LastInput, NotObservable
from fairpruner.models.supported import check_has_numbers
from fairpruner.scoring.calibration import Calibration, learning
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

# Rank correlations of two halves of the data, below which the ranks of experts are noise; about 50,000
# tokens
# for 60 experts (benchmarks/routing.py).
STABLE: dict[Side, float] = {"removal": 0.9, "protection": 0.4}
MORE = "Give more tokens, of all kinds of text that matter; 100,000 are a good start."

Results = Mapping[Side, Mapping[str, Result]]  # side -> what was asked for -> its outcome


def score(
    model: nn.Module,
    data: Iterable[Any],
    *,
    spaces: Spaces | None = None,
    loss: Loss | None = None,
    removal: Asked | None = None,
    protection: Asked | None = None,
    groups: int | None = None,
    seed: int = 0,
) -> Scores:
    """Give every unit a removal number (the paper's U-Score) and a protection number (its R-Score); the
    model stays as it is.

    `data` yields batches: (input, label) or dicts. `loss(output, label)` is a mean over the batch,
    cross-entropy on the logits by default. `removal` and `protection` name one signal or several, of
    which the first is active; a mapping such as {"head": "activation", "expert": "reap"} is one, and left
    out, each kind of space has its own. `groups` compares groups of similar classes in place of single
    classes. Started in several processes, each given the same data, they share the batches out and all
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
        job = _Pass(model, data, asked, loss, groups, seed, Processes.current())
        spaces, results, samples = job.over(spaces)
    loss_name = "cross_entropy" if loss is None else getattr(loss, "__name__", type(loss).__name__)
    scores = _scores(spaces, results, samples, {"seed": seed, "groups": groups, "loss": loss_name})
    _warn_of_noise(scores)
    return scores


@dataclass(frozen=True, eq=False)
class _Pass:
    """One pass over the data, and all that it needs besides the spaces to score."""

    model: nn.Module
    data: Iterable[Any]
    asked: Mapping[Side, tuple[ByKind, ...] | None]
    loss: Loss | None
    groups: int | None
    seed: int
    processes: Processes

    def over(self, spaces: Spaces | None) -> tuple[Spaces, Results, int]:
        """The spaces scored, the outcome of every signal, and the number of samples; what signals cannot
        look at is left out with a warning.
        """
        device = next(itertools.chain(self.model.parameters(), self.model.buffers()), torch.empty(0)).device
        grouping = (
            _group(self.model, self.data, device, self.groups, self.seed) if self.groups is not None else None
        )
        while True:
            batches = read_batches(self.data, device)
            first = next(batches, None)
            if first is None:
                raise FairprunerError(
                    "The data holds no samples: give a loader, or a list of batches, that yields at least"
                    " one."
                )
            spaces = _spaces(self.model, spaces, first)
            chosen = {
                side: select_signals(side, wanted or (default_signals(side, first.has_classes),), spaces)
                for side, wanted in self.asked.items()
            }
            calibration = Calibration(self.model, spaces, self.loss, _distinct(chosen), grouping)
            try:
                return spaces, *self._readings(calibration, chosen, spaces, first, batches)
            except NotObservable as unseen:
                left = calibration.spaces_at(unseen.name).intersection(spaces.names)
                if (
                    len(left) in (0, len(spaces))
                    or isinstance(self.data, Iterator)
                    or self.processes.size > 1
                ):  # nothing would be left, or no second try
                    raise
                warnings.warn(
                    f"Left out of the scores: {', '.join(sorted(left))}. {unseen}",
                    FairprunerWarning,
                    stacklevel=3,
                )
                spaces = spaces.without(dict.fromkeys(left, str(unseen)))

    def _readings(
        self,
        calibration: Calibration,
        chosen: Mapping[Side, Sequence[Selection]],
        spaces: Spaces,
        first: Batch,
        batches: Iterator[Batch],
    ) -> tuple[Results, int]:
        with learning(self.model, calibration.weights.values()):
            expected = calibration.look(first)
            classes = expected if self.groups is None else self.groups
            contexts = {side: Context(self.model, spaces, side, classes, self.seed) for side in chosen}
            parts = {
                side: [part for selection in chosen[side] for part in _start(selection, context)]
                for side, context in contexts.items()
            }
            everything = [part for of_side in parts.values() for part in of_side]
            samples = 0
            shared = self.processes.share(itertools.chain([first], batches))
            with progress("scoring", self.data) as advance:
                for half, batch in in_halves(shared) if calibration.needs else ():
                    calibration.step(batch, half, everything)
                    samples += batch.size
                    advance(batch.size)
        if self.processes.size > 1:
            samples = sum(self.processes.gathered(samples))
            for part in everything:
                part.accumulator.join(self.processes)
        with torch.autocast(first.labels.device.type, enabled=False):
            return {side: _read(of_side) for side, of_side in parts.items()}, samples


def _distinct(chosen: Mapping[Side, Sequence[Selection]]) -> list[Selection]:
    """All selections; one name may serve both roles only for signals that see no data, which have no halves
    to confuse.
    """
    selections = [selection for of_side in chosen.values() for selection in of_side]
    seen = [selection.name for selection in selections if any(signal.needs for signal in selection.signals)]
    if len(set(seen)) != len(seen):
        raise FairprunerError(
            f"A removal and a protection signal share a name, found {sorted(seen)}: rename one."
        )
    return selections


def _start(selection: Selection, context: Context) -> Iterator[RunningSignal]:
    """The signals of a selection, each at work on the spaces of its kinds."""
    for signal in selection.signals:
        kinds = selection.kinds_of(signal)
        yield RunningSignal(
            selection.name, signal, kinds, signal.start(replace(context, spaces=context.spaces.only(kinds)))
        )


def _read(parts: Sequence[RunningSignal]) -> dict[str, Result]:
    """The outcome of every selection, its signals' results put together."""
    found: dict[str, Result] = {}
    for part in parts:
        result, before = part.accumulator.result(), found.get(part.name, Result({}))
        merged = ({**getattr(before, field.name), **getattr(result, field.name)} for field in fields(Result))
        found[part.name] = Result(*merged)
    return found


def _spaces(model: nn.Module, spaces: Spaces | None, first: Batch) -> Spaces:
    """The spaces to score, found from the first sample if none are given, and checked to be the model's
    own.
    """
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
    model: nn.Module, data: Iterable[Any], device: torch.device, groups: int, seed: int
) -> ClassGroups:
    """Cluster the classes by their mean penultimate features, in a forward pass of its own."""
    if isinstance(data, Iterator):
        raise FairprunerError(
            f"groups={groups} needs to read the data twice, and a {type(data).__name__} can be read once:"
            " give a loader or a list of batches."
        )

    def features() -> Iterator[tuple[Tensor, Tensor]]:
        with progress("grouping classes", data) as advance, torch.no_grad():
            for batch in read_batches(data, device):
                with LastInput() as last:
                    forward(model, batch)
                advance(batch.size)
                yield last.features(batch.size, real_tokens(batch.inputs)), batch.class_labels()

    return group_classes(features(), groups, seed)


def _warn_of_noise(scores: Scores) -> None:
    """Tell the caller when two halves of the data rank the experts too differently: the ranks of rarely
    used ones settle slowly.
    """
    if scores.samples == 1 and any(space.kind == "expert" for space in scores.spaces):
        warnings.warn(
            f"One sample cannot rank experts: nothing tells what another would say. {MORE}",
            FairprunerWarning,
            stacklevel=3,
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
                stacklevel=3,
            )


def _scores(spaces: Spaces, results: Results, samples: int, settings: Mapping[str, Any]) -> Scores:
    values: dict[Side, dict[str, Mapping[str, Floats]]] = {
        side: {name: r.scores for name, r in by_name.items()} for side, by_name in results.items()
    }
    several = {name: result for by_name in results.values() for name, result in by_name.items()}
    halves = {name: result.halves for name, result in several.items() if result.halves}
    made = {name: dict(result.settings) for name, result in several.items() if result.settings}
    return Scores(spaces, values["removal"], values["protection"], samples, halves, {**settings, **made})
