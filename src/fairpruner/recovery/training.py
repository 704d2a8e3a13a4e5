"""Recover: fine-tune a cut model, on accelerate, so that devices, processes and precision are a matter of
how it is launched.
"""

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

from fairpruner.core.sealed import Json
from fairpruner.errors import FairprunerError, check_whole_number, import_extra
from fairpruner.inputs.batches import Batch, check_rereadable, forward, mean_loss
from fairpruner.models.narrowing import copy_with
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
from fairpruner.recovery.feeding import COMPUTING, deal, epoch_batches, own_randomness, reseed, steps_of
from fairpruner.recovery.history import Epoch, Tally
from fairpruner.recovery.recipe import Recipe, training_loss
from fairpruner.recovery.terminal import Show, noticing_interrupts, training_bar

if TYPE_CHECKING:
    from accelerate import Accelerator

SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")  # ways to launch in which no process holds the whole model


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
    """A fine-tuned copy of a model: its best epoch by `validation`, else its last; the model given is
    untouched.

    `train` and `validation` yield batches, as for `score`. `teacher`, usually the model before the cut,
    is distilled from. `folder` takes a checkpoint every `recipe.checkpoint_every` steps, and the same
    call with the same folder goes on from it. `on_epoch` is called with the `Epoch` after each one:
    `on_epoch=history.append` keeps them all.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> train = [(torch.randn(16, 4), torch.arange(16) % 2) for _ in range(4)]
    >>> history = []
    >>> better = recover(net, train, epochs=2, validation=train, on_epoch=history.append)
    >>> [epoch.number for epoch in history], better is net
    ([1, 2], False)
    """
    check_whole_number("epochs", epochs, 1)
    for name, data in (("training", train), ("validation", validation)):
        check_rereadable(data, "every epoch reads it", name=f"{name} data")
    run = _Run(
        _accelerator(),
        small,
        recipe or Recipe(),
        epochs,
        teacher,
        Path(folder) if folder is not None else None,
    )
    run.feed(train, validation)
    run.resume()
    quiet = not run.accelerator.is_main_process
    with (
        own_randomness(run.accelerator.device),
        noticing_interrupts() as stop,
        training_bar(epochs, run.steps, quiet=quiet) as show,
    ):
        run.go(on_epoch or (lambda epoch: None), stop, show)
    return copy_with(small, lambda name, tensor: run.best[name].to(tensor.device))


def _accelerator() -> Accelerator:
    """Accelerate as it was launched; checked, for it would let processes that it cannot join train each
    for itself.
    """
    launched = (
        dist.get_world_size()
        if dist.is_available() and dist.is_initialized()
        else int(os.environ.get("WORLD_SIZE", "1"))
    )
    devices = getattr(torch, "accelerator", torch.cuda)  # torch.accelerator came with torch 2.6
    accelerate = import_extra("accelerate", "train", "Recovery")
    accelerator: Accelerator = accelerate.Accelerator(cpu=launched > 1 and not devices.is_available())
    if accelerator.num_processes != launched:
        raise FairprunerError(
            f"{launched} processes were launched, and accelerate trains with {accelerator.num_processes}: set"
            " ACCELERATE_USE_CPU=true to train on the CPU, and make no Accelerator before."
        )
    if accelerator.distributed_type.value in SHARDED:
        raise FairprunerError(
            f"recover was launched with {accelerator.distributed_type.value}, expected one process, or"
            " data-parallel ones: launch it so."
        )
    return accelerator


class _Run:
    """One training, from its start or from its checkpoint to its end."""

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
        self.teacher = copy.deepcopy(teacher).to(accelerator.device).eval() if teacher is not None else None
        self.net = copy.deepcopy(small).to(accelerator.device)
        self.average = copy.deepcopy(self.net) if recipe.ema else None
        optimizer = recipe.make_optimizer(self.net)
        self.rates = [group["lr"] for group in optimizer.param_groups]
        self.model, self.optimizer = accelerator.prepare(
            self.net, optimizer
        )  # the same net, wrapped as the launch asks for
        self.settings: Json = {
            **identity(small),
            **recipe.settings(),
            "teacher": None if teacher is None else identity(teacher),
            "epochs": epochs,
            "processes": accelerator.num_processes,
            "accumulated batches": accelerator.gradient_accumulation_steps,
            "precision": accelerator.mixed_precision,
        }
        self.epoch = self.position = 0  # of the next batch to train on
        self.unsaved = 0  # steps since the last checkpoint
        self.whole = True  # no accumulated gradients are waiting: they are in no checkpoint
        self.tally = Tally()
        self.history: list[Epoch] = []
        self.best: dict[str, Tensor] = {}
        self.best_epoch: Epoch | None = None

    def feed(self, train: Iterable[Any], validation: Iterable[Any] | None) -> None:
        """Take this process's part of the data."""
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        self.train = deal(train, rank, processes, even=True)
        self.validation = deal(validation, rank, processes, even=False) if validation is not None else None
        self.steps = steps_of(self.train)  # of an epoch
        self.settings["batches in an epoch"] = self.steps

    def go(self, on_epoch: Callable[[Epoch], None], stop: Event, show: Show) -> None:
        """Train to the end; epochs that the checkpoint holds are only told again."""
        for epoch in self.history:
            on_epoch(epoch)
        while self.epoch < self.epochs:
            self._train(stop, show)
            self._close_epoch()
            on_epoch(self.history[-1])
            self._save()
            self._leave_if(stop)

    def _train(self, stop: Event, show: Show) -> None:
        """The rest of an epoch."""
        try:
            for batch in epoch_batches(
                self.train, self.accelerator.device, self.recipe.seed, self.epoch, self.position
            ):
                self._step(batch)
                show(self.epoch, self.position, self.tally)
                if self.unsaved >= self.recipe.checkpoint_every:
                    self._save()
                self._leave_if(stop)
        except RuntimeError:
            if self.accelerator.num_processes == 1:
                # Ctrl-C ends a loader's worker processes too, and the loader complains
                self._leave_if(stop)
            raise
        if not self.position:
            raise FairprunerError(
                "The training data holds no samples: give a loader, or a list of batches, that yields at"
                " least one."
            )

    def _step(self, batch: Batch) -> None:
        start = perf_counter()
        reseed(
            self.accelerator.device,
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
            _follow(self.average, self.net, self.recipe.ema)
        self.position, self.unsaved = self.position + 1, self.unsaved + 1
        self.tally.add(float(loss.detach()), output, batch)
        self.tally.seconds += perf_counter() - start

    def _factor(self, position: int) -> float:
        """Of the learning rate at a batch of this epoch; data that cannot tell its length changes it from
        epoch to epoch only.
        """
        return self.recipe.factor((self.epoch + (position / self.steps if self.steps else 0)) / self.epochs)

    def _close_epoch(self) -> None:
        """Judge the epoch, and keep its weights if none were better."""
        start = perf_counter()
        judged = self.average if self.average is not None else self.net
        if self.accelerator.num_processes > 1:
            from accelerate.utils import broadcast

            # Each process has running statistics of its own: those of the first count.
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
        model.train().eval()  # modules that keep derived tensors drop them when training starts
        with torch.no_grad(), self.accelerator.autocast():
            for batch in epoch_batches(data, self.accelerator.device, self.recipe.seed, self.epoch, 0):
                output = forward(model, batch)
                tally.add(float(mean_loss(self.recipe.loss, output, batch)), output, batch)
        return tally

    def _total(self, tally: Tally) -> Tally:
        """The sums over all processes; time passes for all at once."""
        return replace(Tally(*self._summed(*astuple(tally))), seconds=tally.seconds)

    def _summed(self, *numbers: float) -> list[float]:
        if self.accelerator.num_processes == 1:
            return list(numbers)
        total: list[float] = self.accelerator.reduce(
            torch.tensor(numbers, dtype=torch.float64, device=self.accelerator.device), "sum"
        ).tolist()
        return total

    def _leave_if(self, stop: Event) -> None:
        """Save and leave if Ctrl-C was pressed in any process; while gradients accumulate, a little
        later.
        """
        if self.epoch == self.epochs or not self.whole or not self._summed(stop.is_set())[0]:
            return
        self._save()
        where = f"Stopped in epoch {self.epoch + 1} of {self.epochs}, {self.position} batches into it"
        if self.folder is None:
            raise KeyboardInterrupt(f"{where}; nothing was saved, for no folder was given.")
        raise KeyboardInterrupt(
            f"{where}, and saved as {self.folder / FILE}: run the same again to go on from there."
        )

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
            tensors["average"] = tensors_of_model(self.average)
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
        """Take up the folder's checkpoint; a folder without one gets the start, which shows now whether
        it can be written.
        """
        checkpoint = load_checkpoint(self.folder, self.settings) if self.folder is not None else None
        self.accelerator.wait_for_everyone()  # all have looked before one writes
        if checkpoint is None:
            self._save()
            return
        tensors, content = checkpoint.tensors, checkpoint.content
        fill(self.net, tensors["model"])
        if self.average is not None:
            fill(self.average, tensors["average"])
        restore_optimizer(self.optimizer.optimizer, tensors["optimizer"], content["optimizer"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(content["scaler"])
        self.epoch, self.position = content["epoch"], content["position"]
        if self.accelerator.is_main_process:  # it holds the sums of all
            self.tally = Tally(**content["tally"])
        self.history = [Epoch(**epoch) for epoch in content["history"]]
        self.best = dict(tensors["best"])
        self.best_epoch = self.history[content["best"] - 1] if content["best"] is not None else None


def _follow(average: nn.Module, model: nn.Module, decay: float) -> None:
    """average = decay · average + (1 - decay) · model, the statistics of norms included; whole numbers
    are taken over.
    """
    with torch.no_grad():
        for mean, now in zip(
            tensors_of_model(average).values(), tensors_of_model(model).values(), strict=True
        ):
            if mean.is_floating_point():
                mean.lerp_(now, 1 - decay)
            else:
                mean.copy_(now)
