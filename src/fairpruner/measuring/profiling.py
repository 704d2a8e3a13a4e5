"""Making a latency table: cut the model to a few widths, time the whole and every operation, and fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fairpruner.core.arrays import Floats, Ints
from fairpruner.core.costs import Lengths
from fairpruner.core.latency import LatencyTable, TimedOp, padded_to
from fairpruner.core.spaces import Spaces, Term
from fairpruner.core.tod import removal_order
from fairpruner.discovery import operation_costs
from fairpruner.errors import FairprunerError, check_whole_number
from fairpruner.measuring.runtimes import check_runtime, prepared
from fairpruner.measuring.timing import batched, device_of, finish, machine, settle_memory, threads_of, timed
from fairpruner.models.calling import call_checked, call_directly, evaluating
from fairpruner.models.fingerprint import check_same_model
from fairpruner.models.narrowing import cut_units

SHARES = (1.0, 0.9, 0.75, 0.6, 0.45, 0.3)  # of every space's units
MULTIPLES = (1, 8, 16, 32)  # that are tried
BY_CHANCE = (1, 1, 8, 8, 16, 16, 32, 32)  # models whose spaces keep shares by chance, in these multiples
# a multiple is believed if it leaves less than this of the misses, on average over operations, that
# widths
# taken as they are leave
CLEARLY = 0.75

Progress = Callable[[int, int], None]  # rounds done, of how many


def latency_table(
    model: nn.Module,
    example: Any,
    spaces: Spaces,
    *,
    batch_size: int = 1,
    threads: int | None = None,
    runtime: str = "eager",
    repeats: int = 10,
    progress: Progress | None = None,
) -> LatencyTable:
    """Measure, once on this machine, how long every operation of a model takes at any widths: budgets of
    latency need nothing else.

    About a dozen cut models run in turn, `repeats` times, as a whole in the `runtime` and operation by
    operation in torch; `progress` is called with the rounds done and their number.

    >>> net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    >>> import fairpruner as fp
    >>> table = latency_table(net, torch.zeros(1, 16), fp.discover(net, torch.zeros(1, 16)), repeats=2)
    >>> len(table.ops), table.setting["runtime"]
    (2, 'eager')
    """
    _check(model, spaces, batch_size, runtime, repeats)
    with threads_of(threads) as used:
        factors, terms = operation_costs(model, batched(example, 1), spaces)
        orders, depths = _trials(spaces)
        models = [cut_units(model, spaces, _removed(spaces, orders, column)) for column in depths.T]
        whole, parts = _times(
            models,
            batched(example, batch_size),
            used,
            (runtime, repeats),
            progress or (lambda done, rounds: None),
        )
    if parts.shape[1] != len(terms):
        raise FairprunerError(
            f"{type(model).__name__} ran {parts.shape[1]} operations when it was timed and {len(terms)} when"
            " it was traced: what it does depends on its input, so its latency cannot be put together from"
            " operations."
        )
    parts *= (whole / parts.sum(axis=1))[:, None]  # looking at operations slows them down
    lengths = Lengths(factors, spaces, orders).kept(depths)  # [F, T]
    # All but the whole model: its largest tensors may take the memory another way, and it needs no
    # prediction.
    ops, multiple = _fitted(terms, lengths[:, 1:], np.array([factor.size for factor in factors]), parts[1:])
    setting = {
        "batch_size": batch_size,
        "threads": used,
        "runtime": runtime,
        "machine": machine(),
        "torch": torch.__version__,
    }
    table = LatencyTable(tuple(factors), ops, float(whole[0]), multiple, spaces.fingerprint, setting)
    return replace(
        table, trials=tuple(zip(whole.tolist(), table.milliseconds(lengths).tolist(), strict=True))
    )


def _check(model: nn.Module, spaces: Spaces, batch_size: int, runtime: str, repeats: int) -> None:
    check_runtime(runtime)
    check_same_model(
        model, spaces.fingerprint, "The spaces belong", step="Discover this model, or give the original one."
    )
    for name, value in {"batch_size": batch_size, "repeats": repeats}.items():
        check_whole_number(name, value, 1)


def _trials(spaces: Spaces) -> tuple[list[Ints], Ints]:
    """Orders of units by chance, and the depth of every space in every trial, [S, T]; the first trial is
    the whole model.
    """
    rng = np.random.default_rng(0)
    orders = [removal_order(rng.random(space.size), space.groups) for space in spaces]
    sizes, least = (np.array([getattr(space, name) for space in spaces]) for name in ("size", "min_keep"))
    groups = np.array([space.groups for space in spaces])
    wanted = [(np.full(sizes.size, share), 1) for share in SHARES] + [
        (rng.uniform(0.25, 1.0, sizes.size), multiple) for multiple in BY_CHANCE
    ]
    columns = []
    for share, multiple in wanted:
        step = np.where([space.kind in ("channel", "hidden") for space in spaces], multiple, groups)
        kept = np.ceil(np.maximum(np.round(share * sizes / step) * step, least) / groups) * groups
        columns.append(sizes - np.clip(kept.astype(np.int64), 1, sizes))
    return orders, np.stack(columns, axis=1)


def _removed(spaces: Spaces, orders: Sequence[Ints], depths: Ints) -> dict[str, list[int]]:
    return {
        space.name: order[:depth].tolist() for space, order, depth in zip(spaces, orders, depths, strict=True)
    }


class _Marks(TorchDispatchMode):
    """Notes when each operation begins that multiplies and adds."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.begun = device, list[float]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket in flop_registry:
            finish(self.device)
            self.begun.append(time.perf_counter())
        return func(*args, **(kwargs or {}))


def _profiled(model: nn.Module, example: Any) -> Floats:
    """Milliseconds from each operation to the next, [O]; what comes before the first belongs to it."""
    device = device_of(example)
    start = time.perf_counter()
    with _Marks(device) as marks:
        call_directly(model, example)
    finish(device)
    return 1000 * np.diff([start, *marks.begun[1:], time.perf_counter()])


def _times(
    models: Sequence[nn.Module], example: Any, threads: int, how: tuple[str, int], progress: Progress
) -> tuple[Floats, Floats]:
    """Median milliseconds of every model as a whole [T], and of its operations [T, O]."""
    runtime, repeats = how
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(evaluating(model))
        stack.enter_context(torch.no_grad())
        call_checked(models[0], example)
        runs = [prepared(runtime, model, example, threads) for model in models]
        settle_memory()
        rounds = []
        for done in range(repeats + 1):
            rounds.append(
                [(timed(run), _profiled(model, example)) for run, model in zip(runs, models, strict=True)]
            )
            progress(done, repeats)
    whole, parts = (
        np.array([[pair[part] for pair in round] for round in rounds[1:]]) for part in (0, 1)
    )  # the first was to warm up
    return _typical(whole), _typical(parts)


def _typical(times: Floats) -> Floats:
    """The median over rounds, [R, T, …] -> [T, …], once rounds in which the machine was faster or slower
    for all are brought to one pace.
    """
    pace = times.reshape(len(times), -1).sum(axis=1)
    typical: Floats = np.median(times * (np.median(pace) / pace).reshape(-1, *[1] * (times.ndim - 1)), axis=0)
    return typical


def _fitted(
    terms: Sequence[Term], lengths: Ints, sizes: Ints, times: Floats
) -> tuple[tuple[TimedOp, ...], int]:
    """Each operation's parts, by least squares over the trials, and the multiple of widths that explains
    the times best.
    """
    misses, fits = {}, {}
    for multiple in MULTIPLES:
        found = [_fit_op(term, lengths, sizes, multiple, times[:, o]) for o, term in enumerate(terms)]
        fits[multiple], misses[multiple] = tuple(op for op, _ in found), sum(miss for _, miss in found)
    best = min(MULTIPLES, key=lambda multiple: misses[multiple])
    multiple = best if misses[best] < CLEARLY * misses[1] else 1
    return fits[multiple], multiple


def _fit_op(term: Term, lengths: Ints, sizes: Ints, multiple: int, times: Floats) -> tuple[TimedOp, float]:
    """The parts that fit best by least squares and are not negative, and their misses as a share of the
    time; of so few parts every choice can be tried.
    """
    axes = list(term.factors)
    # [A, T], [A]
    padded, whole = (padded_to(multiple, values) for values in (lengths[axes], sizes[axes]))
    share = padded.prod(axis=0) / whole.prod()  # [T]
    ragged = (lengths[axes] % multiple != 0).any(axis=0)
    columns = np.stack(
        [np.ones_like(share), share, share * ragged, *(padded / whole[:, None])], axis=1
    )  # [T, 3 + A]
    best, least = np.zeros(columns.shape[1]), float(times @ times)
    for chosen in _choices(columns.shape[1]):
        parts = np.zeros(columns.shape[1])
        parts[chosen] = np.linalg.lstsq(columns[:, chosen], times, rcond=None)[0]
        left = float(((columns @ parts - times) ** 2).sum())
        if parts.min() >= 0 and left < least:
            best, least = parts, left
    fixed, work, uneven, *widths = best.tolist()
    return TimedOp(tuple(axes), fixed, work, uneven, tuple(widths)), float(
        np.abs(columns @ best - times).sum() / times.sum()
    )


def _choices(count: int) -> Iterator[list[int]]:
    """All ways to take some of so many things."""
    return (
        [i for i, taken in enumerate(which) if taken]
        for which in product((False, True), repeat=count)
        if any(which)
    )
