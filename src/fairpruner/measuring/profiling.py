"""Making a latency table: cut the model to several widths, time every operation, and fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fairpruner.core.arrays import Floats, Ints
from fairpruner.core.costs import Lengths
from fairpruner.core.latency import LatencyTable
from fairpruner.core.spaces import Spaces
from fairpruner.core.tod import removal_order
from fairpruner.discovery import operation_costs
from fairpruner.errors import FairprunerError, check_whole_number
from fairpruner.measuring.fitting import fit_operations
from fairpruner.measuring.runtimes import check_runtime, prepared
from fairpruner.measuring.timing import batched, machine, settle_memory, threads_of, timed
from fairpruner.models.calling import call_checked, call_directly, evaluating, naming_failure
from fairpruner.models.devices import wait_for_model
from fairpruner.models.fingerprint import check_same_model
from fairpruner.models.narrowing import cut_units
from fairpruner.models.torch_private import TorchDispatchMode, as_products, flop_formula

# The trials: models in which every space keeps the same share of its units, then models in which each space
# keeps a random share, rounded to a multiple.
SHARES = (1.0, 0.9, 0.75, 0.6, 0.45, 0.3)
RANDOM_TRIAL_MULTIPLES = (1, 1, 8, 8, 16, 16, 32, 32)

Progress = Callable[[int, int], None]  # (rounds done, rounds in all)


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
    """Measure once how long every operation of a model takes at any width, on this machine.

    `allocate` can then plan any latency budget without the model. Fourteen cut versions of the model run in
    turn, `repeats` times each: as a whole in the `runtime`, and operation by operation in torch. `progress`
    is called with the rounds done and the rounds in all.

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
            runtime=runtime,
            repeats=repeats,
            progress=progress or (lambda done, rounds: None),
        )
    if parts.shape[1] != len(terms):
        timed = f"{parts.shape[1]} operations when it was timed and {len(terms)} when it was traced"
        raise _no_table(model, timed)
    # Timing single operations slows them down, so their sum is scaled to the time of the whole model.
    parts *= (whole / parts.sum(axis=1))[:, None]
    lengths = Lengths(factors, spaces, orders).kept(depths)  # [F, T]
    sizes = np.array([factor.size for factor in factors])
    # The full model is left out of the fit. Its largest tensors may be allocated in another way, which costs
    # extra, and its latency is measured, not predicted.
    ops, multiple = fit_operations(terms, lengths[:, 1:], sizes, parts[1:])
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
    if any(space.kind == "block" for space in spaces):
        kinds = sorted({space.kind for space in spaces} - {"block"})
        raise FairprunerError(
            "A latency table cannot predict the time of a removed residual block yet: give"
            f" spaces.only(kinds={kinds}), or measure cut models with fp.measure."
        )
    check_whole_number("batch_size", batch_size)
    check_whole_number("repeats", repeats)


def _no_table(model: nn.Module, ran: str) -> FairprunerError:
    return FairprunerError(
        f"{type(model).__name__} ran {ran}. Its operations depend on its input or its widths, so no latency"
        " table can be made: measure cut models with fp.measure instead."
    )


def _trials(spaces: Spaces) -> tuple[list[Ints], Ints]:
    """A random removal order per space, [J] each, and the depth of every space in every trial, [S, T].

    The first trial is the full model.
    """
    rng = np.random.default_rng(0)
    orders = [removal_order(rng.random(space.size), space.groups) for space in spaces]
    sizes, least = (np.array([getattr(space, name) for space in spaces]) for name in ("size", "min_keep"))
    groups = np.array([space.groups for space in spaces])
    # (share to keep in each space, multiple that it is rounded to) of each trial
    wanted = [(np.full(sizes.size, share), 1) for share in SHARES]
    wanted += [(rng.uniform(0.25, 1.0, sizes.size), multiple) for multiple in RANDOM_TRIAL_MULTIPLES]
    columns = []
    for share, multiple in wanted:
        wide = [space.kind in ("channel", "hidden", "stream") for space in spaces]
        step = np.where(wide, multiple, groups)
        kept = np.ceil(np.maximum(np.round(share * sizes / step) * step, least) / groups) * groups
        columns.append(sizes - np.clip(kept.astype(np.int64), 1, sizes))
    return orders, np.stack(columns, axis=1)


def _removed(spaces: Spaces, orders: Sequence[Ints], depths: Ints) -> dict[str, list[int]]:
    """The removed units of each space in one trial."""
    return {
        space.name: order[:depth].tolist() for space, order, depth in zip(spaces, orders, depths, strict=True)
    }


class _Marks(TorchDispatchMode):
    """Records when each operation that multiplies and adds begins."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.begun = model, list[float]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if flop_formula(func) is not None or as_products(func) is not None:
            wait_for_model(self.model)
            self.begun.append(time.perf_counter())
        return func(*args, **(kwargs or {}))


def _profiled(model: nn.Module, example: Any) -> Floats:
    """Milliseconds from each operation to the next, [O]; the time before the first one counts to it."""
    start = time.perf_counter()
    with _Marks(model) as marks:
        call_directly(model, example)
    wait_for_model(model)
    return 1000 * np.diff([start, *marks.begun[1:], time.perf_counter()])


def _times(
    models: Sequence[nn.Module],
    example: Any,
    threads: int,
    *,
    runtime: str,
    repeats: int,
    progress: Progress,
) -> tuple[Floats, Floats]:
    """Typical milliseconds of every model [T], and of its operations [T, O]."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(evaluating(model))
        stack.enter_context(torch.no_grad())
        call_checked(models[0], example)
        runs = [prepared(runtime, model, example, threads) for model in models]
        settle_memory()
        rounds = []
        for done in range(repeats + 1):
            with naming_failure(models[0], "its operations were timed"):
                rounds.append(
                    [(timed(run), _profiled(model, example)) for run, model in zip(runs, models, strict=True)]
                )
            progress(done, repeats)
    rounds = rounds[1:]  # the first round was a warm-up
    whole = np.array([[milliseconds for milliseconds, _ in pairs] for pairs in rounds])  # [R, T]
    counts = sorted({len(operations) for pairs in rounds for _, operations in pairs})
    if len(counts) > 1:
        raise _no_table(models[0], f"{counts[0]} to {counts[-1]} operations at different widths")
    parts = np.array([[operations for _, operations in pairs] for pairs in rounds])  # [R, T, O]
    return _typical(whole), _typical(parts)


def _typical(times: Floats) -> Floats:
    """The median over rounds, [R, T, …] -> [T, …], after scaling every round to the same total time.

    The scaling removes moments in which the machine was slower or faster for all models.
    """
    totals = times.reshape(len(times), -1).sum(axis=1)  # [R]
    scale = (np.median(totals) / totals).reshape(-1, *[1] * (times.ndim - 1))
    typical: Floats = np.median(times * scale, axis=0)
    return typical
