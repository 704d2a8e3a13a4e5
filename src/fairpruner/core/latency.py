"""A latency table: the time of each operation of one model at any width, for one machine and runtime.

The milliseconds of an operation are the sum of a fixed part, a part proportional to its
multiply-accumulates, and one part per axis proportional to the length of that axis, for norms and
activations. Lengths are rounded up to the next multiple of `multiple`, because hardware computes in blocks.
Lengths that are not a multiple may cost an extra share of the work. The full model's latency is measured, not
predicted: its largest tensors may cost extra, and all shares refer to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from fairpruner.core.arrays import Floats, Ints, runs_length
from fairpruner.core.cost_model import Factor
from fairpruner.core.fields import BIGGEST, listed, mapped, real, text, whole
from fairpruner.core.fields import field as required
from fairpruner.core.reading import understanding
from fairpruner.core.sealed import Json, read_json, write_json
from fairpruner.core.spaces import MOST_NUMBERS, Spaces
from fairpruner.errors import FairprunerError, another_model

WIDEST = 2**16  # the largest `multiple` that a file may hold


@dataclass(frozen=True)
class TimedOp:
    """Milliseconds of one operation and of what follows it, up to the next one, at full widths."""

    factors: tuple[int, ...]  # the axes that it multiplies, as positions in LatencyTable.factors
    fixed: float
    work: float  # proportional to the product of the lengths
    uneven: float  # added to `work` if a length is not a multiple
    widths: tuple[float, ...]  # one per axis, proportional to its length

    def __post_init__(self) -> None:
        if min(self.fixed, self.work, self.uneven, *self.widths) < 0 or len(self.widths) != len(self.factors):
            raise FairprunerError(
                "A timed operation needs times that are not negative and one width time per axis, found"
                f" {self}."
            )


@dataclass(frozen=True, eq=False)
class LatencyTable:
    """The times of all operations of a model; saved as one JSON file."""

    factors: tuple[Factor, ...]
    ops: tuple[TimedOp, ...]
    original: float  # measured milliseconds of the full model
    multiple: int  # widths are rounded up to a multiple of this
    fingerprint: str  # of the model
    setting: Mapping[str, Any] = field(default_factory=dict)  # batch size, threads, runtime, machine
    # (measured, predicted) milliseconds of the cut models that the table was made from
    trials: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if self.multiple < 1 or not self.ops or not self.original > 0:
            raise FairprunerError(
                "A latency table has operations, a multiple of at least 1 and a time above 0, found"
                f" {len(self.ops)}, {self.multiple} and {self.original}."
            )
        for op in self.ops:
            if any(not 0 <= f < len(self.factors) for f in op.factors):
                raise FairprunerError(
                    f"A latency table's operations multiply its own {len(self.factors)} axes, found {op}."
                )
            if prod(self.factors[f].size + self.multiple for f in op.factors) > BIGGEST:
                raise FairprunerError(f"A latency table's operation has more than {BIGGEST:,} steps.")

    def milliseconds(self, lengths: Ints) -> Floats:
        """The milliseconds of N plans from the lengths of their axes, [F, N] -> [N].

        >>> op = TimedOp((0,), 0.5, 4.0, 1.0, (0.5,))
        >>> table = LatencyTable((Factor(32, {}),), (op,), original=5.5, multiple=16, fingerprint="")
        >>> table.milliseconds(np.array([[32, 20, 16, 3]])).tolist()
        [5.5, 6.0, 2.75, 3.25]
        """
        sizes = np.array([factor.size for factor in self.factors], dtype=np.int64)
        padded, whole = (padded_to(self.multiple, values) for values in (lengths, sizes))
        ragged = lengths % self.multiple != 0
        total = np.zeros(lengths.shape[1])
        for op in self.ops:  # the report page adds in the same order, so both sums are equal bit for bit
            axes = list(op.factors)
            share = padded[axes].prod(axis=0) / whole[axes].prod()
            part = op.fixed + np.where(ragged[axes].any(axis=0), op.work + op.uneven, op.work) * share
            for f, width in zip(axes, op.widths, strict=True):
                part += width * (padded[f] / whole[f])
            total += part
        return np.where((lengths == sizes[:, None]).all(axis=0), self.original, total)

    @property
    def misses(self) -> Floats:
        """The relative error of the prediction for each model that the table was made from, [trials]."""
        trials: Floats = np.array(self.trials).reshape(-1, 2)
        return trials[:, 1] / trials[:, 0] - 1

    def save(self, path: str | Path) -> None:
        """Write the table to one readable JSON file."""
        write_json(path, "latency table", self.to_json())

    @staticmethod
    def load(path: str | Path) -> LatencyTable:
        """Read what `save` wrote."""
        content = read_json(path, "latency table")
        with understanding(path):
            return LatencyTable.from_json(content)

    def to_json(self) -> Json:
        """The table as JSON values; what people read comes first."""
        return {
            "setting": dict(self.setting),
            "original": self.original,
            "multiple": self.multiple,
            "trials": [list(trial) for trial in self.trials],
            "fingerprint": self.fingerprint,
            "ops": [[list(op.factors), op.fixed, op.work, op.uneven, list(op.widths)] for op in self.ops],
            "factors": [factor.to_json() for factor in self.factors],
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> LatencyTable:
        """What `to_json` was given; every field is checked."""
        factors = listed(required(content, "factors"), "factors")
        vectors = [runs for f in factors for runs in mapped(required(f, "owned"), "owned").values()]
        if sum(runs_length(listed(runs, "an owner vector")) for runs in vectors) > MOST_NUMBERS:
            raise FairprunerError(f"Its vectors have more than {MOST_NUMBERS:,} numbers.")
        return LatencyTable(
            factors=tuple(Factor.from_json(factor) for factor in factors),
            ops=tuple(_op(row, len(factors)) for row in listed(required(content, "ops"), "ops")),
            original=real(required(content, "original"), "original"),
            multiple=whole(required(content, "multiple"), "multiple", at_most=WIDEST),
            fingerprint=text(required(content, "fingerprint"), "fingerprint"),
            setting=mapped(required(content, "setting"), "setting"),
            trials=tuple(_trial(trial) for trial in listed(required(content, "trials"), "trials")),
        )


def _op(row: Any, factors: int) -> TimedOp:
    axes, fixed, work, uneven, widths = listed(row, "an operation")
    return TimedOp(
        tuple(whole(axis, "the axis of an operation", at_most=factors - 1) for axis in listed(axes, "axes")),
        real(fixed, "a fixed time"),
        real(work, "the time of work"),
        real(uneven, "the time of uneven widths"),
        tuple(real(time, "the time of an axis") for time in listed(widths, "the times of the axes")),
    )


def _trial(trial: Any) -> tuple[float, float]:
    measured, predicted = (real(time, "a time") for time in listed(trial, "a trial"))
    return measured, predicted


def padded_to(multiple: int, lengths: Ints) -> Ints:
    """Lengths rounded up to a multiple."""
    return -(-lengths // multiple) * multiple


def check_table(table: LatencyTable, spaces: Spaces) -> None:
    """Raise unless a table was made for this model."""
    if not isinstance(table, LatencyTable):
        raise FairprunerError(
            f"latency is a {type(table).__name__}, expected a LatencyTable: from latency_table or"
            " LatencyTable.load."
        )
    if table.fingerprint != spaces.fingerprint:
        raise another_model(
            "The latency table belongs",
            table.fingerprint,
            spaces.fingerprint,
            "Measure the model that was scored.",
        )
