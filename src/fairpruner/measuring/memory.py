"""Peak memory: of a new process that only loads and runs the model, and of a GPU."""

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
from fairpruner.models.calling import call_directly, copied, tensors_of
from fairpruner.models.devices import device_of_example


class _Tensors(nn.Module):
    """A model whose output is a tuple of tensors: the new process cannot import other output classes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(tensors_of(self.model(*args, **kwargs)))


def peak_resident(model: nn.Module, example: Any, threads: int) -> dict[str, int]:
    """Resident bytes of a new process: `idle` with torch imported, `peak` after running the model.

    The model is passed as a file of `torch.export`, which needs neither its code nor a pickle.
    """
    if not Path("/proc/self/status").exists():
        raise FairprunerError(
            "Peak memory is read from /proc, which is not on this system: give memory=False."
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt2"
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")  # the exporter prints deprecation warnings about itself
                given = {**example, "use_cache": False} if generates(model, example) else example
                torch.export.save(exported(_Tensors(model), given), path)
        except Exception as error:  # the exporter raises exceptions of many classes
            first_line = (str(error).strip().splitlines() or [""])[0]
            raise FairprunerError(
                f"torch.export cannot export {type(model).__name__}: {first_line}"
            ) from error
        program = Path(__file__).with_name("memory_process.py")
        command = [sys.executable, "-W", "ignore", str(program), str(path), str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FairprunerError(
            "The process that measures memory failed:"
            f" {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
        )
    found: dict[str, int] = json.loads(done.stdout)
    return found


def peak_gpu(model: nn.Module, example: Any) -> int:
    """The most bytes of the example's GPU that a forward pass needs: the weights, and what it allocates.

    What else is on the GPU, such as another model, does not count.
    """
    device, own = device_of_example(example), copied(example)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with torch.no_grad():
        call_directly(model, own)
    return stored_bytes(model) + torch.cuda.max_memory_allocated(device) - before


def stored_bytes(model: nn.Module) -> int:
    """Bytes of the tensors in a model's state dict; a shared tensor is counted once."""
    tensors = {tensor.data_ptr(): tensor for tensor in model.state_dict().values()}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
