"""Peak memory: of a fresh process that does nothing but load and run the model, and of a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fairpruner.errors import FairprunerError
from fairpruner.measuring.generation import generates
from fairpruner.measuring.runtimes import exported
from fairpruner.measuring.timing import device_of
from fairpruner.models.calling import call_directly, copied, tensors_of


class _Tensors(nn.Module):
    """A model that gives the tensors of its output alone: a process with torch only knows no other
    library's classes.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(tensors_of(self.model(*args, **kwargs)))


def peak_resident(model: nn.Module, example: Any, threads: int) -> dict[str, int]:
    """Bytes of resident memory of a new process: `idle` with torch alone, and the `peak` when it has
    loaded and run the model.

    The model travels as a file of `torch.export`: graph as JSON, weights as they are, no code and no
    pickle of ours.
    """
    if not Path("/proc/self/status").exists():
        raise FairprunerError("Peak resident memory is read from /proc, which this system does not have.")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt2"
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")  # the exporter warns about its own future
                torch.export.save(
                    exported(
                        _Tensors(model),
                        {**example, "use_cache": False} if generates(model, example) else example,
                    ),
                    path,
                )
        except Exception as error:  # it fails in as many ways as there are models
            raise FairprunerError(
                f"torch.export cannot export {type(model).__name__}:"
                f" {(str(error).strip().splitlines() or [''])[0]}"
            ) from error
        command = [
            sys.executable,
            "-W",
            "ignore",
            str(Path(__file__).with_name("fresh.py")),
            str(path),
            str(threads),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FairprunerError(
            "The process that was to measure memory failed:"
            f" {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
        )
    found: dict[str, int] = json.loads(done.stdout)
    return found


def peak_gpu(model: nn.Module, example: Any) -> int:
    """Bytes that torch allocated at most on the example's GPU, the weights among them."""
    device, own = device_of(example), copied(example)
    torch.cuda.reset_peak_memory_stats(device)
    with torch.no_grad():
        call_directly(model, own)
    return torch.cuda.max_memory_allocated(device)
