"""Wall-clock times of several models that run in turn, so that a slow moment of the machine affects all.

torch.utils.benchmark times one statement after the other, so a slow moment would fall on one model only; the
speed-up of two models needs interleaved calls.
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

Inference = Callable[[], Any]  # one forward pass, without arguments
Clock = Callable[[], float]  # the current time in seconds
LARGE = (32 << 20) - (1 << 16)  # bytes; just below the largest block for which glibc adapts its threshold
WARM_UP = 3  # untimed calls at the start, in which kernels are chosen and memory is allocated


def interleaved(runs: Sequence[Inference], repeats: int, *, clock: Clock = time.perf_counter) -> Floats:
    """Milliseconds of R runs in every round, [R, repeats]; every other round has the reverse order.

    Each timed call follows an untimed call of the same run, so that caches are in the state of steady use.

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
    """Allocate and free one large block; glibc then keeps blocks of its size instead of returning them.

    Otherwise some models, by chance, pay for page faults in every call.
    """
    torch.empty(LARGE, dtype=torch.uint8)


def timed(run: Inference, before: int = 1, clock: Clock = time.perf_counter) -> float:
    """Milliseconds of one call, after `before` untimed calls."""
    for _ in range(before):
        run()
    start = clock()
    run()
    return 1000 * (clock() - start)


@contextmanager
def threads_of(count: int | None) -> Iterator[int]:
    """torch uses `count` threads inside the block; None keeps their number."""
    if count is not None:
        check_whole_number("threads", count)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count or before)
        yield count or before
    finally:
        torch.set_num_threads(before)


def machine() -> str:
    """The name of the processor, or its architecture where the system does not name it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def batched(example: Any, size: int) -> Any:
    """An example of `size` samples: the first sample of every tensor, repeated along dimension 0.

    >>> batched({"x": torch.ones(2, 5)}, 3)["x"].shape
    torch.Size([3, 5])
    """
    if isinstance(example, torch.Tensor):
        # torch.cat keeps the memory format, such as channels_last.
        return torch.cat([example[:1]] * size) if example.ndim else example
    if isinstance(example, (tuple, list)):
        return type(example)(batched(part, size) for part in example)
    if hasattr(example, "items"):
        return {name: batched(part, size) for name, part in example.items()}
    return example
