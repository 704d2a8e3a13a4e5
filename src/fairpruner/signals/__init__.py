"""Signals: the ways to give every unit a removal number (small = remove first) or a protection number (large = protect)."""

from .base import Meter, Reading, Signal, Step, Task, built_in, names, protection_signal, removal_signal, resolve
from .protection import Deletion, Taylor, Taylor2
from .reconstruction import Reconstruction
from .removal import ACTIVATION, FPGM, L1, L2, Random
from .wasserstein import Wasserstein, WassersteinPooled

built_in("removal", Wasserstein(), WassersteinPooled(), L1, L2, FPGM, ACTIVATION, Reconstruction(), Random())
built_in("protection", Taylor(), Taylor2(), Deletion(), Random())

__all__ = [
    "Deletion",
    "Meter",
    "Random",
    "Reading",
    "Signal",
    "Step",
    "Task",
    "Taylor",
    "Taylor2",
    "Wasserstein",
    "WassersteinPooled",
    "names",
    "protection_signal",
    "removal_signal",
    "resolve",
]
