"""A separate program that imports only torch, loads an exported model, runs it and prints its peak memory.

python memory_process.py MODEL.pt2 THREADS  ->  {"idle": bytes before loading, "peak": most bytes}
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import torch


def resident(field: str) -> int:
    """A field of /proc/self/status in bytes.

    psutil has no peak on Linux, and the peak of `getrusage` includes the parent process.
    """
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def warm_up() -> None:
    """Load and run a tiny model, so that modules and threads of torch are counted as idle memory."""
    file = io.BytesIO()
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),)), file)
    file.seek(0)
    torch.export.load(file).module()(torch.zeros(1, 2))


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    warm_up()
    idle = resident("VmRSS")
    program = torch.export.load(sys.argv[1])
    args, kwargs = program.example_inputs
    with torch.no_grad():
        program.module()(*args, **kwargs)
    print(json.dumps({"idle": idle, "peak": resident("VmHWM")}))
