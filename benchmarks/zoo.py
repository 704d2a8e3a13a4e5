"""A zoo of models: what is found in each, what a cut of 40 % of every space keeps, and that it is right.

Each model runs alone in a process of its own, which may hold 8 GB. `python docs/prunable.py` makes
docs/prunable.md of the rows. diffusers, ultralytics and torch_geometric leave their group out where they are
not installed.

A row is *equal* if zeroing the removed units and cutting them gives the same output in float64 with random
weights, and if params and FLOPs are as predicted. It is *saved* if a new process loads the cut model and
computes what the first one computed.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import multiprocessing
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import runs
from nets import zoo_models
from safetensors.torch import load_file, save_file

import fairpruner as fp
from fairpruner.core.tod import removal_order
from fairpruner.discovery.lively import lively
from fairpruner.models.calling import call, describe, output_tensors
from fairpruner.models.narrowing import cut_units, mask_units
from fairpruner.models.torch_private import TorchDispatchMode, tree_map_only

SHARE = 0.4  # of each space, removed at random
MEMORY = 7 << 30  # with the shared libraries less than 8 GB
TIMEOUT = 1800  # seconds for one model
SHAKE = 1e-12  # the share by which weights change to see how far the model amplifies rounding
DRAWS = 8  # of random weights
CHAOS = 1e-3  # a model that moves so far with the weights of the check is compared with its initial ones
OUTPUT = "reaches the model's output"
Row = dict[str, Any]


def _source() -> str:
    """A short hash of the package's source, which tells whether rows were measured with the same version."""
    files = sorted(Path(fp.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


SOURCE = _source()


def cases(quick: bool) -> Iterator[Row]:
    """Every model, or the first of each group."""
    for group, (names, _) in zoo_models.GROUPS.items():
        yield from ({"group": group, "model": name} for name in (names()[:1] if quick else names()))


def measure(case: Row, shared: Path) -> Row:
    """The row of one model, from two processes; what they raise is the row's `crash` or `load_error`."""
    for library in zoo_models.LIBRARIES.get(case["group"], ()):  # once, before processes are forked
        importlib.import_module(library)
    with tempfile.TemporaryDirectory() as folder:
        row, error = _apart(examine, case, Path(folder))
        if error:
            return {"crash": error}
        if "kept" in row:
            row["saved"], error = _apart(check_loaded, case, Path(folder))
            if error:
                row["load_error"] = error
    return row


def examine(case: Row, folder: Path) -> Row:
    """All that the table says of one model; its cut and the cut's output are written to `folder`."""
    build, example = zoo_models.find(case["group"], case["model"])
    torch.manual_seed(0)
    model, inputs = build().eval(), example()
    forward = min(_processor_seconds(lambda: _outputs(model, inputs)) for _ in range(3))
    row: Row = {"input": describe(inputs), "forward_s": forward, "source": SOURCE}
    start = time.process_time()
    try:
        spaces = fp.discover(model, inputs)
    except fp.FairprunerError as error:
        if not str(error).startswith("There is nothing to prune"):
            raise
        return row | {"discovery_s": time.process_time() - start, "found": {}, "nothing": str(error)}
    row["discovery_s"] = time.process_time() - start
    row["found"] = {
        kind: [len(sizes), sum(sizes)]
        for kind in dict.fromkeys(space.kind for space in spaces)
        if (sizes := [space.size for space in spaces if space.kind == kind])
    }
    row["left_out"] = Counter(_short(reason) for reason in spaces.left_out.values() if reason != OUTPUT)
    plan = fp.Plan.removing(spaces, _some_units(spaces))
    row["kept"] = {name: plan.predicted[name] / plan.original[name] for name in ("flops", "params")}
    for draw in range(DRAWS):  # a detector may find nothing with some random weights
        found = _difference(model, plan, inputs, functools.partial(_drawn, draw))
        if found is not None:
            break
    row["difference"], row["tremor"], row["precision"] = found
    if not row["tremor"] <= CHAOS:  # such outputs prove nothing, nor do outputs that are not finite
        row["difference"], row["tremor"], row["precision"] = _difference(model, plan, inputs, _initial)
    small = fp.cut(model, plan)
    predicted = [plan.predicted["params"], plan.predicted["flops"]]
    counted = [fp.count_params(small), fp.count_flops(small, inputs)]
    row["predicted"], row["counted"] = predicted, counted
    tolerance = max(zoo_models.TOLERANCES[row["precision"]], min(row["tremor"] / 10, 1e-4))
    row["equal"] = row["difference"] <= tolerance and predicted == counted
    fp.save(small, plan, folder / "model")
    torch.manual_seed(0)
    outputs = {str(n): t.contiguous().clone() for n, t in enumerate(_outputs(small, inputs))}
    save_file(outputs, folder / "outputs.safetensors")
    row["peak_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    return row


def check_loaded(case: Row, folder: Path) -> bool:
    """Whether the saved cut, loaded in this process, computes what it computed before it was saved."""
    build, example = zoo_models.find(case["group"], case["model"])
    torch.manual_seed(0)
    build()  # draws the same random numbers as before the example
    inputs = example()
    small = fp.load(folder / "model", build=None if case["group"] == "transformers" else build).eval()
    expected = load_file(folder / "outputs.safetensors")
    torch.manual_seed(0)
    found = _outputs(small, inputs)
    return len(found) == len(expected) and all(
        torch.allclose(tensor, expected[str(n)], rtol=1e-5, atol=1e-6, equal_nan=True)
        for n, tensor in enumerate(found)
    )


def _initial(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype, copy=True) if tensor.is_floating_point() else tensor


def _drawn(draw: int, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return lively(f"{name} {draw}" if draw else name, tensor, dtype)


def _difference(model: Any, plan: Any, inputs: Any, weights: Any) -> tuple[float, float, str] | None:
    """How far mask and cut of the plan differ with these weights, as a share of the largest output; how far a
    tiny change of the weights moves the masked output; and in which precision: float64 where the model runs
    in it within the memory. None if the output holds no numbers.
    """
    for dtype in (torch.float64, torch.float32):
        cast = tree_map_only(
            torch.Tensor, lambda t, dtype=dtype: t.to(dtype) if t.is_floating_point() else t, inputs
        )

        def changed(name: str, tensor: torch.Tensor, dtype: torch.dtype = dtype) -> torch.Tensor:
            return weights(name, tensor, dtype)

        def shaken(name: str, tensor: torch.Tensor, dtype: torch.dtype = dtype) -> torch.Tensor:
            return _shaken(name, weights(name, tensor, dtype))

        try:  # each copy is freed before the next one is made
            with _Rounding(dtype) as rounding:
                masked = _outputs(mask_units(model, plan.spaces, plan.removed, weights=changed).eval(), cast)
            moved = _outputs(mask_units(model, plan.spaces, plan.removed, weights=shaken).eval(), cast)
        except (RuntimeError, TypeError, ValueError):  # it runs in float32 alone, or is too large
            if dtype is torch.float32:
                raise
            gc.collect()  # the failed copy
            continue
        small = _outputs(cut_units(model, plan.spaces, plan.removed, weights=changed).eval(), cast)
        precision = "partly float32" if rounding.seen else str(dtype).removeprefix("torch.")
        if [t.shape for t in masked] != [t.shape for t in small]:
            return float("inf"), 0.0, precision
        if not any(t.is_floating_point() and t.numel() for t in masked):
            return None
        return _share(masked, small), _share(masked, moved), precision
    raise AssertionError


class _Rounding(TorchDispatchMode):
    """Whether a pass in float64 rounds some of its numbers to float32, as many routers do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype, self.seen = dtype, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._dtype is torch.float64 and isinstance(out, torch.Tensor) and out.dtype is torch.float32:
            self.seen |= any(isinstance(a, torch.Tensor) and a.dtype is torch.float64 for a in args)
        return out


def _share(a: list[Any], b: list[Any]) -> float:
    """The largest difference of two lists of outputs, as a share of the largest number of each output."""
    shares = [
        float((x - y).abs().max() / x.abs().max().clamp_min(1e-30))
        for x, y in zip(a, b, strict=True)
        if x.is_floating_point() and x.numel() and x.shape == y.shape
    ]
    return max(shares, key=lambda share: float("inf") if share != share else share, default=float("nan"))


def _shaken(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Changes a fresh tensor in place."""
    return tensor.mul_(torch.randn_like(tensor).mul_(SHAKE).add_(1)) if tensor.is_floating_point() else tensor


def _some_units(spaces: Any) -> dict[str, list[int]]:
    """The share of every space that goes, drawn at random within the space's limits."""
    rng = np.random.default_rng(0)
    removed = {}
    for space in spaces:
        step = max(space.groups, space.multiple)
        depth = min(round(space.size * SHARE), space.size - space.min_keep) // step * step
        order = removal_order(np.argsort(rng.permutation(space.size)), space.groups)
        removed[space.name] = order[:depth].tolist()
    return removed


def _outputs(model: Any, inputs: Any) -> list[Any]:
    with torch.no_grad():
        return list(output_tensors(call(model, inputs)))


def _short(reason: str) -> str:
    """A reason without the numbers and the names of one place, so that equal reasons are counted together."""
    reason = reason.split(" where the output")[0]
    if reason.startswith("like "):
        reason = reason.split(", ", 1)[1]
    return "mask and cut differ" if reason.startswith("mask and cut differ") else reason


def _processor_seconds(action: Any) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def _apart(job: Callable[[Row, Path], Any], case: Row, folder: Path) -> tuple[Any, str]:
    """What a job returns in a process of its own, and what went wrong there.

    The process is a fork: libraries are imported once for the whole zoo, models are only ever built in forks.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(job, case, folder, sender))
    process.start()
    sender.close()
    answered = receiver.poll(TIMEOUT)
    try:
        result, error = receiver.recv() if answered else (None, f"took more than {TIMEOUT} s")
    except EOFError:
        result, error = None, "the process died"
    process.kill()
    process.join()
    return result, error


def _child(job: Callable[[Row, Path], Any], case: Row, folder: Path, sender: Any) -> None:
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    try:
        sender.send((job(case, folder), ""))
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        sender.send((None, f"{type(error).__name__}: {str(error)[:300]} ({place})"))


def page() -> str:
    """The counts of docs/prunable.md as Markdown."""
    sys.path.append(str(Path(__file__).parents[1] / "docs"))
    import prunable

    return prunable.counts(runs.stored("zoo"))
