"""Fuzz every reader in a long run that can be stopped and goes on: python benchmarks/fuzz.py --minutes 60

Two engines take turns: a counter, whose n-th case is the same on every machine, and atheris, which looks for
bytes that reach new lines of code (pip install atheris). Counts and failures are kept in
benchmarks/results/fuzz.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torchvision_shim  # noqa: F401  # so that transformers imports

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
RESULTS = Path(__file__).parent / "results" / "fuzz.json"
BLOCK = 500  # cases between two looks at the clock
SECONDS, MEMORY = 30, 4 * 2**30  # that one case may take


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument(
        "--atheris", nargs=2, metavar=("TARGET", "RUNS"), help="one run of atheris, then exit"
    )
    options = parser.parse_args()
    if options.atheris:
        run_atheris(options.atheris[0], int(options.atheris[1]))
        return
    end = time.monotonic() + 60 * options.minutes
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    while time.monotonic() < end:
        for name in targets():
            found = results.setdefault(name, {"counter": 0, "atheris": 0, "accepted": 0, "failures": []})
            count(name, found)
            guided(name, found)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            if time.monotonic() > end:
                break
    print(table(results))


def targets() -> list[str]:
    from fuzzing import TARGETS, made

    made()  # before any limit
    return list(TARGETS)


def count(name: str, found: dict[str, Any]) -> None:
    """The next block of cases of the counter."""
    from fuzzing import run_case

    slow = 10 if name in ("scores", "folder", "checkpoint", "measured", "configuration") else 1
    with limited():
        for number in range(found["counter"], found["counter"] + BLOCK // slow):
            data = random.Random(number).randbytes(48)
            try:
                signal.alarm(SECONDS)
                found["accepted"] += run_case(name, data) == "accepted"
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"[:300]
                found["failures"].append({"bytes": data.hex(), "error": reason})
            finally:
                signal.alarm(0)
            found["counter"] = number + 1


def guided(name: str, found: dict[str, Any]) -> None:
    """A block of cases by atheris, in a process of its own, since it ends its process."""
    runs = 4 * BLOCK // (20 if name in ("scores", "folder", "checkpoint", "measured", "configuration") else 1)
    with TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--atheris", name, str(runs)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if "No module named 'atheris'" in done.stderr:
            return
        for crash in Path(folder).glob("crash-*"):
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            error = next((line for line in lines if "Error" in line), lines[-1] if lines else "")
            found["failures"].append({"bytes": crash.read_bytes().hex(), "error": error[:300]})
        found["atheris"] += runs if done.returncode == 0 else 0


def run_atheris(name: str, runs: int) -> None:
    import atheris

    with atheris.instrument_imports(include=["fairpruner"]):
        from fuzzing import made, run_case
    made()
    warnings.simplefilter("ignore")
    seed = int.from_bytes(random.SystemRandom().randbytes(3), "little") + 1
    flags = [sys.argv[0], f"-runs={runs}", "-max_len=96", "-len_control=0", f"-seed={seed}"]
    atheris.Setup(flags, lambda data: run_case(name, data))
    with limited():
        atheris.Fuzz()


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Inside, memory and the time of one case are bounded."""

    def late(*_: object) -> None:
        raise TimeoutError(f"a case took more than {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    lines = Path("/proc/self/status").read_text().splitlines()
    used = next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmSize"))
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)


def table(results: dict[str, Any]) -> str:
    rows = ["| file | by counter | by atheris | accepted and right | failures |", "|---|---|---|---|---|"]
    for name, found in results.items():
        numbers = (found["counter"], found["atheris"], found["accepted"], len(found["failures"]))
        rows.append(f"| {name} | " + " | ".join(f"{number:,}" for number in numbers) + " |")
    total = sum(found["counter"] + found["atheris"] for found in results.values())
    return "\n".join(rows) + f"\n\n{total:,} cases in all."


if __name__ == "__main__":
    main()
