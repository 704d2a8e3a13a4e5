"""Structured pruning for PyTorch: score a model once, then cut any smaller version of it."""

from fairpruner.terminal import interrupts  # noqa: F401  # first: the imports below take seconds

# isort: split
from importlib.metadata import version

from fairpruner.allocation import allocate, shuffled, sweep
from fairpruner.allocation.composition import compose
from fairpruner.allocation.diagnostics import diagnose
from fairpruner.core.budget import Budget
from fairpruner.core.latency import LatencyTable
from fairpruner.core.plan import Plan
from fairpruner.core.scores import Scores
from fairpruner.core.spaces import Spaces
from fairpruner.core.tod import ConflictCurve, conflict_curve
from fairpruner.core.trials import Trial
from fairpruner.core.units import UnitSpace
from fairpruner.discovery import discover
from fairpruner.errors import FairprunerError, FairprunerWarning
from fairpruner.files.folders import load, save
from fairpruner.inputs.streamed import Streamed
from fairpruner.measuring import Measurement, latency_table, measure
from fairpruner.models.counting import count_flops, count_params
from fairpruner.pipeline import prune
from fairpruner.recovery import Epoch, Recipe, recover
from fairpruner.repair import Note, Repaired, cut_files, repair, repair_with_notes
from fairpruner.repair import Statistics as RepairStatistics
from fairpruner.reporting import Report, report
from fairpruner.scoring import signals
from fairpruner.scoring.score import score
from fairpruner.scoring.signals import protection_signal, removal_signal
from fairpruner.surgery import cut, mask

__version__ = version("fairpruner")

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
    "repair_with_notes",
    "cut_files",
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
    "Trial",
    "Scores",
    "Spaces",
    "Streamed",
    "UnitSpace",
    "ConflictCurve",
    "Report",
    "Measurement",
    "LatencyTable",
    "Recipe",
    "Epoch",
    "Note",
    "Repaired",
    "RepairStatistics",
    "FairprunerError",
    "FairprunerWarning",
    "signals",
    "removal_signal",
    "protection_signal",
]
