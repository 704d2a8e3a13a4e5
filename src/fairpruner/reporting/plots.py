"""The paper's figures as static images; they need the extra `plots`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fairpruner.allocation import allocate
from fairpruner.core.budget import METRICS
from fairpruner.core.marks import FIGURE, mark
from fairpruner.core.plan import Plan
from fairpruner.core.reading import read_plain_json, understanding
from fairpruner.core.scores import Scores
from fairpruner.core.writing import written_whole
from fairpruner.errors import FairprunerError, unknown
from fairpruner.files import PLAN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_ablation", "plot_profile", "plot_scores", "plot_tolerance", "save_figure"]

FORMATS = (".png", ".svg", ".pdf")
# The Okabe-Ito palette, distinguishable with any colour vision.
BLUE, VERMILION, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#8a949e"
# (colour, marker, line) of each curve.
STYLES = (
    (BLUE, "o", "-"),
    (VERMILION, "s", "--"),
    (GREEN, "D", "-."),
    ("#cc79a7", "^", ":"),
    ("#e69f00", "v", "-"),
    ("#56b4e9", "P", "--"),
)
CURVES = '{"method": [[removed share, accuracy, …], …]}'  # what `plot_ablation` draws
TOLERANCES = np.linspace(0, 0.99, 100)


def plot_scores(scores: Scores, spaces: Sequence[str] | None = None) -> Figure:
    """Sorted removal and protection scores of some spaces: the paper's score distributions.

    Without `spaces`, the first and the last space are drawn.

    >>> from fairpruner.core.cost_model import CostModel
    >>> from fairpruner.core.spaces import Spaces
    >>> from fairpruner.core.units import UnitSpace
    >>> known = Spaces((UnitSpace("conv", "channel", 4, slices=()),), {}, CostModel((), (), ()), "")
    >>> aligned = {"conv": np.array([0.4, 0.1, 0.2, 0.3])}
    >>> len(plot_scores(Scores(known, {"l1": aligned}, {"taylor": aligned}, samples=1)).axes)
    2
    """
    names = scores.spaces.names
    chosen = [scores.spaces[name].name for name in spaces or dict.fromkeys((names[0], names[-1]))]
    figure = _figure(8, 2.6 * len(chosen))
    panels = figure.subplots(len(chosen), 2, squeeze=False)  # [spaces, signals]
    for row, name in zip(panels, chosen, strict=True):
        by_side = (scores.removal[name], scores.protection[name])
        for axes, signal, values, colour in zip(row, scores.active, by_side, (BLUE, VERMILION), strict=True):
            axes.stairs(np.sort(values), fill=True, color=colour)
            _label(axes, "units, sorted", "score", title=f"{name}: {signal}")
    return figure


def plot_profile(plan: Plan) -> Figure:
    """Kept and removed units of every space, and the uniform share: the paper's pruning profile.

    >>> from fairpruner.core.cost_model import CostModel
    >>> from fairpruner.core.spaces import Spaces
    >>> from fairpruner.core.units import UnitSpace
    >>> spaces = Spaces((UnitSpace("conv", "channel", 4, slices=()),), {}, CostModel((), (), ()), "")
    >>> plot_profile(Plan.removing(spaces, {"conv": (1,)})).axes[0].get_ylabel()
    'units kept'
    """
    sizes = np.array([space.size for space in plan.spaces])
    kept = sizes - np.array(list(plan.depths.values()))
    figure = _figure(max(5.0, 0.28 * len(sizes) + 2), 4)
    axes = figure.subplots()
    places = np.arange(len(sizes))
    axes.bar(places, kept / sizes, color=BLUE, label="kept")
    axes.bar(
        places,
        1 - kept / sizes,
        bottom=kept / sizes,
        color="none",
        edgecolor=GREY,
        hatch="///",
        linewidth=0.5,
        label="removed",
    )
    axes.axhline(plan.share("units"), color=VERMILION, linestyle="--", label="uniform")
    axes.set_xticks(places, plan.spaces.names, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    axes.yaxis.set_major_formatter("{x:.0%}")
    _label(axes, "", "units kept")
    axes.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return figure


def plot_tolerance(scores: Scores) -> Figure:
    """The removed share of each metric at every tolerance: the paper's pruning rate against alpha.

    >>> from fairpruner.core.cost_model import CostModel
    >>> from fairpruner.core.spaces import Spaces
    >>> from fairpruner.core.units import UnitSpace
    >>> spaces = Spaces((UnitSpace("conv", "channel", 4, slices=()),), {}, CostModel((), (), ()), "")
    >>> aligned = {"conv": np.array([0.4, 0.1, 0.2, 0.3])}
    >>> plot_tolerance(Scores(spaces, {"l1": aligned}, {"taylor": aligned}, samples=1)).axes[0].get_xlabel()
    'tolerance'
    """
    plans = [allocate(scores, alpha=float(alpha)) for alpha in TOLERANCES]
    figure = _figure(5, 3.6)
    axes = figure.subplots()
    for metric, (colour, _, line) in zip(METRICS, STYLES, strict=False):
        axes.step(
            TOLERANCES,
            [1 - plan.share(metric) for plan in plans],
            where="post",
            color=colour,
            linestyle=line,
            label=metric,
        )
    axes.yaxis.set_major_formatter("{x:.0%}")
    _label(axes, "tolerance", "removed")
    axes.legend(frameon=False)
    return figure


def plot_ablation(curves: Mapping[str, Iterable[Sequence[float]]]) -> Figure:
    """Accuracy against the removed share, one curve per method: the paper's ablation.

    A point of a curve is (removed share, accuracy of the first trial, of the second, …).

    >>> lines = {"ToD": [(0.1, 0.93), (0.3, 0.90)], "random": [(0.1, 0.8, 0.7), (0.3, 0.4, 0.5)]}
    >>> plot_ablation(lines).axes[0].get_ylabel()
    'accuracy'
    """
    checked = _checked(curves)
    figure = _figure(5.5, 3.8)
    axes = figure.subplots()
    for position, (method, rows) in enumerate(checked.items()):
        colour, marker, line = STYLES[position % len(STYLES)]
        removed = [row[0] for row in rows]
        mean, spread = (np.array([measure(row[1:]) for row in rows]) for measure in (np.mean, np.std))
        axes.plot(removed, mean, color=colour, marker=marker, linestyle=line, label=method)
        if spread.any():
            axes.fill_between(removed, mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)
    axes.xaxis.set_major_formatter("{x:.0%}")
    _label(axes, "removed", "accuracy")
    axes.legend(frameon=False)
    return figure


def _checked(curves: Any) -> dict[str, list[tuple[float, ...]]]:
    """The points of each curve, sorted by the removed share."""
    if not isinstance(curves, Mapping) or not curves:
        raise FairprunerError(f"Found {repr(curves)[:60]}, expected {CURVES}.")
    return {method: _rows(method, points) for method, points in curves.items()}


def _rows(method: str, points: Any) -> list[tuple[float, ...]]:
    """The points of one curve, sorted by the removed share."""
    try:
        rows = [tuple(point) for point in points]
    except TypeError:
        rows, strange = [], [points]
    else:
        values = [value for row in rows for value in row]
        strange = [value for value in values if not isinstance(value, Real) or isinstance(value, bool)]
    if strange:
        raise FairprunerError(
            f"Curve {str(method)[:60]!r} has {repr(strange[0])[:60]} in it, expected {CURVES}."
        )
    if not rows or min(map(len, rows)) < 2:
        raise FairprunerError(
            f"Curve {method!r} needs points of a removed share and at least one accuracy, found"
            f" {rows[:1] or 'none'}."
        )
    return sorted(tuple(map(float, row)) for row in rows)


def _draw_ablation(path: Path) -> Figure:
    curves = read_plain_json(path)
    with understanding(path):
        checked = _checked(curves)
    return plot_ablation(checked)


def draw(name: str, source: str | Path, output: str | Path) -> None:
    """Draw one of `FIGURES` from its file and write it, as `fairpruner plot` does."""
    if name not in FIGURES:
        raise unknown("figure", name, FIGURES)
    save_figure(FIGURES[name](Path(source)), output)


FIGURES: dict[str, Callable[[Path], Figure]] = {
    "scores": lambda path: plot_scores(Scores.load(path)),
    "profile": lambda path: plot_profile(Plan.load(path / PLAN if path.is_dir() else path)),
    "tolerance": lambda path: plot_tolerance(Scores.load(path)),
    "ablation": _draw_ablation,
}


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure; the ending of the path selects PNG, SVG or PDF."""
    ending = Path(path).suffix.lower()
    if ending not in FORMATS:
        raise FairprunerError(
            f"A figure cannot be written as {ending or 'a file without an ending'!r}: name it"
            f" *{', *'.join(FORMATS)}."
        )
    with written_whole(path) as temporary:
        marked = {"Software" if ending == ".png" else "Creator": mark(FIGURE)}
        figure.savefig(temporary, format=ending[1:], dpi=160, metadata=marked)


def _figure(width: float, height: float) -> Figure:
    """An empty figure; its size is in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FairprunerError("Figures need matplotlib: pip install 'fairpruner[plots]'.") from error
    return Figure(figsize=(width, height), layout="constrained")  # not from pyplot, which would keep it open


def _label(axes: Axes, x: str, y: str, *, title: str = "") -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
