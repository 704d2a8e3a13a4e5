"""The measure stage: the real costs of a model, alone or compared with the model it was cut from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from fairpruner.errors import FairprunerError, check_whole_number, is_whole_number
from fairpruner.measuring.energy import energy_of
from fairpruner.measuring.generation import generates, prefill_and_decode
from fairpruner.measuring.measurement import Measurement
from fairpruner.measuring.memory import peak_gpu, peak_resident, stored_bytes
from fairpruner.measuring.profiling import latency_table
from fairpruner.measuring.runtimes import RUNTIMES, check_runtime, prepared
from fairpruner.measuring.timing import Inference, batched, interleaved, machine, threads_of
from fairpruner.measuring.values import Quantity, Spread, Timing
from fairpruner.models.calling import call_checked, evaluating, naming_failure
from fairpruner.models.counting import count_flops, count_params
from fairpruner.models.devices import device_of_example

__all__ = ["RUNTIMES", "Measurement", "Quantity", "Spread", "Timing", "latency_table", "measure"]


def measure(
    model: nn.Module,
    example: Any,
    *,
    against: nn.Module | None = None,
    batch_sizes: Sequence[int] = (1, 4, 8),
    threads: int | None = None,
    runtimes: Sequence[str] = ("eager",),
    repeats: int = 30,
    memory: bool = True,
    energy: str | None = None,
) -> Measurement:
    """Measure params, FLOPs (MACs), bytes, latency and memory of a model.

    `against` is a second model, usually the one that `model` was cut from. The two then run in turn, so that
    a slow moment of the machine affects both. The speed-up is the median, with quartiles, of the ratios of
    each round. A causal language model is also timed for reading a prompt and for generating. `memory`
    starts a new process for each model. `energy` is the ISO code of a country, such as "DEU", and needs
    CodeCarbon.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> found = measure(net, torch.zeros(1, 4), batch_sizes=[2], repeats=3, memory=False)
    >>> [(q.name, q.model) for q in found.quantities], found.timings[0].batch_size
    ([('params', 58), ('flops', 48), ('bytes', 232)], 2)
    """
    _check(batch_sizes, runtimes, repeats)
    models = [model] if against is None else [model, against]
    for net in models:
        if not isinstance(net, nn.Module):
            raise FairprunerError(
                f"A model to measure is a {type(net).__name__}, expected a torch.nn.Module: `load` gives the"
                " model of a folder."
            )
    with ExitStack() as stack:
        used = stack.enter_context(threads_of(threads))
        for net in models:
            stack.enter_context(_as_used(net))
        stack.enter_context(torch.no_grad())
        for net in models:
            call_checked(net, example)
        quantities = [*_counts(models, batched(example, 1))]
        if memory:
            quantities += _memory(models, batched(example, batch_sizes[0]), used)
        if energy is not None:
            quantities += _energy(models, batched(example, batch_sizes[0]), used, energy)
        timings = [
            timing
            for size in batch_sizes
            for timing in _timings(
                models, batched(example, size), size, runtimes=runtimes, threads=used, repeats=repeats
            )
        ]
    setting = {
        "threads": used,
        "repeats": repeats,
        "batch size of memory and energy": batch_sizes[0],
        "torch": torch.__version__,
        "machine": machine(),
    }
    return Measurement(tuple(quantities), tuple(timings), setting)


def _check(batch_sizes: Sequence[int], runtimes: Sequence[str], repeats: int) -> None:
    for name in runtimes if not isinstance(runtimes, str) else [runtimes]:
        check_runtime(name)
    if isinstance(runtimes, str) or not runtimes:
        raise FairprunerError(f"runtimes is {runtimes!r}, expected a list of some of {', '.join(RUNTIMES)}.")
    if isinstance(batch_sizes, int) or not batch_sizes or not all(is_whole_number(n, 1) for n in batch_sizes):
        raise FairprunerError(
            f"batch_sizes is {batch_sizes!r}, expected whole numbers of at least 1, such as (1, 8)."
        )
    check_whole_number("repeats", repeats)


@contextmanager
def _as_used(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, with the fused attention that its user has; afterwards it is as before."""
    fast = torch.backends.mha.get_fastpath_enabled()
    with evaluating(model):
        torch.backends.mha.set_fastpath_enabled(fast)
        yield


def _counts(models: Sequence[nn.Module], sample: Any) -> Iterator[Quantity]:
    """Numbers that need no repeats."""
    yield Quantity.of("params", "", map(count_params, models))
    yield Quantity.of("flops", "", (count_flops(model, sample) for model in models))
    yield Quantity.of("bytes", "B", map(stored_bytes, models))
    if device_of_example(sample).type == "cuda":
        yield Quantity.of("peak GPU memory", "B", (peak_gpu(model, sample) for model in models))


def _memory(models: Sequence[nn.Module], example: Any, threads: int) -> list[Quantity]:
    try:
        found = [peak_resident(model, example, threads) for model in models]
    except FairprunerError as error:
        return [Quantity("peak memory", "B", None, note=str(error))]
    note = "the peak memory minus the memory of a process that has only imported torch"
    added = Quantity.of("model memory", "B", (f["peak"] - f["idle"] for f in found), note)
    return [Quantity.of("peak memory", "B", (f["peak"] for f in found)), added]


def _energy(models: Sequence[nn.Module], example: Any, threads: int, country: str) -> list[Quantity]:
    with naming_failure(models[0], "its energy was measured"):
        found = [energy_of(prepared("eager", model, example, threads), country) for model in models]
    note = mix = ""
    if not all(f.counted for f in found):
        note = "estimated from the processor's load and nominal power, because it has no energy counter"
        mix = f"{note}, and from the power mix of {country}"
    return [
        Quantity.of("energy", "J", (f.joules for f in found), note),
        Quantity.of("CO2", "mg", (f.co2_milligrams for f in found), mix),
    ]


def _timings(
    models: Sequence[nn.Module],
    example: Any,
    size: int,
    *,
    runtimes: Sequence[str],
    threads: int,
    repeats: int,
) -> Iterator[Timing]:
    """The milliseconds in each runtime, or the reason why a runtime cannot run the models."""
    for runtime in runtimes:
        try:
            runs: list[Inference] = [prepared(runtime, model, example, threads) for model in models]
        except FairprunerError as error:
            yield Timing(runtime, "forward", size, None, note=str(error))
            continue
        with naming_failure(models[0], f"its forward pass was timed with batches of {size}"):
            forward = interleaved(runs, repeats)
        yield Timing.of(runtime, "forward", size, forward)
        if runtime == "eager" and generates(models[0], example):
            with naming_failure(models[0], "generating tokens was timed"):
                prefill, decode = prefill_and_decode(models, example, repeats)
            yield Timing.of(runtime, "prefill", size, prefill)
            yield Timing.of(runtime, "decode", size, decode)
