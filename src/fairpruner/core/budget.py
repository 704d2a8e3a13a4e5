"""A budget: how much of which metric a plan keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fairpruner.errors import FairprunerError, unknown

Metric = Literal[
    "units",
    "params",
    "flops",
    "bytes",
    "experts",
    "inner_params",
    "active_params",
    "cache_bytes",
    "latency",
    "latency_ms",
]
METRICS: tuple[Metric, ...] = ("units", "params", "flops")  # every plan predicts these
MORE_METRICS: tuple[Metric, ...] = ("inner_params", "active_params", "cache_bytes")  # of some models
BUDGETS: tuple[Metric, ...] = (*METRICS, "bytes", "experts", *MORE_METRICS, "latency", "latency_ms")


@dataclass(frozen=True)
class Budget:
    """How much of a metric to keep: a float is a share of the original, an int is a count.

    `latency` takes a share and `latency_ms` takes milliseconds.

    >>> Budget("flops", 0.5).target(125_000_000)
    62500000.0
    """

    metric: Metric
    amount: float | int

    def __post_init__(self) -> None:
        if self.metric not in BUDGETS:
            raise unknown("metric", self.metric, BUDGETS)
        amount = self.amount
        numbers = (int, float, np.integer, np.floating)
        if isinstance(amount, (bool, np.bool_)) or not isinstance(amount, numbers):
            raise FairprunerError(
                f"Budget {self.metric} keep={amount!r} is a {type(amount).__name__}, expected a float share"
                " or an int count."
            )
        if self.metric == "latency_ms":
            if not 0 < amount < math.inf:
                raise FairprunerError(
                    f"Budget latency_ms keep={amount:g} is not a duration, expected milliseconds above 0."
                )
            return
        if self.metric == "latency" and not (isinstance(amount, (float, np.floating)) and 0 < amount <= 1):
            raise FairprunerError(
                f"Budget latency keep={amount:g} is not a share in (0, 1]; for milliseconds, write"
                " latency_ms."
            )
        if isinstance(amount, (float, np.floating)) and not (0 < amount <= 1):
            raise FairprunerError(
                f"Budget {self.metric} keep={amount:g} is not a share in (0, 1]; write an int (for example"
                f" {max(1, math.ceil(amount)) if math.isfinite(amount) else 1}) to keep a count."
            )
        if isinstance(amount, (int, np.integer)) and amount < 1:
            raise FairprunerError(
                f"Budget {self.metric} keep={amount} keeps nothing, expected a count of at least 1."
            )

    @property
    def is_share(self) -> bool:
        """Whether the amount is a share of the original."""
        return self.metric != "latency_ms" and isinstance(self.amount, (float, np.floating))

    @property
    def counted_in(self) -> Metric:
        """The metric of the target: a share of `latency` is counted in `latency_ms`."""
        return "latency_ms" if self.metric == "latency" else self.metric

    def target(self, original: float) -> float:
        """The amount to keep of an `original` amount, as a count or in milliseconds."""
        if self.is_share:
            return float(self.amount) * original
        if self.amount > original:
            raise FairprunerError(
                f"Budget {self.metric} keep={self.amount} is more than the model has ({original:.15g}): give"
                " at most that."
            )
        return float(self.amount)


def check_budget(keep: object) -> None:
    """Raise unless `keep` is a budget: a bare number does not say of which metric."""
    if not isinstance(keep, Budget):
        raise FairprunerError(f"keep is {keep!r}, expected a budget: for example keep=Budget('flops', 0.5).")
