"""The benchmarks.

    python -m benchmarks                                   # a list of them, and what is stored
    python -m benchmarks NAME --shared ../shared           # measure what is not stored yet
    python -m benchmarks NAME --quick                      # see it run, in a few minutes
    python -m benchmarks NAME --table                      # only make its page from what is stored
    python -m benchmarks --table                           # all pages

One thread, or as many as OMP_NUM_THREADS says.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # benchmarks import each other by name

from harness import pages, runs  # noqa: E402


def main(arguments: list[str]) -> None:
    titles = pages.titles()
    if not arguments:
        print(__doc__)
        for name, title in titles.items():
            count = len(runs.stored(name))
            kept = f"{count} rows" if count else "stored" if pages.results(name) else ""
            print(f"{name:20} {kept:>9}  {title}")
    elif arguments == ["--table"]:
        for name in titles:
            if any(pages.shown(name, document) is not None for document in pages.DOCUMENTS):
                module = importlib.import_module(name)
                pages.fill(name, module.page())
                pages.draw(module)
    elif arguments[0] in titles:
        name, *options = arguments
        module = importlib.import_module(name)
        import torch  # after the benchmark, which may set how torch starts its threads

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch.jit, in `top1`
        runs.main(module, options)
    else:
        raise SystemExit(f"There is no benchmark {arguments[0]}. There are: {', '.join(titles)}.")


if __name__ == "__main__":
    main(sys.argv[1:])
