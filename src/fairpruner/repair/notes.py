"""What repair did to each weight, or why it did nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fairpruner.repair.regression import Choice

UNSEEN = "no convolution or matrix product was seen to use it as it is"
ROUTED = "it lies inside one of several experts, each called on tokens of its own: 'merge' can mend those"
NO_EXPERTS = "the plan removes no routed expert"
USED_ELSEWHERE = "it is used for something else than a product as well"

Outcome = Literal["repaired", "kept", "skipped"]


@dataclass(frozen=True)
class Note:
    """One weight (or the whole model): `kept` as it was because the repair did not help, or `skipped`
    because it could not be tried.
    """

    subject: str
    outcome: Outcome
    reason: str
    error: float | None = None  # share of the squared output error that is left on held-out samples

    @staticmethod
    def of(weight: str, choice: Choice) -> Note:
        """How a fit went."""
        if choice.fit is None:
            return Note(weight, "kept", choice.reason)
        return Note(weight, "repaired", choice.reason, choice.after / choice.before)
