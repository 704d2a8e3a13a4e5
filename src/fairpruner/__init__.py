"""Structured pruning for PyTorch: score a model once, then cut any smaller version of it."""

from . import signals
from .allocation import allocate, shuffled, sweep
from .composition import compose
from .costs import count_flops, count_params
from .diagnostics import diagnose
from .discovery import discover
from .errors import FairprunerError, FairprunerWarning
from .files.folders import load, save
from .latency import LatencyTable
from .measuring import Measurement, latency_table, measure
from .pipeline import prune
from .recovery import Epoch, Recipe, recover
from .repair import Note, repair
from .reporting import Report, report
from .scoring import score
from .signals import protection_signal, removal_signal
from .surgery import cut, mask
from .tod import conflict_curve
from .types import Budget, ConflictCurve, Plan, Scores, Spaces, UnitSpace

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 (in the order of the pipeline)
    "discover",
    "score",
    "allocate",
    "sweep",
    "shuffled",
    "diagnose",
    "cut",
    "mask",
    "repair",
    "recover",
    "prune",
    "compose",
    "measure",
    "latency_table",
    "report",
    "save",
    "load",
    "conflict_curve",
    "count_params",
    "count_flops",
    "Budget",
    "Plan",
    "Scores",
    "Spaces",
    "UnitSpace",
    "ConflictCurve",
    "Report",
    "Measurement",
    "LatencyTable",
    "Recipe",
    "Epoch",
    "Note",
    "FairprunerError",
    "FairprunerWarning",
    "signals",
    "removal_signal",
    "protection_signal",
]
