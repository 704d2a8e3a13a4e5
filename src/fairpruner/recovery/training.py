"""Fine-tuning a cut model with accelerate; the launch decides on devices, processes and precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import astuple, replace
from pathlib import Path
from threading import Event
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fairpruner.core.reading import understanding
from fairpruner.core.sealed import Json
from fairpruner.errors import FairprunerError, check_whole_number
from fairpruner.inputs.activations import BlockOutputs, blocks_in_common
from fairpruner.inputs.batches import Batch, check_rereadable, forward, no_samples
from fairpruner.inputs.losses import mean_loss
from fairpruner.inputs.same_order import generators_kept
from fairpruner.inputs.workers import naming_dead_workers
from fairpruner.models.copying import deep_copy
from fairpruner.models.devices import device_of_model, devices_of_model
from fairpruner.models.narrowing import copy_with
from fairpruner.models.precision import forget_casts, in_float32
from fairpruner.models.randomness import random_state_kept
from fairpruner.models.supported import check_has_numbers
from fairpruner.models.torch_private import AnyBatchNorm
from fairpruner.recovery.averaging import ema_of
from fairpruner.recovery.checkpoints import FILE, identity, load_checkpoint, save_checkpoint
from fairpruner.recovery.data import (
    COMPUTING,
    epoch_batches,
    first_batch,
    reseed,
    shard,
    steps_of,
)
from fairpruner.recovery.history import Epoch, Tally
from fairpruner.recovery.interrupts import noticing_interrupts
from fairpruner.recovery.launch import (
    accelerator_of_launch,
    autocast,
    is_spread,
    of_first_process,
    placed,
    precision_of,
    summed,
)
from fairpruner.recovery.loss import training_loss
from fairpruner.recovery.progress import ShowProgress, training_bar
from fairpruner.recovery.recipe import Recipe
from fairpruner.recovery.state import TrainingState

if TYPE_CHECKING:
    from accelerate import Accelerator


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
    if recipe is not None and not isinstance(recipe, Recipe):
        raise FairprunerError(
            f"recipe is {recipe!r}, expected a Recipe: for example recipe=Recipe(learning_rate=0.01)."
        )
    if on_epoch is not None and not callable(on_epoch):
        raise FairprunerError(
            f"on_epoch is {on_epoch!r}, expected a function of an Epoch: for example history.append."
        )
    for net in (small,) if teacher is None else (small, teacher):
        check_has_numbers(net)
    for name, data in (("training", train), ("validation", validation)):
        check_rereadable(data, "every epoch reads it", name=f"{name} data")
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        generators_kept(train, validation),
        accelerator_of_launch() as accelerator,
    ):
        training = _Training(
            accelerator,
            small,
            teacher,
            recipe=recipe or Recipe(),
            epochs=epochs,
            folder=Path(folder) if folder is not None else None,
        )
        training.set_data(train, validation)
        training.resume()
        with (
            random_state_kept(devices_of_model(training.state.net)),
            noticing_interrupts() as stop,
            training_bar(epochs, training.steps, quiet=not accelerator.is_main_process) as show,
        ):
            training.run(on_epoch or (lambda epoch: None), stop, show)
        return copy_with(small, lambda name, tensor: training.state.best[name].to(tensor))


class _Training:
    """One training run: its settings, its data and its state."""

    def __init__(
        self,
        accelerator: Accelerator,
        small: nn.Module,
        teacher: nn.Module | None,
        *,
        recipe: Recipe,
        epochs: int,
        folder: Path | None,
    ) -> None:
        self.accelerator, self.recipe, self.epochs, self.folder = accelerator, recipe, epochs, folder
        self.small = small  # determines how batches are read
        self.teacher = None if teacher is None else placed(deep_copy(teacher), accelerator).eval()
        net = placed(_wide_copy(small), accelerator)
        self.is_wider = [p.dtype for p in net.parameters()] != [p.dtype for p in small.parameters()]
        average = ema_of(net, recipe.ema) if recipe.ema else None
        optimizer = recipe.make_optimizer(net)
        # Their outputs are matched with the teacher's.
        self.blocks = blocks_in_common(net, teacher) if teacher is not None and recipe.matching else []
        self.device = device_of_model(net)
        self.precision = precision_of(recipe.precision, accelerator, net)
        self.rates = [group["lr"] for group in optimizer.param_groups]
        # self.model is the net, wrapped as the launch requires; so is self.optimizer.
        self.model, self.optimizer = accelerator.prepare(
            net, optimizer, device_placement=[not is_spread(net)] * 2
        )
        self.state = TrainingState(net, average, self.optimizer.optimizer, accelerator.scaler)
        self.unsaved = 0  # steps since the last checkpoint
        # A checkpoint does not hold accumulated gradients, so it is written only while none are pending.
        self.no_gradients_pending = True
        # What a checkpoint must agree with to be resumed.
        self.settings: Json = {
            **identity(small),
            **recipe.settings(),
            "teacher": None if teacher is None else identity(teacher),
            "epochs": epochs,
            "processes": accelerator.num_processes,
            "accumulated batches": accelerator.gradient_accumulation_steps,
            "precision": self.precision,
        }

    def set_data(self, train: Iterable[Any], validation: Iterable[Any] | None) -> None:
        """Select the batches of this process."""
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        self.train = shard(train, rank, processes, even=True)
        self.validation = shard(validation, rank, processes, even=False) if validation is not None else None
        self.steps = steps_of(self.train)  # in an epoch
        self.settings["batches in an epoch"] = self.steps
        if self.folder is not None:
            for name, batches in (("training", self.train), ("validation", self.validation)):
                self.settings[f"first batch of the {name} data"] = self._first_batch(batches)

    def _first_batch(self, data: Iterable[Any] | None) -> str | None:
        """A hash of the first process's first batch; None without data."""
        if data is None:
            return None
        mine = first_batch(data, self.device, self.small, seed=self.recipe.seed)
        return of_first_process(self.accelerator, mine)

    def resume(self) -> None:
        """Load the folder's checkpoint; without one, save the start.

        Saving at once shows whether the folder can be written.
        """
        found = load_checkpoint(self.folder, self.settings, self.state.net) if self.folder else None
        self.accelerator.wait_for_everyone()  # all processes must have read before one writes
        if found is None:
            self._save()
            return
        with understanding(f"the checkpoint in {self.folder}"):
            self.state.restore(found, with_tally=self.accelerator.is_main_process)

    def run(self, on_epoch: Callable[[Epoch], None], stop: Event, show: ShowProgress) -> None:
        """Train to the end; for epochs from the checkpoint, only `on_epoch` is called."""
        for epoch in self.state.history:
            on_epoch(epoch)
        while self.state.epoch < self.epochs:
            self._train_epoch(stop, show)
            self._close_epoch()
            on_epoch(self.state.history[-1])
            self._save()
            self._stop_if_interrupted(stop)

    def _train_epoch(self, stop: Event, show: ShowProgress) -> None:
        """Train on the remaining batches of the current epoch."""
        state = self.state
        try:
            for batch in self._batches(self.train, start=state.position):
                self._step(batch)
                show(state.epoch, state.position, state.tally)
                if self.unsaved >= self.recipe.checkpoint_every:
                    self._save()
                self._stop_if_interrupted(stop)
        except RuntimeError:
            if self.accelerator.num_processes == 1:
                # Ctrl-C also ends the worker processes of a loader, which then raises.
                self._stop_if_interrupted(stop)
            raise
        if not state.position:
            raise no_samples("training data")

    def _batches(self, data: Iterable[Any], start: int = 0) -> Iterator[Batch]:
        """The batches of the current epoch."""
        seed, epoch = self.recipe.seed, self.state.epoch
        return epoch_batches(data, self.device, self.small, seed=seed, epoch=epoch, start=start)

    def _step(self, batch: Batch) -> None:
        """Train on one batch."""
        start = perf_counter()
        state = self.state
        stream = COMPUTING + self.accelerator.process_index
        reseed(self.device, self.recipe.seed, state.epoch, state.position, stream)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * self._factor(state.position)
        self.model.train()
        if self.blocks:
            _keep_statistics(self.state.net)
        try:
            with self.accelerator.accumulate(self.model):
                with self._autocast(), BlockOutputs(self.state.net, self.blocks) as outputs:
                    output = self._forward(self.model, batch)
                    loss = training_loss(self.recipe, output, batch, self.teacher, outputs.taken())
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            forget_casts()
        except FairprunerError as error:
            rate = self.optimizer.param_groups[0]["lr"]
            raise FairprunerError(
                f"Recovery failed in epoch {state.epoch + 1}, at its batch {state.position} and a learning"
                f" rate of {rate:.3g}. {error}"
            ) from error
        self.no_gradients_pending = self.accelerator.sync_gradients
        if state.average is not None and self.no_gradients_pending:
            state.average.update_parameters(state.net)
        state.position, self.unsaved = state.position + 1, self.unsaved + 1
        state.tally.add(float(loss.detach()), output, batch)
        state.tally.seconds += perf_counter() - start

    def _autocast(self) -> AbstractContextManager[object]:
        return autocast(self.precision, self.accelerator, self.device)

    def _forward(self, model: nn.Module, batch: Batch) -> Any:
        """The output of a model in training; losses are computed in float32."""
        from accelerate.utils import convert_to_fp32

        if self.is_wider:  # than the model that the inputs are for
            batch = replace(batch, inputs=convert_to_fp32(batch.inputs))
        return forward(model, batch) if self.precision == "no" else convert_to_fp32(forward(model, batch))

    def _factor(self, position: int) -> float:
        """The factor of the learning rate at a batch; for data without a length it changes per epoch only."""
        in_epoch = position / self.steps if self.steps else 0
        return self.recipe.factor((self.state.epoch + in_epoch) / self.epochs)

    def _close_epoch(self) -> None:
        """Validate the epoch and add it to the state."""
        start = perf_counter()
        state = self.state
        if self.accelerator.num_processes > 1:
            from accelerate.utils import broadcast

            # Each process has its own running statistics. Those of the first process are used.
            broadcast(dict(state.judged.named_buffers()))
        trained, validated = self._total(state.tally), self._validate()
        state.close_epoch(
            Epoch(
                number=state.epoch + 1,
                learning_rate=self.rates[0] * self._factor(state.position - 1),
                loss=trained.mean_loss,
                accuracy=trained.accuracy,
                validation_loss=validated.mean_loss if validated is not None else None,
                validation_accuracy=validated.accuracy if validated is not None else None,
                seconds=trained.seconds + perf_counter() - start,
            )
        )

    def _validate(self) -> Tally | None:
        """The tally of all processes on the validation data; None without such data."""
        if self.validation is None:
            return None
        tally, model = Tally(), self.state.judged
        model.train().eval()  # train() makes modules drop tensors that they derived from old weights
        with torch.no_grad(), self._autocast():
            for batch in self._batches(self.validation):
                output = self._forward(model, batch)
                tally.add(float(mean_loss(self.recipe.loss, output, batch)), output, batch)
        total = self._total(tally)
        if not total.samples:
            raise no_samples("validation data")
        return total

    def _total(self, tally: Tally) -> Tally:
        """The sums over all processes; the time is that of this process."""
        return replace(Tally(*summed(self.accelerator, *astuple(tally))), seconds=tally.seconds)

    def _stop_if_interrupted(self, stop: Event) -> None:
        """Save and raise KeyboardInterrupt if Ctrl-C was pressed in any process.

        While gradients accumulate, this waits for the next optimizer step.
        """
        state = self.state
        if state.epoch == self.epochs or not self.no_gradients_pending:
            return
        if not summed(self.accelerator, stop.is_set())[0]:
            return
        self._save()
        where = f"Stopped in epoch {state.epoch + 1} of {self.epochs}, {state.position} batches into it"
        if self.folder is None:
            raise KeyboardInterrupt(f"{where}; nothing was saved, because no folder was given.")
        raise KeyboardInterrupt(f"{where}, and saved as {self.folder / FILE}: run the same again to resume.")

    def _save(self) -> None:
        """Write a checkpoint, if a folder was given and no gradients are pending."""
        finished = self.state.epoch == self.epochs
        if self.folder is None or not (self.no_gradients_pending or finished):
            return
        self.unsaved = 0
        tally = self._total(self.state.tally)
        if self.accelerator.is_main_process:
            save_checkpoint(self.state.checkpoint(tally), self.folder, self.settings)


def _wide_copy(model: nn.Module) -> nn.Module:
    """A copy with float32 in place of float16 and bfloat16, where rounding would undo most updates."""
    return copy_with(model, lambda name, tensor: in_float32(tensor) if tensor.is_floating_point() else tensor)


def _keep_statistics(net: nn.Module) -> None:
    """Let all batch norms use the statistics that they hold."""
    for module in net.modules():
        if isinstance(module, AnyBatchNorm):
            module.eval()
