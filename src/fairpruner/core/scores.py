"""Scores: removal and protection numbers of every unit, checked, saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairpruner.core.arrays import Floats
from fairpruner.core.budget import Metric
from fairpruner.core.costs import metrics_of, unit_savings
from fairpruner.core.fields import field as required
from fairpruner.core.fields import listed, mapped, text, whole
from fairpruner.core.reading import understanding
from fairpruner.core.sealed import read_tensors, write_tensors
from fairpruner.core.spaces import Spaces
from fairpruner.core.units import KINDS, Kind, UnitSpace
from fairpruner.core.writing import written_whole
from fairpruner.errors import FairprunerError, unknown

SIGNALS = ("removals", "protections", "halves")  # the arrays of a Scores
PER_FLOP = ("reconstruction", "surgeon", "saliency")  # signals that are divided by the FLOPs a unit saves


@dataclass(frozen=True, eq=False)
class Scores:
    """Removal and protection numbers for every unit, and everything else that `allocate` needs.

    The first signal of each mapping is the active one; `using` puts another in front.
    """

    spaces: Spaces
    removals: Mapping[str, Mapping[str, Floats]]  # signal -> space -> [J], small = remove first
    protections: Mapping[str, Mapping[str, Floats]]  # signal -> space -> [J], large = protect
    samples: int
    # signal -> space -> [2, J], from disjoint halves of the data
    halves: Mapping[str, Mapping[str, Floats]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)  # how they were made: seed, projections, …

    def __post_init__(self) -> None:
        if not self.removals or not self.protections:
            raise FairprunerError("Scores need at least one removal and one protection signal.")
        for signal, by_space in (*self.removals.items(), *self.protections.items()):
            if set(by_space) != set(self.spaces.names):
                raise FairprunerError(
                    f"Signal {signal!r} scores the spaces {sorted(by_space)}, expected"
                    f" {sorted(self.spaces.names)}."
                )
            for space in self.spaces:
                check_scores(by_space[space.name], space, signal)
        for signal, by_space in self.halves.items():
            for name, values in by_space.items():
                if values.dtype != np.float64 or values.shape != (2, self.spaces[name].size):
                    raise FairprunerError(
                        f"The halves of signal {signal!r} are {values.dtype}{list(values.shape)} for space"
                        f" {name!r}, expected float64[2, {self.spaces[name].size}]."
                    )

    def __repr__(self) -> str:
        removal, protection = (", ".join(signals) for signals in (self.removals, self.protections))
        made = f"removal {removal}; protection {protection}; {self.samples:,} samples"
        return f"Scores: {made}\n{self.spaces!r}"

    @property
    def removal(self) -> Mapping[str, Floats]:
        """Space -> scores of the active removal signal, [J]."""
        return next(iter(self.removals.values()))

    @property
    def protection(self) -> Mapping[str, Floats]:
        """Space -> scores of the active protection signal, [J]."""
        return next(iter(self.protections.values()))

    @property
    def active(self) -> tuple[str, str]:
        """The names of the active removal and protection signals."""
        return next(iter(self.removals)), next(iter(self.protections))

    def using(self, removal: str | None = None, protection: str | None = None) -> Scores:
        """The same scores with other signals active."""
        return replace(
            self,
            removals=_with_first(self.removals, removal),
            protections=_with_first(self.protections, protection),
        )

    def only(self, kinds: Sequence[str] | None = None, skip: Sequence[str] = ()) -> Scores:
        """The scores of some spaces: plans made from them leave the others whole."""
        spaces = self.spaces.only(kinds, skip)

        def narrowed(signals: Mapping[str, Mapping[str, Floats]]) -> dict[str, dict[str, Floats]]:
            return {
                signal: {name: values for name, values in by_space.items() if name in spaces.names}
                for signal, by_space in signals.items()
            }

        return replace(
            self,
            spaces=spaces,
            removals=narrowed(self.removals),
            protections=narrowed(self.protections),
            halves=narrowed(self.halves),
        )

    def per(self, metric: Metric) -> Scores:
        """The same scores, but those per FLOP that a unit saves are per amount that it saves of this metric.

        The rule `global` then removes what costs least for the budget. Milliseconds are taken for FLOPs.
        """
        if metric not in metrics_of(self.spaces) or metric == "flops":
            return self
        if not any(map(_kinds_per_flop, self.removals)):
            return self
        savings = unit_savings(self.spaces, "flops", metric)

        def converted(signals: Mapping[str, Mapping[str, Floats]]) -> dict[str, dict[str, Floats]]:
            return {
                signal: {
                    name: values * savings[name]["flops"] / savings[name][metric]
                    if signal in self.removals and self.spaces[name].kind in _kinds_per_flop(signal)
                    else values
                    for name, values in by_space.items()
                }
                for signal, by_space in signals.items()
            }

        return replace(self, removals=converted(self.removals), halves=converted(self.halves))

    def save(self, path: str | Path) -> None:
        """Write the scores to one .safetensors file: arrays as tensors, the rest as JSON in its metadata."""
        tensors = {
            _key(group, signal, space): torch.from_numpy(np.ascontiguousarray(values))
            for group in SIGNALS
            for signal, by_space in getattr(self, group).items()
            for space, values in by_space.items()
        }
        content = {
            "samples": self.samples,
            "settings": dict(self.settings),
            "signals": {group: list(getattr(self, group)) for group in SIGNALS},  # the active one first
            "spaces": self.spaces.to_json(),
        }
        with written_whole(path) as temporary:
            write_tensors(temporary, "scores", content, tensors)

    @staticmethod
    def load(path: str | Path) -> Scores:
        """Read what `save` wrote, bit for bit."""
        content, tensors = read_tensors(Path(path), "scores")
        with understanding(path):
            spaces = Spaces.from_json(required(content, "spaces"))
            signals = mapped(required(content, "signals"), "signals")
            arrays = {
                group: {
                    text(signal, "the name of a signal"): {
                        name: tensors[_key(group, signal, name)].numpy()
                        for name in spaces.names
                        if _key(group, signal, name) in tensors
                    }
                    for signal in listed(signals.get(group, []), group)
                }
                for group in SIGNALS
            }
            return Scores(
                spaces=spaces,
                samples=whole(required(content, "samples"), "samples"),
                settings=mapped(required(content, "settings"), "settings"),
                **arrays,
            )


def check_scores(values: Floats, space: UnitSpace, signal: str) -> None:
    """Refuse a score vector of the wrong type or length, or one with NaN or infinity in it."""
    if values.dtype != np.float64 or values.shape != (space.size,):
        raise FairprunerError(
            f"Signal {signal!r} gave {values.dtype}{list(values.shape)} for space {space.name!r}, expected"
            f" float64[{space.size}]."
        )
    bad = int((~np.isfinite(values)).sum())
    if bad:
        raise FairprunerError(
            f"Signal {signal!r} gave {bad} of {space.size} values that are not finite for space"
            f" {space.name!r}: look for NaN or infinity in the model's activations, weights or loss."
        )


def check_are_scores(scores: object) -> None:
    """Raise unless `scores` are scores."""
    if not isinstance(scores, Scores):
        raise FairprunerError(
            f"The scores are a {type(scores).__name__}, expected Scores: from score or Scores.load."
        )


def _kinds_per_flop(signal: str) -> frozenset[Kind]:
    """The kinds whose scores this signal divides by FLOPs; it may be named kind=signal+kind=signal.

    >>> sorted(_kinds_per_flop("hidden=surgeon+expert=reap"))
    ['hidden']
    """
    by_kind = dict.fromkeys(KINDS, signal)
    if "=" in signal:
        by_kind = {k: v for k, _, v in (part.partition("=") for part in signal.split("+")) if k in KINDS}
    return frozenset(kind for kind, name in by_kind.items() if name in PER_FLOP)


def _with_first(
    signals: Mapping[str, Mapping[str, Floats]], name: str | None
) -> Mapping[str, Mapping[str, Floats]]:
    """The signals with one of them in front."""
    if name is None:
        return signals
    if name not in signals:
        raise unknown("signal", name, signals)
    return {name: signals[name], **signals}


def _key(group: str, signal: str, space: str) -> str:
    return f"{group}/{signal}/{space}"
