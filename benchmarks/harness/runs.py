"""Runs a benchmark row by row: what is stored already is not measured again.

A benchmark is a module with three functions. `cases(quick)` yields the fields that name each row, the most
telling row first; a quick run has fewer and smaller cases. `measure(case, shared)` returns the other fields
of the row. `page()` makes Markdown of the stored rows; if it has a `pages.picture`, `plot()` makes that
figure with matplotlib.

Each row is stored as soon as it is measured, with the processor time it took and the number of its run. A
run records its command, date, machine, versions and where the data came from. Quick runs are stored apart
and fill no document.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

from harness import pages

Row = dict[str, Any]
PACKAGES = ("fairpruner", "torch", "torchvision", "timm", "transformers", "onnxruntime", "openvino")


def main(module: ModuleType, arguments: list[str]) -> None:
    """Measure what is missing, then make the page."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {module.__name__}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a few minutes, stored apart from the results")
    parser.add_argument(
        "--shared",
        type=Path,
        help="folder with data and weights; without one, torchvision downloads what it has",
    )
    parser.add_argument("--table", action="store_true", help="measure nothing, only make the page anew")
    parser.add_argument(
        "--only", action="append", default=[], metavar="FIELD=VALUE", help="measure only these rows"
    )
    options = parser.parse_args(arguments)
    if options.shared and not options.shared.is_dir():
        parser.error(f"--shared {options.shared} is no folder. Name one, or leave the option out.")
    shared = options.shared or Path("../shared")
    if options.quick:
        pages.RESULTS = pages.RESULTS / "quick"
    if hasattr(module, "cases") and not options.table:
        chosen = [field.split("=", 1) for field in options.only]
        cases = [c for c in module.cases(options.quick) if all(str(c.get(k)) == v for k, v in chosen)]
        # Without --shared, which is a path of this machine.
        words = [
            module.__name__,
            *["--quick"] * options.quick,
            *(f"--only {field}" for field in options.only),
        ]
        run(module, cases, shared, "python -m benchmarks " + " ".join(words))
    text = module.page()
    if options.quick:
        print(text)
    else:
        pages.fill(module.__name__, text)
        pages.draw(module)


def run(module: ModuleType, cases: list[Row], shared: Path, command: str) -> None:
    """Measure the cases that have no row yet, store and print each, and estimate how long the others take."""
    import torch

    from fairpruner.measuring.timing import machine

    missing = [case for case in cases if not done(module.__name__, case)]
    print(f"{module.__name__}: {len(cases) - len(missing)} of {len(cases)} rows are stored", flush=True)
    about = {
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "machine": f"{machine()}, {torch.get_num_threads()} threads",
        "data": "shared folder" if shared.is_dir() else "downloaded by torchvision",
    }
    start = time.perf_counter()
    for number, case in enumerate(missing, 1):
        before = sum(os.times()[:4])
        row = {**case, **module.measure(case, shared)}
        row["cpu_s"] = round(sum(os.times()[:4]) - before, 1)
        _store(module.__name__, row, {**about, "versions": _versions()})
        left = (time.perf_counter() - start) / number * (len(missing) - number)
        print(f"{row}\n{number} of {len(missing)}, about {left / 60:.0f} minutes left", flush=True)


def stored(name: str) -> list[Row]:
    """All rows of a benchmark."""
    found: list[Row] = pages.results(name).get("rows", [])
    return found


def done(name: str, case: Row) -> bool:
    """Whether a row of this case is stored."""
    return any(case.items() <= row.items() for row in stored(name))


def _store(name: str, row: Row, about: Row) -> None:
    """Add a row to what the file holds by now, so that two processes can share a benchmark."""
    content = pages.results(name) or {"runs": [], "rows": []}
    if about not in content["runs"]:
        content["runs"].append(about)
    content["rows"].append({**row, "run": content["runs"].index(about)})
    pages.store(name, content)


def _versions() -> dict[str, str]:
    """The packages that are in use."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        if package in sys.modules:
            found[package] = importlib.metadata.version(package)
    return found
