"""The state of a training run: everything that changes, and so everything that a checkpoint holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from fairpruner.recovery.checkpoints import (
    Checkpoint,
    fill,
    optimizer_state,
    restore_optimizer,
    tensors_of_model,
)
from fairpruner.recovery.history import Epoch, Tally


@dataclass(eq=False)
class TrainingState:
    """The model in training, its optimizer, the place in the data, and the results so far."""

    net: nn.Module
    average: AveragedModel | None  # of the weights, if the recipe asks for it
    optimizer: Optimizer
    scaler: Any  # accelerate's gradient scaler, or None
    epoch: int = 0  # from 0
    position: int = 0  # of the next batch in the epoch
    tally: Tally = field(default_factory=Tally)  # of the epoch so far, in this process
    history: list[Epoch] = field(default_factory=list)
    best: dict[str, Tensor] = field(default_factory=dict)  # the tensors of the best epoch
    best_epoch: Epoch | None = None

    @property
    def judged(self) -> nn.Module:
        """The model that is validated and returned."""
        return self.net if self.average is None else self.average.module

    def close_epoch(self, epoch: Epoch) -> None:
        """Add a finished epoch, keep its weights if they are the best so far, and begin the next one."""
        self.history.append(epoch)
        if epoch.better_than(self.best_epoch):
            self.best_epoch = epoch
            self.best = {name: tensor.clone() for name, tensor in tensors_of_model(self.judged).items()}
        self.epoch, self.position, self.tally = self.epoch + 1, 0, Tally()

    def checkpoint(self, tally: Tally) -> Checkpoint:
        """The state as a checkpoint, with the tally of all processes."""
        memory, plain = optimizer_state(self.optimizer)
        tensors = {"model": tensors_of_model(self.net), "best": self.best, "optimizer": memory}
        if self.average is not None:
            tensors["average"] = tensors_of_model(self.average.module)
        content = {
            "epoch": self.epoch,
            "position": self.position,
            "tally": asdict(tally),
            "history": [asdict(epoch) for epoch in self.history],
            "best": self.best_epoch.number if self.best_epoch is not None else None,
            "optimizer": plain,
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
        }
        return Checkpoint(tensors, content)

    def restore(self, checkpoint: Checkpoint, *, with_tally: bool) -> None:
        """Continue from a checkpoint; only one process takes its tally, which is that of all processes."""
        tensors, content = checkpoint.tensors, checkpoint.content
        fill(self.net, tensors["model"])
        if self.average is not None:
            fill(self.average.module, tensors["average"])
        restore_optimizer(self.optimizer, tensors["optimizer"], content["optimizer"])
        if self.scaler is not None:
            self.scaler.load_state_dict(content["scaler"])
        self.epoch, self.position = content["epoch"], content["position"]
        if with_tally:
            self.tally = Tally(**content["tally"])
        self.history = [Epoch(**epoch) for epoch in content["history"]]
        self.best = dict(tensors["best"])
        self.best_epoch = self.history[content["best"] - 1] if content["best"] is not None else None
