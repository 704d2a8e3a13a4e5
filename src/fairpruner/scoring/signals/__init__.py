"""Signals: the ways to give every unit a removal number (small = remove first) or a protection number
(large = protect).
"""

from fairpruner.scoring.signals.base import (
    Meter,
    Reading,
    Signal,
    Step,
    Task,
    built_in,
    names,
    protection_signal,
    removal_signal,
)
from fairpruner.scoring.signals.choosing import Choice, choose, defaults, resolve
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
from fairpruner.scoring.signals.wasserstein import Wasserstein, WassersteinPooled

built_in("removal", Wasserstein(), WassersteinPooled(), L1, L2, FPGM, ACTIVATION, Reconstruction(), Random())
built_in("removal", SOFT_ACTIVATION, SOFT_ACTIVATION_ALL, FREQUENCY, REAP)
built_in("protection", Taylor(), Taylor2(), Deletion(), RoutedTaylor(), RoutedTaylorExact(), Random())

__all__ = [
    "Choice",
    "Deletion",
    "Meter",
    "Random",
    "Reading",
    "RoutedTaylor",
    "RoutedTaylorExact",
    "Signal",
    "Step",
    "Task",
    "Taylor",
    "Taylor2",
    "Wasserstein",
    "WassersteinPooled",
    "choose",
    "defaults",
    "names",
    "protection_signal",
    "removal_signal",
    "resolve",
]
