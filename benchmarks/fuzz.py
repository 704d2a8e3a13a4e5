"""Fuzz every reader of files.

Two engines share the inputs of each kind of file: hypothesis, whose inputs are drawn from a seed and are the
same on every machine, and atheris, which looks for bytes that reach new lines of code (pip install atheris).
Without atheris, hypothesis makes all inputs. Each input is read under limits of time and memory, and what is
accepted is used.

A row has so many `inputs` of a kind of file; its seed is `first`, the inputs before it. The first million is
older than the other rows, and was made in blocks with seeds of their own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import pages, runs

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))
SECONDS, MEMORY = 30, 4 * 2**30  # that one input may take
ROUNDS = (1_000_000, *[100_000] * 10)  # inputs of all kinds of files
# Thousandths of all inputs: fewer where one takes long.
SHARES = {
    **{"index": 150, "jsonl": 150, "csv": 130, "npz": 130, "latency": 120, "png": 60, "parquet": 60},
    **{"xz": 50, "plan": 50, "safetensors": 35, "pt": 30, "checkpoint": 12, "scores": 10, "measured": 6},
    **{"folder": 4, "configuration": 3},
}
Row = dict[str, Any]


def cases(quick: bool) -> Iterator[Row]:
    """Round by round, all kinds of files; a quick run has some of them."""
    first = 0
    for inputs in (2_000,) if quick else ROUNDS:
        for file in ("index", "npz", "png", "plan", "pt") if quick else SHARES:
            share = SHARES[file]
            yield {"file": file, "first": first * share // 1000, "inputs": inputs * share // 1000}
        first += inputs


def measure(case: Row, shared: Path) -> Row:
    """The inputs of a row, half of them by each engine that there is."""
    found: Row = {"hypothesis": 0, "atheris": 0, "accepted": 0, "failures": []}
    engines = ["hypothesis", *["atheris"] * bool(importlib.util.find_spec("atheris"))]
    for number, engine in enumerate(engines):
        told = in_process(engine, case["file"], case["first"], (case["inputs"] + number) // len(engines))
        found[engine] = told["inputs"]
        found["accepted"] += told["accepted"]
        found["failures"] += told["failures"]
    return found


def in_process(engine: str, file: str, seed: int, inputs: int) -> Row:
    """Inputs in a process and a folder of their own, which may run out of time or memory."""
    script = f"import sys; sys.path.insert(0, {str(HERE)!r}); import fuzz; fuzz.print_counts"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", f"{script}{folder, engine, file, seed, inputs}"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    last = done.stdout.strip().rpartition("\n")[2]
    if last.startswith('{"inputs"'):
        told: Row = json.loads(last)
        return told
    failure = {"engine": engine, "seed": seed, "error": done.stderr[-300:]}
    return {"inputs": 0, "accepted": 0, "failures": [failure]}


def print_counts(folder: str, engine: str, file: str, seed: int, inputs: int) -> None:
    """Read inputs, and print how many there were, how many were accepted, and those that failed."""
    os.chdir(folder)
    from harness import torchvision_shim  # noqa: F401 (transformers imports torchvision)

    if engine == "atheris":
        import atheris

        with atheris.instrument_imports(include=["fairpruner"]):  # so that it sees which lines run
            import fuzzing
    else:
        import fuzzing
    fuzzing.made()
    signal.signal(signal.SIGALRM, late)
    with limited():
        {"hypothesis": run_hypothesis, "atheris": run_atheris}[engine](Counter(file), seed, inputs)


class Counter:
    """Runs single inputs and counts them, and keeps those that failed."""

    def __init__(self, file: str) -> None:
        from fuzzing import run_case

        self.file, self.run_case = file, run_case
        self.told: Row = {"inputs": 0, "accepted": 0, "failures": []}

    def __call__(self, data: bytes) -> None:
        signal.alarm(SECONDS)
        try:
            self.told["accepted"] += self.run_case(self.file, data) == "accepted"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:300]
            self.told["failures"].append({"bytes": data.hex(), "error": reason})
        finally:
            signal.alarm(0)
            self.told["inputs"] += 1

    def print(self) -> None:
        del self.told["failures"][5:]  # one fault fails often
        print(f"\n{json.dumps(self.told)}", flush=True)


def late(*_: object) -> None:
    raise TimeoutError(f"a case took more than {SECONDS} s")


def run_hypothesis(count: Counter, number: int, inputs: int) -> None:
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from hypothesis import strategies as st

    @seed(number)
    @settings(
        max_examples=inputs,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.binary(min_size=1, max_size=48))
    def check(data: bytes) -> None:
        count(data)

    check()
    count.print()


def run_atheris(count: Counter, number: int, inputs: int) -> None:
    import atheris

    flags = ["fuzz", f"-runs={inputs}", "-max_len=96", "-len_control=0", f"-seed={number + 1}"]

    def one(data: bytes) -> None:
        count(data)
        if count.told["inputs"] >= inputs:
            count.print()
            os._exit(0)  # libFuzzer would end the process by itself, without a word to Python

    atheris.Setup(flags, one)
    atheris.Fuzz()


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Inside, memory is bounded, and warnings of the libraries that read files are not shown."""
    lines = Path("/proc/self/status").read_text().splitlines()
    used = next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def page() -> str:
    """Inputs, accepted inputs and failures for each kind of file."""
    sums = {file: [0] * 4 for file in SHARES}
    for row in runs.stored("fuzz"):
        counts = row["hypothesis"], row["atheris"], row["accepted"], len(row["failures"])
        sums[row["file"]] = [a + b for a, b in zip(sums[row["file"]], counts, strict=True)]
    sums["all"] = [sum(column) for column in zip(*sums.values(), strict=True)]
    head = ["file", "by hypothesis", "by atheris", "accepted and right", "failures"]
    lines = [(name, *(f"{number:,}" for number in numbers)) for name, numbers in sums.items() if any(numbers)]
    return pages.table(head, lines)
