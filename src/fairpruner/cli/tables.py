"""What the commands print: each result as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Group

from fairpruner.core.budget import METRICS
from fairpruner.core.correlation import spearman
from fairpruner.core.costs import predict
from fairpruner.core.plan import Plan, describe_plan, plan_facts
from fairpruner.core.scores import Scores
from fairpruner.core.spaces import Spaces
from fairpruner.demo import BUDGETS, DATA, PRUNED, SCORES, WEIGHTS, DemoResult
from fairpruner.recovery import Epoch
from fairpruner.repair import Note
from fairpruner.reporting.table import trials_table
from fairpruner.terminal.tables import Printable, amount, table_of


def show_spaces(spaces: Spaces) -> Printable:
    """The spaces of a model, and the spaces that were left out."""
    costs = predict(spaces, {})
    items = [
        {
            "name": s.name,
            "kind": s.kind,
            "size": s.size,
            "min_keep": s.min_keep,
            "tensors": len({p.tensor for p in s.slices}),
        }
        for s in spaces
    ]
    table = table_of(
        f"{len(spaces)} spaces, {costs['units']:,} units in {costs['params']:,} params and {costs['flops']:,}"
        " FLOPs (MACs)",
        ("space", "kind", "units", "keeps at least", "tensors"),
        [item.values() for item in items],
        notes=[f"Left out {name}: {reason}" for name, reason in spaces.left_out.items()],
    )
    return Printable(
        table,
        {
            "spaces": items,
            "left_out": dict(spaces.left_out),
            "original": costs,
            "fingerprint": spaces.fingerprint,
        },
    )


def show_history(history: Sequence[Epoch], place: str) -> Printable:
    """The numbers of each epoch of recovery."""
    rows = [asdict(epoch) for epoch in history]
    return Printable(
        table_of(
            f"{place}: recovered in {len(rows)} epoch{'' if len(rows) == 1 else 's'}",
            list(rows[0]) if rows else ["epoch"],
            [[_cell(v) for v in row.values()] for row in rows],
        ),
        {"folder": place, "epochs": rows},
    )


def _cell(value: object) -> object:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else value


def show_scores(scores: Scores, place: str) -> Printable:
    """The scored spaces, the signals, and how well two disjoint halves of the data agree on the ranking."""
    headings = {signal: _heading(signal, scores) for signal in scores.halves}
    stability = {
        s.name: {
            signal: spearman(*by_space[s.name])
            for signal, by_space in scores.halves.items()
            if s.name in by_space
        }
        for s in scores.spaces
    }
    notes = [scores.settings["why"]] if "why" in scores.settings else []
    if headings:
        notes.append("Stability: rank correlation of the scores from two disjoint halves of the data.")
    table = table_of(
        f"{place}: {scores.samples:,} samples, removal {', '.join(scores.removals)}, protection"
        f" {', '.join(scores.protections)}",
        ("space", "kind", "units", *headings.values()),
        [
            (s.name, s.kind, s.size, *(_decimal(stability[s.name].get(signal)) for signal in headings))
            for s in scores.spaces
        ],
        notes=notes,
    )
    items = [
        {"name": s.name, "kind": s.kind, "size": s.size, "stability": stability[s.name]}
        for s in scores.spaces
    ]
    summary = {
        "samples": scores.samples,
        "removal": list(scores.removals),
        "protection": list(scores.protections),
        "settings": dict(scores.settings),
    }
    return Printable(table, {"file": place, **summary, "spaces": items})


def _heading(signal: str, scores: Scores) -> str:
    """The heading of a signal's stability; a signal that differs by kind has too long a name for a column."""
    side = "removal" if signal in scores.removals else "protection"
    return f"stability of {side if '=' in signal else signal}"


def show_plan(plan: Plan, place: str, repairs: Sequence[Note] = ()) -> Printable:
    """What a plan keeps of each space and metric, what a search tried, and what was repaired."""
    outcomes = Counter((note.outcome, note.reason) for note in repairs)
    items = [{"name": s.name, "kind": s.kind, "size": s.size, "kept": plan.kept[s.name]} for s in plan.spaces]
    table = table_of(
        f"{place}: {describe_plan(plan)}",
        ("space", "kind", "units", "kept"),
        [item.values() for item in items],
        notes=[
            *(
                f"{metric}: {amount(plan.original[metric])} → {amount(plan.predicted[metric])}"
                for metric in plan.predicted
            ),
            *(f"Repair: {count} {outcome} ({reason})" for (outcome, reason), count in outcomes.items()),
        ],
    )
    repaired = {"repair": [asdict(note) for note in repairs]} if repairs else {}
    tried = {"tried": [trial.to_json() for trial in plan.tried]} if plan.tried else {}
    shown = Group(*([trials_table(plan.tried)] if plan.tried else []), table)
    return Printable(shown, {"file": place, **plan_facts(plan), "spaces": items, **tried, **repaired})


def show_sweep(plans: Sequence[Plan], amounts: Sequence[float | int], metric: str) -> Printable:
    """One row per budget."""
    metrics = [m for m in plans[0].predicted if m in (*METRICS, "latency_ms")] if plans else METRICS
    table = table_of(
        f"Budgets of {metric}",
        ("asked", "tolerance", *(f"{m} kept" for m in metrics)),
        [
            (asked, _decimal(p.alpha, 4), *(f"{amount(p.predicted[m])} ({p.share(m):.1%})" for m in metrics))
            for asked, p in zip(amounts, plans, strict=True)
        ],
    )
    return Printable(
        table,
        {
            "metric": metric,
            "plans": [
                {"asked": asked, **plan_facts(plan)} for asked, plan in zip(amounts, plans, strict=True)
            ],
        },
    )


def show_demo(result: DemoResult, place: str) -> Printable:
    """The diagnosis of the plan, the accuracies, other budgets, and the next commands."""
    before, after = result.plan.original, result.plan.predicted
    lines = [
        (
            f"Accuracy on the test digits: {result.original:.1%} → {result.cut:.1%} when cut →"
            f" {result.repaired:.1%} repaired without training → {result.recovered:.1%} after one epoch"
            " of training"
        ),
        (
            f"FLOPs (MACs): {before['flops']:,} → {after['flops']:,}; params: {before['params']:,} →"
            f" {after['params']:,}"
        ),
        "",
        f"{len(result.others)} other budgets from the same scores took {1000 * result.seconds:.1f} ms:",
    ]
    follow = [
        (
            f"The folder {place} now holds {DATA}, {WEIGHTS}, {SCORES} and the pruned model, {PRUNED}. Next,"
            " try:"
        ),
        f"  fairpruner sweep {place}/{SCORES}",
        f"  fairpruner info {place}/{PRUNED}",
    ]
    others = show_sweep(result.others, BUDGETS, "flops")
    content = {
        "folder": place,
        "accuracy": {
            "original": result.original,
            "cut": result.cut,
            "repaired": result.repaired,
            "recovered": result.recovered,
        },
        "plan": {**plan_facts(result.plan), **result.diagnosis.to_json()},
        "sweep": others.json,
        "sweep_seconds": result.seconds,
    }
    return Printable(Group(result.diagnosis, *lines, others.table, *follow), content)


def _decimal(number: float | None, digits: int = 2) -> str:
    return "–" if number is None else f"{number:.{digits}f}"
