"""What a caller of `prune` may set for each stage, checked before any stage runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from fairpruner.allocation import allocate
from fairpruner.core.budget import Budget, check_budget
from fairpruner.core.tod import check_alpha
from fairpruner.discovery import discover
from fairpruner.errors import FairprunerError, check_whole_number, unknown
from fairpruner.recovery import Recipe, recover
from fairpruner.repair import repair
from fairpruner.scoring.score import score

Options = Mapping[str, Mapping[str, Any]]  # stage -> its keyword arguments

# The stages whose keyword arguments `options` may set, except those in OWN, which `prune` sets itself.
STAGES: dict[str, Callable[..., Any]] = {
    "discover": discover,
    "score": score,
    "allocate": allocate,
    "repair": repair,
    "recover": recover,
}
OWN = {"spaces", "keep", "method", "epochs"}
PRESETS = ("best", "paper")
# (stage, option) that preset="paper" fixes.
PAPER = (("score", "removal"), ("score", "protection"), ("allocate", "rule"))


def check_schedule(
    keep: Budget | None, alpha: float | None, numbers: Mapping[str, tuple[object, int]]
) -> None:
    """Refuse a schedule without a goal, or with numbers below their least values."""
    if (keep is None) == (alpha is None):
        raise FairprunerError(
            f"Pruning needs either a tolerance or a budget, found alpha={alpha} and keep={keep}: for example"
            " alpha=0.1 or keep=Budget('flops', 0.5)."
        )
    if alpha is not None:
        check_alpha(alpha)
    if keep is not None:
        check_budget(keep)
    for name, (value, least) in numbers.items():
        check_whole_number(name, value, least)


def check_latency(keep: Budget | None, table: object, rounds: int) -> None:
    """Refuse a budget of latency without a latency table, or in several rounds."""
    if keep is None or keep.counted_in != "latency_ms":
        return
    if rounds > 1:  # a latency table holds for the original model only
        raise FairprunerError(
            f"A budget of {keep.metric} needs a single round: give rounds=1, or a budget of flops."
        )
    if table is None:
        raise FairprunerError(
            f"Budget {keep.metric} keep={keep.amount} needs a latency table: give options={{'allocate':"
            " {'latency': latency_table(...)}}, or use the commands score, latency, plan --latency and cut."
        )


def check_recovery(epochs: int, train: object, options: Options) -> None:
    """Refuse arguments that only training uses, if there is none."""
    given = {"train": train is not None, "options['recover']": bool(options["recover"])}
    unused = " and ".join(name for name, found in given.items() if found)
    if unused and not epochs:
        raise FairprunerError(
            f"Found {unused} without recover_epochs, so nothing is trained: give recover_epochs, or leave out"
            f" {unused}."
        )


def check_min_keep(min_keep: Any, rounds: int) -> None:
    """Refuse shares of a space that every round would take of what the round before left."""
    least = min_keep.values() if isinstance(min_keep, Mapping) else [min_keep]
    if rounds > 1 and any(isinstance(share, float) for share in least):
        raise FairprunerError(
            f"min_keep={min_keep} is a share of every space, and each of the {rounds} rounds would take it of"
            " what is left: give a count, or rounds=1."
        )


def check_preset(preset: str, methods: Sequence[str] | None, options: Options) -> None:
    """Refuse arguments that contradict preset="paper"."""
    if preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    given = [f"{stage} {name}" for stage, name in PAPER if options[stage].get(name) is not None]
    given += [f"repair {', '.join(methods)}"] if methods else []
    if preset == "paper" and given:
        raise FairprunerError(
            f"preset='paper' fixes the signals and the rule and does not repair, found {' and '.join(given)}:"
            " leave them out, or leave out the preset."
        )


def checked(options: Options) -> Options:
    """The options of every stage, checked to be keyword arguments that it has."""
    for stage, given in options.items():
        if stage not in STAGES:
            raise unknown("stage", stage, STAGES)
        if not isinstance(given, Mapping):
            raise FairprunerError(
                f"The options of {stage} are {given!r}, expected a dict of keyword arguments, for example"
                ' {"score": {"removal": "l1"}}.'
            )
        known = [
            p.name
            for p in inspect.signature(STAGES[stage]).parameters.values()
            if p.kind is p.KEYWORD_ONLY and p.name not in OWN
        ]
        for name in given:
            if name not in known:
                raise unknown(f"option of {stage}", name, known)
    recipe = options.get("recover", {}).get("recipe")
    if isinstance(recipe, Mapping):
        known = [field.name for field in fields(Recipe)]
        for name, value in recipe.items():
            if name not in known:
                raise unknown("setting of a recipe", name, known)
            replace(Recipe(distillation=0.0), **{name: value})  # refuses a wrong value before the search
    return {stage: options.get(stage, {}) for stage in STAGES}


def repair_options(options: Options) -> Mapping[str, Any]:
    """The keyword arguments of `repair`; a loss for scoring serves here too."""
    loss = options["score"].get("loss")
    return options["repair"] if loss is None else {"loss": loss, **options["repair"]}
