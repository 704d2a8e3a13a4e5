"""Selecting signals: those that the caller names, or the default for each kind of space."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fairpruner.core.spaces import Spaces
from fairpruner.core.units import KINDS, Kind
from fairpruner.errors import FairprunerError, unknown
from fairpruner.scoring.signals.base import Side, Signal, named

One = str | Signal | Mapping[str, "str | Signal"]  # as a caller may write one signal
Asked = One | Sequence[One]
ByKind = Mapping[Kind, Signal]

# The signal for each kind of space if the caller names none.
DEFAULTS: dict[Side, dict[Kind, str]] = {
    "removal": {**dict.fromkeys(KINDS, "wasserstein"), "expert": "soft_activation", "block": "influence"},
    "protection": {**dict.fromkeys(KINDS, "taylor"), "expert": "routed_taylor"},
}


@dataclass(frozen=True)
class Selection:
    """One signal as the caller named it, and for each kind of space the signal that scores it.

    A selection of several signals is named kind=signal+kind=signal; the caller may write that name, too.
    """

    name: str
    by_kind: ByKind

    @property
    def signals(self) -> tuple[Signal, ...]:
        return tuple(dict.fromkeys(self.by_kind.values()))

    def kinds_of(self, signal: Signal) -> tuple[Kind, ...]:
        return tuple(kind for kind, chosen in self.by_kind.items() if chosen is signal)


def parse_signals(side: Side, asked: Asked | None) -> tuple[ByKind, ...] | None:
    """What the caller names, as a signal for each kind; None if the caller names nothing.

    The caller gives one or several, each a name, a signal, or a mapping from kinds of spaces.

    >>> found = parse_signals("removal", {"head": "l2", "expert": "reap"})
    >>> [{kind: signal.name for kind, signal in one.items()} for one in found]
    [{'head': 'l2', 'expert': 'reap'}]
    """
    if asked is None:
        return None
    several: tuple[Any, ...] = (asked,)
    if isinstance(asked, Iterable) and not isinstance(asked, (str, Mapping)):
        several = tuple(asked)
    if not several:
        raise FairprunerError(f"{side}= is empty, expected at least one signal.")
    return tuple(_by_kind(side, one) for one in several)


def default_signals(side: Side, *, classes: bool, drawn: bool) -> ByKind:
    """The default signal for each kind of space.

    `classes`: samples have classes to compare. `drawn`: labels are drawn from the model's own predictions.
    """
    instead = {
        **({} if classes else {"wasserstein": "activation"}),
        # With drawn labels the first-order term is zero in expectation; the second-order term is not.
        **({"taylor": "taylor2"} if drawn else {}),
    }
    found: ByKind = {
        kind: named(side, name if kind == "block" else instead.get(name, name))
        for kind, name in DEFAULTS[side].items()
    }
    return found


def select_signals(side: Side, wanted: Sequence[ByKind], spaces: Spaces) -> tuple[Selection, ...]:
    """The signals narrowed to the kinds that the spaces have; an error if a kind would have no signal."""
    kinds = [kind for kind in KINDS if any(space.kind == kind for space in spaces)]
    selections = tuple(_selection(side, by_kind, kinds) for by_kind in wanted)
    found = [selection.name for selection in selections]
    if len(set(found)) != len(found):
        raise FairprunerError(
            f"The {side} signals are {found}, expected each name once; rename one with name=."
        )
    return selections


def _by_kind(side: Side, one: One) -> ByKind:
    """One signal as the caller wrote it, as a signal for each kind that it can score."""
    if isinstance(one, str):
        one = dict(part.partition("=")[::2] for part in one.split("+")) if "=" in one else named(side, one)
    if not isinstance(one, (Signal, Mapping)) or one == {}:
        raise FairprunerError(
            f"{side}= holds {one!r}, expected the name of a signal, a signal such as signals.Wasserstein(),"
            " or a mapping from kinds of spaces to signals."
        )
    if isinstance(one, Signal):
        return dict.fromkeys((kind for kind in KINDS if kind in one.kinds), one)
    for kind in one:
        if kind not in KINDS:
            raise unknown("kind", kind, KINDS)
    chosen = {
        kind: signal if isinstance(signal := one[kind], Signal) else named(side, signal)
        for kind in KINDS
        if kind in one
    }
    for kind, signal in chosen.items():
        if kind not in signal.kinds:
            raise _cannot(side, signal, [kind])
    return chosen


def _selection(side: Side, by_kind: ByKind, kinds: Sequence[Kind]) -> Selection:
    """The signals of these kinds, under one name."""
    missing = [kind for kind in kinds if kind not in by_kind]
    if missing:
        signal = next(iter(by_kind.values()))
        if len({*by_kind.values()}) == 1 and missing[0] not in signal.kinds:
            raise _cannot(side, signal, missing)
        raise _forgotten(side, by_kind, missing)
    chosen = {kind: by_kind[kind] for kind in kinds}
    names = list(dict.fromkeys(signal.name for signal in chosen.values()))
    several = "+".join(f"{kind}={signal.name}" for kind, signal in chosen.items())
    return Selection(names[0] if len(names) == 1 else several, chosen)


def _cannot(side: Side, signal: Signal, kinds: Sequence[Kind]) -> FairprunerError:
    able = [kind for kind in KINDS if kind in signal.kinds]
    others = {**dict.fromkeys(able, signal.name), **{kind: DEFAULTS[side][kind] for kind in kinds}}
    return FairprunerError(
        f"The {side} signal {signal.name!r} cannot score spaces of kind {', '.join(kinds)}, only"
        f" {', '.join(able)}: write {side}={others}, or leave spaces out with spaces.only(kinds={able})."
    )


def _forgotten(side: Side, by_kind: ByKind, kinds: Sequence[Kind]) -> FairprunerError:
    complete = {
        **{kind: signal.name for kind, signal in by_kind.items()},
        **{kind: DEFAULTS[side][kind] for kind in kinds},
    }
    return FairprunerError(
        f"There is no {side} signal for spaces of kind {', '.join(kinds)}: write {side}={complete}."
    )
