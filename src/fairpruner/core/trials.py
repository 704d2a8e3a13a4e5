"""What a search tried: one trial for each plan that it cut, repaired and compared with the original."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fairpruner.core.fields import BIGGEST, field, real, text, truth, whole
from fairpruner.core.sealed import Json


@dataclass(frozen=True)
class Trial:
    """One plan that a search cut and repaired, and how far its outputs are from the original's.

    `distance` is computed on samples that the repair did not see. It is the mean KL divergence of the logits;
    for other outputs, the squared error divided by the squared output. It is infinite if the outputs are not
    finite. Files have null for that, and for what is too large to be read back.
    """

    removal: str  # signal
    rule: str
    spaces: str  # which of them lose units: "all", or what stays whole
    repair: str  # methods joined by "+", "none" for the plain cut
    samples: int  # that the repair used
    kept: float  # share of the budget's metric
    distance: float
    chosen: bool = False

    def to_json(self) -> Json:
        return asdict(self) | {"distance": self.distance if self.distance <= BIGGEST else None}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Trial:
        distance = field(content, "distance")
        return Trial(
            **{name: text(field(content, name), name) for name in ("removal", "rule", "spaces", "repair")},
            samples=whole(field(content, "samples"), "samples"),
            kept=real(field(content, "kept"), "kept"),
            distance=math.inf if distance is None else real(distance, "distance"),
            chosen=truth(content.get("chosen", False), "chosen"),
        )

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of a table whose columns are `COLUMNS`."""
        kept, distance = f"{self.kept:.3f}", f"{self.distance:.4g}"
        mark = "chosen" if self.chosen else ""
        return self.removal, self.rule, self.spaces, self.repair, str(self.samples), kept, distance, mark


COLUMNS = ("removal", "rule", "spaces", "repair", "samples", "kept", "distance", "")
