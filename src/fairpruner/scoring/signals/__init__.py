"""Signals give each unit a removal number (small = remove first) or a protection number (large = protect)."""

from fairpruner.inputs.losses import TASKS
from fairpruner.scoring.signals.base import (
    Accumulator,
    BatchInfo,
    Context,
    Result,
    Signal,
    built_in,
    names,
    protection_signal,
    removal_signal,
)
from fairpruner.scoring.signals.influence import Influence
from fairpruner.scoring.signals.protection import Deletion, Taylor, Taylor2
from fairpruner.scoring.signals.reconstruction import Reconstruction
from fairpruner.scoring.signals.removal import ACTIVATION, FPGM, L1, L2, Random
from fairpruner.scoring.signals.routing import (
    FREQUENCY,
    REAP,
    SOFT_ACTIVATION,
    SOFT_ACTIVATION_ALL,
    RoutedTaylor,
    RoutedTaylorExact,
)
from fairpruner.scoring.signals.saliency import Saliency
from fairpruner.scoring.signals.selection import Selection, default_signals, parse_signals, select_signals
from fairpruner.scoring.signals.surgeon import Surgeon
from fairpruner.scoring.signals.wasserstein import Wasserstein, WassersteinPooled

built_in("removal", Wasserstein(), WassersteinPooled(), L1, L2, FPGM, ACTIVATION, Reconstruction(), Random())
built_in(
    "removal",
    SOFT_ACTIVATION,
    SOFT_ACTIVATION_ALL,
    FREQUENCY,
    REAP,
    Influence(),
    Deletion(),
    Saliency(),
    Surgeon(),
)
built_in("protection", Taylor(), Taylor2(), Deletion(), RoutedTaylor(), RoutedTaylorExact(), Random())

__all__ = [
    "TASKS",
    "Accumulator",
    "BatchInfo",
    "Context",
    "Deletion",
    "Influence",
    "Random",
    "Reconstruction",
    "Result",
    "RoutedTaylor",
    "RoutedTaylorExact",
    "Saliency",
    "Selection",
    "Signal",
    "Surgeon",
    "Taylor",
    "Taylor2",
    "Wasserstein",
    "WassersteinPooled",
    "default_signals",
    "names",
    "parse_signals",
    "protection_signal",
    "removal_signal",
    "select_signals",
]
