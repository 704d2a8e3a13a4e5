"""A recovery for tests: everything random in it, small enough for seconds, and able to die at a chosen
moment in a process of its own.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

import fairpruner.core.tensor_files
import fairpruner.inputs.batches
import fairpruner.recovery.training
from fairpruner.recovery import recover
from fairpruner.recovery.history import Epoch
from fairpruner.recovery.recipe import Recipe

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["fairpruner.recovery", "torch._dynamo", "sklearn.datasets"]
)  # imported once for all of them, which takes seconds
RECIPE = Recipe(learning_rate=0.05, ema=0.8, label_smoothing=0.1, checkpoint_every=3)


class Noisy(Dataset[tuple[torch.Tensor, int]]):
    """Digits with noise from every source of random numbers that a dataset may use."""

    def __init__(self, samples: int, noise: float) -> None:
        images, labels = load_digits(return_X_y=True)
        self.x, self.y = (
            torch.from_numpy(images[:samples] / 16).float().view(-1, 1, 8, 8),
            labels[:samples].tolist(),
        )
        self.noise = noise

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.rand(1, 8, 8) + np.random.rand() + random.random()  # noqa: NPY002 (the state that datasets use)
        return self.x[index] + self.noise * noise, self.y[index]


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, 2),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Conv2d(6, 8, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def loaders(workers: int = 0) -> tuple[DataLoader[Any], DataLoader[Any]]:
    return DataLoader(Noisy(200, 0.2), 24, shuffle=True, num_workers=workers), DataLoader(Noisy(100, 0), 50)


def run(folder: Path | None, recipe: Recipe = RECIPE, workers: int = 0) -> dict[str, torch.Tensor]:
    """Everything that comes out of it: the weights, and the numbers of every epoch but its seconds."""
    train, validation = loaders(workers)
    history: list[Epoch] = []
    best = recover(
        net(),
        train,
        epochs=2,
        validation=validation,
        teacher=net(),
        recipe=recipe,
        folder=folder,
        on_epoch=history.append,
    )
    numbers = [
        [e.number, e.learning_rate, e.loss, e.accuracy, e.validation_loss, e.validation_accuracy]
        for e in history
    ]
    return {**best.state_dict(), "history": torch.tensor(numbers, dtype=torch.float64)}


# Functions that a run calls often: a moment of a run is the name here and the number of the call.
MOMENTS: dict[str, tuple[Any, str]] = {
    "step": (fairpruner.recovery.training, "training_loss"),
    "average": (AveragedModel, "update_parameters"),
    "validation": (fairpruner.recovery.training, "mean_loss"),
    "save": (fairpruner.recovery.training, "save_checkpoint"),
    "write": (fairpruner.core.tensor_files, "save_file"),
    "rename": (os, "replace"),
}


def before(moment: str, number: int, act: Callable[[], None]) -> None:
    """Have `act` called before the given call of the moment's function."""
    module, name = MOMENTS[moment]
    usual, calls = getattr(module, name), itertools.count(1)

    def acting(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            if moment == "write":  # a file half written
                Path(arguments[1]).write_bytes(b"half a file")
            act()
        return usual(*arguments, **options)

    setattr(module, name, acting)


def _job(folder: Path, moment: str | None, number: int) -> None:
    torch.set_num_threads(1)
    if moment is not None:
        before(moment, number, lambda: os.kill(os.getpid(), signal.SIGKILL))
    save_file(run(folder), folder / "result.safetensors")


def in_process(target: Callable[..., None], *arguments: Any) -> int:
    """The exit code of a process of its own: minus the signal that killed it."""
    process = PROCESSES.Process(target=target, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode is not None, "the process hangs"
    return process.exitcode


def killed_at(folder: Path, moment: str | None, number: int = 0) -> int:
    return in_process(_job, folder, moment, number)


def plain_net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def plain_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Seven batches: dealt to two processes, the last one is dropped."""
    torch.manual_seed(3)
    return [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(7)]


def _rank(folder: Path, rank: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    history: list[Epoch] = []
    train, validation = loaders()
    best = recover(
        net(),
        train,
        epochs=2,
        validation=validation,
        recipe=RECIPE,
        folder=folder / "checkpoints",
        on_epoch=history.append,
    )
    draws: list[torch.Tensor] = []

    def drawing(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        draws.append(torch.rand(1))
        return F.cross_entropy(output, label)

    plain = recover(plain_net(), plain_data(), epochs=2, recipe=Recipe(loss=drawing))
    numbers = {
        "accuracy": torch.tensor([e.validation_accuracy for e in history]),
        "loss": torch.tensor([e.validation_loss for e in history]),
    }
    plain_weights = {f"plain.{name}": tensor for name, tensor in plain.named_parameters()}
    save_file(
        {**best.state_dict(), **plain_weights, **numbers, "draw": draws[0]},
        folder / f"rank{rank}.safetensors",
    )
    torch.distributed.barrier()  # with torch 2.7, destroying the group may hang if the other process is ahead
    torch.distributed.destroy_process_group()


def two_ranks(folder: Path, port: int) -> list[dict[str, torch.Tensor]]:
    """The result of each of two processes that train together over gloo."""
    processes = [PROCESSES.Process(target=_rank, args=(folder, rank, port)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
    assert [process.exitcode for process in processes] == [0, 0]
    return [load_file(folder / f"rank{rank}.safetensors") for rank in (0, 1)]
