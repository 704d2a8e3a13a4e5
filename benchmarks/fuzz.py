"""Fuzz every reader in a long run that can be stopped and goes on: python -m benchmarks fuzz

Two engines share the inputs of each kind of file: hypothesis, whose blocks are drawn from a seed and are the
same on every machine, and atheris, which looks for bytes that reach new lines of code (pip install atheris).
Without atheris, hypothesis makes all inputs. Each input is read under limits of time and memory, and what is
accepted is used. Counts and failures are kept in benchmarks/results/fuzz.json.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pages

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
RESULTS = Path(__file__).parent / "results" / "fuzz.json"
SECONDS, MEMORY = 30, 4 * 2**30  # that one case may take
TOTAL = 1_000_000
# Thousandths of all inputs: fewer where one takes long.
SHARES = {
    **{"index": 150, "jsonl": 150, "csv": 130, "npz": 130, "latency": 120, "png": 60, "parquet": 60},
    **{"xz": 50, "plan": 50, "safetensors": 35, "pt": 30, "checkpoint": 12, "scores": 10, "measured": 6},
    **{"folder": 4, "configuration": 3},
}
ROUNDS = 4  # so often all kinds of files take their turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=TOTAL, help="inputs in all, those of earlier runs too")
    parser.add_argument("--table", action="store_true", help="only write the table of SECURITY.md")
    options = parser.parse_args()
    if options.table:
        pages.fill("fuzz", page())
        return
    import torchvision_shim  # noqa: F401  # so that transformers imports

    engines = import_readers()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for turn in range(ROUNDS):
        for file, share in SHARES.items():
            found = results.setdefault(file, {"hypothesis": 0, "atheris": 0, "accepted": 0, "failures": []})
            wanted = options.inputs * share // 1000 * (turn + 1) // ROUNDS
            for number, (name, engine) in enumerate(engines.items()):
                left = wanted - found["hypothesis"] - found["atheris"]
                if left > 0:
                    run_block(file, name, engine, -(-left // (len(engines) - number)), found)
                    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        total = sum(found["hypothesis"] + found["atheris"] for found in results.values())
        failures = sum(len(found["failures"]) for found in results.values())
        print(f"{total:,} inputs, {failures} failures", flush=True)


Engine = Callable[[str, int, int], None]


def import_readers() -> dict[str, Engine]:
    """Import all that is fuzzed, so that atheris sees which lines run; the engines that there are."""
    if importlib.util.find_spec("atheris") is None:
        import fuzzing

        fuzzing.made()
        return {"hypothesis": run_hypothesis}
    import atheris

    with atheris.instrument_imports(include=["fairpruner"]):
        import fuzzing
    fuzzing.made()
    return {"hypothesis": run_hypothesis, "atheris": run_atheris}


def run_block(file: str, name: str, engine: Engine, inputs: int, found: dict[str, Any]) -> None:
    """A block of inputs in a process of its own, which may run out of time or memory."""
    with tempfile.TemporaryDirectory() as folder:
        process = multiprocessing.get_context("fork").Process(
            target=in_folder, args=(folder, engine, file, found[name], inputs)
        )
        process.start()
        process.join()
        report = Path(folder) / "report.json"
        if not report.exists():
            errors = (Path(folder) / "output.txt").read_text(errors="replace")
            found["failures"].append({"engine": name, "seed": found[name], "error": errors[-300:]})
            return
        told = json.loads(report.read_text())
        found[name] += told["inputs"]
        found["accepted"] += told["accepted"]
        found["failures"] += told["failures"]


def in_folder(folder: str, engine: Engine, file: str, seed: int, inputs: int) -> None:
    os.chdir(folder)
    os.dup2(os.open("output.txt", os.O_WRONLY | os.O_CREAT), 2)
    os.dup2(2, 1)
    engine(file, seed, inputs)


class Counter:
    """Runs single inputs and writes down how many, and those that failed."""

    def __init__(self, file: str) -> None:
        from fuzzing import run_case

        self.file, self.run_case = file, run_case
        self.told: dict[str, Any] = {"inputs": 0, "accepted": 0, "failures": []}
        signal.signal(signal.SIGALRM, late)

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

    def write(self) -> None:
        del self.told["failures"][5:]  # one fault fails often
        Path("report.json").write_text(json.dumps(self.told))


def late(*_: object) -> None:
    raise TimeoutError(f"a case took more than {SECONDS} s")


def run_hypothesis(file: str, number: int, inputs: int) -> None:
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from hypothesis import strategies as st

    count = Counter(file)

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

    with limited():
        check()
    count.write()


def run_atheris(file: str, number: int, inputs: int) -> None:
    import atheris

    count = Counter(file)
    flags = [sys.argv[0], f"-runs={inputs}", "-max_len=96", "-len_control=0", f"-seed={number + 1}"]

    def one(data: bytes) -> None:
        count(data)
        if count.told["inputs"] >= inputs:
            count.write()
            os._exit(0)  # libFuzzer would end the process by itself, without a word to Python

    atheris.Setup(flags, one)
    with limited():
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
    rows = []
    for name, found in pages.results("fuzz").items():
        rows.append((name, found["hypothesis"], found["atheris"], found["accepted"], len(found["failures"])))
    rows.append(("all", *(sum(row[column] for row in rows) for column in range(1, 5))))
    head = ["file", "by hypothesis", "by atheris", "accepted and right", "failures"]
    return pages.table(head, [(name, *(f"{number:,}" for number in numbers)) for name, *numbers in rows])


if __name__ == "__main__":
    main()
