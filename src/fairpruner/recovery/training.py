"""Fine-tuning a cut model with accelerate; the launch decides on devices, processes and precision."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, astuple, replace
from pathlib import Path
from threading import Event
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairpruner.core.reading import understanding
from fairpruner.core.sealed import Json
from fairpruner.errors import FairprunerError, check_whole_number, import_extra
from fairpruner.inputs.batches import Batch, check_rereadable, forward
from fairpruner.inputs.losses import mean_loss
from fairpruner.inputs.workers import naming_dead_workers
from fairpruner.models.devices import device_of_model, devices_of_model
from fairpruner.models.narrowing import copy_with
from fairpruner.models.randomness import random_state_kept
from fairpruner.recovery.averaging import ema_of
from fairpruner.recovery.checkpoints import (
    FILE,
    Checkpoint,
    fill,
    identity,
    load_checkpoint,
    optimizer_state,
    restore_optimizer,
    save_checkpoint,
    tensors_of_model,
)
from fairpruner.recovery.data import (
    COMPUTING,
    epoch_batches,
    reseed,
    shard,
    steps_of,
)
from fairpruner.recovery.history import Epoch, Tally
from fairpruner.recovery.interrupts import noticing_interrupts
from fairpruner.recovery.progress import ShowProgress, training_bar
from fairpruner.recovery.recipe import Recipe, training_loss

if TYPE_CHECKING:
    from accelerate import Accelerator

SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")  # ways to launch in which no process holds the whole model


@naming_dead_workers()
def recover(
    small: nn.Module,
    train: Iterable[Any],
    *,
    epochs: int,
    validation: Iterable[Any] | None = None,
    teacher: nn.Module | None = None,
    recipe: Recipe | None = None,
    folder: str | Path | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
) -> nn.Module:
    """A fine-tuned copy of a model: the best epoch by `validation`, or the last epoch without it.

    The model given is not changed. `train` and `validation` yield batches, as for `score`. `teacher` is a
    model to distil from, usually the model before the cut. A checkpoint is written to `folder` every
    `recipe.checkpoint_every` steps; the same call with the same folder resumes from it. `on_epoch` is called
    with an `Epoch` after each epoch: `on_epoch=history.append` collects them.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> train = [(torch.randn(16, 4), torch.arange(16) % 2) for _ in range(4)]
    >>> history = []
    >>> better = recover(net, train, epochs=2, validation=train, on_epoch=history.append)
    >>> [epoch.number for epoch in history], better is net
    ([1, 2], False)
    """
    check_whole_number("epochs", epochs)
    for name, data in (("training", train), ("validation", validation)):
        check_rereadable(data, "every epoch reads it", name=f"{name} data")
    training = _Training(
        _accelerator(),
        small,
        recipe or Recipe(),
        epochs,
        teacher,
        Path(folder) if folder is not None else None,
    )
    training.set_data(train, validation)
    training.resume()
    quiet = not training.accelerator.is_main_process
    with (
        random_state_kept(devices_of_model(training.net)),
        noticing_interrupts() as stop,
        training_bar(epochs, training.steps, quiet=quiet) as show,
    ):
        training.run(on_epoch or (lambda epoch: None), stop, show)
    return copy_with(small, lambda name, tensor: training.best[name].to(tensor.device))


def _accelerator() -> Accelerator:
    """The accelerator of this launch.

    Raises unless accelerate joined all launched processes; otherwise each would train alone.
    """
    launched = (
        dist.get_world_size()
        if dist.is_available() and dist.is_initialized()
        else int(os.environ.get("WORLD_SIZE", "1"))
    )
    accelerate = import_extra("accelerate", "train", "Recovery")
    on_cpu = launched > 1 and not torch.accelerator.is_available()
    accelerator: Accelerator = accelerate.Accelerator(cpu=on_cpu)
    if accelerator.num_processes != launched:
        raise FairprunerError(
            f"{launched} processes were launched, but accelerate joined {accelerator.num_processes}: set"
            " ACCELERATE_USE_CPU=true to train on the CPU, and create no Accelerator before recover."
        )
    if accelerator.distributed_type.value in SHARDED:
        raise FairprunerError(
            f"recover was launched with {accelerator.distributed_type.value}, expected one process or"
            " data-parallel processes: launch it with torchrun or accelerate without sharding."
        )
    return accelerator


def _is_spread(model: nn.Module) -> bool:
    return len(devices_of_model(model)) > 1


class _Training:
    """The state of one training run."""

    def __init__(
        self,
        accelerator: Accelerator,
        small: nn.Module,
        recipe: Recipe,
        epochs: int,
        teacher: nn.Module | None,
        folder: Path | None,
    ) -> None:
        self.accelerator, self.recipe, self.epochs, self.folder = accelerator, recipe, epochs, folder
        self.teacher = None if teacher is None else self._placed(copy.deepcopy(teacher)).eval()
        self.net = self._placed(copy.deepcopy(small))
        self.device = device_of_model(self.net)
        self.average = ema_of(self.net, recipe.ema) if recipe.ema else None
        optimizer = recipe.make_optimizer(self.net)
        self.rates = [group["lr"] for group in optimizer.param_groups]
        # self.model is self.net, wrapped as the launch requires.
        self.model, self.optimizer = accelerator.prepare(
            self.net, optimizer, device_placement=[not _is_spread(self.net)] * 2
        )
        self.settings: Json = {
            **identity(small),
            **recipe.settings(),
            "teacher": None if teacher is None else identity(teacher),
            "epochs": epochs,
            "processes": accelerator.num_processes,
            "accumulated batches": accelerator.gradient_accumulation_steps,
            "precision": accelerator.mixed_precision,
        }
        self.epoch = self.position = 0  # of the next batch
        self.unsaved = 0  # steps since the last checkpoint
        self.whole = True  # no accumulated gradients are pending; a checkpoint does not hold them
        self.tally = Tally()
        self.history: list[Epoch] = []
        self.best: dict[str, Tensor] = {}
        self.best_epoch: Epoch | None = None

    def _placed(self, model: nn.Module) -> nn.Module:
        """The model on the device of this process; one spread over several devices stays where it lies."""
        if not _is_spread(model):
            return model.to(self.accelerator.device)
        if self.accelerator.num_processes > 1:
            raise FairprunerError(
                f"{type(model).__name__} is spread over {len(devices_of_model(model))} devices, and"
                f" {self.accelerator.num_processes} processes were launched: recover it in one process."
            )
        return model

    def set_data(self, train: Iterable[Any], validation: Iterable[Any] | None) -> None:
        """Select the batches of this process."""
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        self.train = shard(train, rank, processes, even=True)
        self.validation = shard(validation, rank, processes, even=False) if validation is not None else None
        self.steps = steps_of(self.train)  # in an epoch
        self.settings["batches in an epoch"] = self.steps

    def run(self, on_epoch: Callable[[Epoch], None], stop: Event, show: ShowProgress) -> None:
        """Train to the end; for epochs from the checkpoint, only `on_epoch` is called."""
        for epoch in self.history:
            on_epoch(epoch)
        while self.epoch < self.epochs:
            self._train_epoch(stop, show)
            self._close_epoch()
            on_epoch(self.history[-1])
            self._save()
            self._stop_if_interrupted(stop)

    def _train_epoch(self, stop: Event, show: ShowProgress) -> None:
        """Train on the remaining batches of the current epoch."""
        try:
            for batch in epoch_batches(self.train, self.device, self.recipe.seed, self.epoch, self.position):
                self._step(batch)
                show(self.epoch, self.position, self.tally)
                if self.unsaved >= self.recipe.checkpoint_every:
                    self._save()
                self._stop_if_interrupted(stop)
        except RuntimeError:
            if self.accelerator.num_processes == 1:
                # Ctrl-C also ends the worker processes of a loader, which then raises.
                self._stop_if_interrupted(stop)
            raise
        if not self.position:
            raise FairprunerError(
                "The training data holds no samples: give a loader, or a list of batches, that yields at"
                " least one."
            )

    def _step(self, batch: Batch) -> None:
        start = perf_counter()
        reseed(
            self.device,
            self.recipe.seed,
            self.epoch,
            self.position,
            COMPUTING + self.accelerator.process_index,
        )
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * self._factor(self.position)
        self.model.train()
        try:
            with self.accelerator.accumulate(self.model):
                output = forward(self.model, batch)
                with self.accelerator.autocast():
                    loss = training_loss(self.recipe, output, batch, self.teacher)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
        except FairprunerError as error:
            rate = self.optimizer.param_groups[0]["lr"]
            raise FairprunerError(
                f"Recovery failed in epoch {self.epoch + 1}, at its batch {self.position} and a learning rate"
                f" of {rate:.3g}. {error}"
            ) from error
        self.whole = self.accelerator.sync_gradients
        if self.average is not None and self.whole:
            self.average.update_parameters(self.net)
        self.position, self.unsaved = self.position + 1, self.unsaved + 1
        self.tally.add(float(loss.detach()), output, batch)
        self.tally.seconds += perf_counter() - start

    def _factor(self, position: int) -> float:
        """The factor of the learning rate at a batch; for data without a length it changes per epoch only."""
        return self.recipe.factor((self.epoch + (position / self.steps if self.steps else 0)) / self.epochs)

    def _close_epoch(self) -> None:
        """Validate the epoch, and keep its weights if they are the best so far."""
        start = perf_counter()
        judged = self.net if self.average is None else self.average.module
        if self.accelerator.num_processes > 1:
            from accelerate.utils import broadcast

            # Each process has its own running statistics. Those of the first process are used.
            broadcast(dict(judged.named_buffers()))
        trained = self._total(self.tally)
        validated = (
            self._total(self._validate(judged, self.validation)) if self.validation is not None else None
        )
        if validated is not None and not validated.samples:
            raise FairprunerError(
                "The validation data holds no samples: give a loader, or a list of batches, that yields at"
                " least one."
            )
        epoch = Epoch(
            number=self.epoch + 1,
            learning_rate=self.rates[0] * self._factor(self.position - 1),
            loss=trained.mean_loss,
            accuracy=trained.accuracy,
            validation_loss=validated.mean_loss if validated is not None else None,
            validation_accuracy=validated.accuracy if validated is not None else None,
            seconds=self.tally.seconds + perf_counter() - start,
        )
        self.history.append(epoch)
        if epoch.better_than(self.best_epoch):
            self.best_epoch, self.best = (
                epoch,
                {name: tensor.clone() for name, tensor in tensors_of_model(judged).items()},
            )
        self.epoch, self.position, self.tally = self.epoch + 1, 0, Tally()

    def _validate(self, model: nn.Module, data: Iterable[Any]) -> Tally:
        tally = Tally()
        model.train().eval()  # train() makes modules drop tensors that they derived from old weights
        with torch.no_grad(), self.accelerator.autocast():
            for batch in epoch_batches(data, self.device, self.recipe.seed, self.epoch, 0):
                output = forward(model, batch)
                tally.add(float(mean_loss(self.recipe.loss, output, batch)), output, batch)
        return tally

    def _total(self, tally: Tally) -> Tally:
        """The sums over all processes; the time is that of this process."""
        return replace(Tally(*self._summed(*astuple(tally))), seconds=tally.seconds)

    def _summed(self, *numbers: float) -> list[float]:
        if self.accelerator.num_processes == 1:
            return list(numbers)
        total: list[float] = self.accelerator.reduce(
            torch.tensor(numbers, dtype=torch.float64, device=self.accelerator.device), "sum"
        ).tolist()
        return total

    def _stop_if_interrupted(self, stop: Event) -> None:
        """Save and raise KeyboardInterrupt if Ctrl-C was pressed in any process.

        While gradients accumulate, this waits for the next optimizer step.
        """
        if self.epoch == self.epochs or not self.whole or not self._summed(stop.is_set())[0]:
            return
        self._save()
        where = f"Stopped in epoch {self.epoch + 1} of {self.epochs}, {self.position} batches into it"
        if self.folder is None:
            raise KeyboardInterrupt(f"{where}; nothing was saved, because no folder was given.")
        raise KeyboardInterrupt(f"{where}, and saved as {self.folder / FILE}: run the same again to resume.")

    def _save(self) -> None:
        if self.folder is None or not (self.whole or self.epoch == self.epochs):
            return
        self.unsaved = 0
        tally = self._total(self.tally)
        if not self.accelerator.is_main_process:
            return
        memory, plain = optimizer_state(self.optimizer.optimizer)
        tensors = {"model": tensors_of_model(self.net), "best": self.best, "optimizer": memory}
        if self.average is not None:
            tensors["average"] = tensors_of_model(self.average.module)
        content: Json = {
            "epoch": self.epoch,
            "position": self.position,
            "tally": asdict(tally),
            "history": [asdict(epoch) for epoch in self.history],
            "best": self.best_epoch.number if self.best_epoch is not None else None,
            "optimizer": plain,
            "scaler": self.accelerator.scaler.state_dict() if self.accelerator.scaler is not None else None,
        }
        save_checkpoint(Checkpoint(tensors, content), self.folder, self.settings)

    def resume(self) -> None:
        """Load the folder's checkpoint; without one, save the start, so that a folder that cannot be
        written is found at once.
        """
        checkpoint = load_checkpoint(self.folder, self.settings, self.net) if self.folder else None
        self.accelerator.wait_for_everyone()  # all processes must have read before one writes
        if checkpoint is None:
            self._save()
            return
        with understanding(f"the checkpoint in {self.folder}"):
            self._restore(checkpoint)

    def _restore(self, checkpoint: Checkpoint) -> None:
        tensors, content = checkpoint.tensors, checkpoint.content
        fill(self.net, tensors["model"])
        if self.average is not None:
            fill(self.average.module, tensors["average"])
        restore_optimizer(self.optimizer.optimizer, tensors["optimizer"], content["optimizer"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(content["scaler"])
        self.epoch, self.position = content["epoch"], content["position"]
        if self.accelerator.is_main_process:  # the checkpoint holds the sums of all processes
            self.tally = Tally(**content["tally"])
        self.history = [Epoch(**epoch) for epoch in content["history"]]
        self.best = dict(tensors["best"])
        self.best_epoch = self.history[content["best"] - 1] if content["best"] is not None else None
