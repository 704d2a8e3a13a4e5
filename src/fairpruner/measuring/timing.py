"""Wall-clock times of several calls, taken in turn so that a slow moment of the machine falls on all of
them.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fairpruner.core.arrays import Floats
from fairpruner.errors import check_whole_number
from fairpruner.models.calling import tensors_of

Run = Callable[[], Any]
Clock = Callable[[], float]
LARGE = (32 << 20) - (1 << 16)  # bytes; just below the largest block that glibc learns from
WARM_UP = 3  # untimed calls at the start: kernels are chosen, memory is taken


def interleaved(runs: Sequence[Run], repeats: int, *, clock: Clock = time.perf_counter) -> Floats:
    """Milliseconds of every run in every round, [R, repeats]; every other round goes backwards, so that
    none always comes first.

    Each timed call follows an untimed one of the same run, so that caches hold what they hold in steady
    use.

    >>> ticks = iter([0.0, 0.001, 0.001, 0.004])
    >>> interleaved([lambda: None, lambda: None], 1, clock=lambda: next(ticks)).tolist()
    [[1.0], [3.0]]
    """
    settle_memory()
    times = np.zeros((len(runs), repeats))
    for number in range(repeats):
        order = range(len(runs)) if number % 2 == 0 else reversed(range(len(runs)))
        for position in order:
            times[position, number] = timed(runs[position], WARM_UP if number == 0 else 1, clock)
    return times


def settle_memory() -> None:
    """Free one large block, after which glibc keeps blocks of its size: else some models pay for page
    faults in every call, as chance has it.
    """
    torch.empty(LARGE, dtype=torch.uint8)


def timed(run: Run, before: int = 1, clock: Clock = time.perf_counter) -> float:
    """Milliseconds of a call that follows so many untimed ones."""
    for _ in range(before):
        run()
    start = clock()
    run()
    return 1000 * (clock() - start)


@contextmanager
def threads_of(count: int | None) -> Iterator[int]:
    """So many threads for torch inside; None leaves their number as it is."""
    if count is not None:
        check_whole_number("threads", count, 1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count or before)
        yield count or before
    finally:
        torch.set_num_threads(before)


def finish(device: torch.device) -> None:
    """Wait until all that was asked of a device is done: a GPU answers before it has computed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def machine() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def device_of(example: Any) -> torch.device:
    return next((tensor.device for tensor in tensors_of(example)), torch.device("cpu"))


def batched(example: Any, size: int) -> Any:
    """The example with its first sample repeated along dimension 0 of every tensor.

    >>> batched({"x": torch.ones(2, 5)}, 3)["x"].shape
    torch.Size([3, 5])
    """
    if isinstance(example, torch.Tensor):
        # in the example's memory format
        return torch.cat([example[:1]] * size) if example.ndim else example
    if isinstance(example, (tuple, list)):
        return type(example)(batched(part, size) for part in example)
    if hasattr(example, "items"):
        return {name: batched(part, size) for name, part in example.items()}
    return example
