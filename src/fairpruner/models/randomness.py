"""Restoring the random states of Python, numpy, torch and its devices."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch


@contextmanager
def random_state_kept(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Restores the random states of Python, numpy, torch on the CPU and torch on each device."""
    undo = [*_of_processor(), *(_of_device(device) for device in sorted(set(devices), key=str))]
    try:
        yield
    finally:
        for restore in undo:
            restore()


def restore_generator(generator: Any) -> Callable[[], object] | None:
    """A function that resets a generator to its present state; None for anything else."""
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, generator.get_state())
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return None


def _of_processor() -> Iterator[Callable[[], object]]:
    yield partial(random.setstate, random.getstate())
    yield partial(np.random.set_state, np.random.get_state())  # noqa: NPY002 (models and datasets use it)
    yield partial(torch.set_rng_state, torch.get_rng_state())


def _of_device(device: torch.device) -> Callable[[], object]:
    if device.type in ("cpu", "meta"):
        return lambda: None
    backend: Any = torch.get_device_module(device)
    # The functions for MPS take no device, because there is only one.
    which = () if device.type == "mps" else (device,)
    return partial(backend.set_rng_state, backend.get_rng_state(*which), *which)
