"""What repair did to each weight, or why it did nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import nn

from fairpruner.repair.regression import JudgedFit

UNSEEN = "no convolution or matrix product was seen to use it as it is"
ROUTED = "it is inside a list of experts, which are called on different tokens: 'merge' can repair those"
NO_EXPERTS = "the plan removes no routed expert"
USED_ELSEWHERE = "another operation than a product uses it too"


@dataclass(frozen=True)
class Note:
    """What happened to one weight, one block or one method.

    `kept`: a repair was tried and did not help. `skipped`: no repair could be tried.
    """

    subject: str
    outcome: Literal["repaired", "kept", "skipped"]
    reason: str
    error: float | None = None  # share of the squared output error that is left on held-out samples

    @staticmethod
    def of(subject: str, found: JudgedFit) -> Note:
        """The note for a fit."""
        if found.fit is None:
            return Note(subject, "kept", found.reason)
        return Note(subject, "repaired", found.reason, found.after / found.before)


class Repaired(NamedTuple):
    """A repaired model, and what was done to each of its weights."""

    model: nn.Module
    notes: tuple[Note, ...]
