"""The settings of `recover`: the paper's recipe by default."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from fairpruner.errors import FairprunerError, unknown
from fairpruner.inputs.batches import Batch, forward
from fairpruner.inputs.losses import Loss, logits_of, mean_loss
from fairpruner.models.calling import describe
from fairpruner.models.torch_private import AnyBatchNorm

MakeOptimizer = Callable[[list[nn.Parameter], "Recipe"], Optimizer]
Schedule = Callable[[float], float]  # share of the training done, in [0, 1) -> factor of the learning rate

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters, recipe: torch.optim.SGD(
        parameters, recipe.learning_rate, momentum=0.9, weight_decay=recipe.weight_decay
    ),
    "adamw": lambda parameters, recipe: torch.optim.AdamW(
        parameters, recipe.learning_rate, weight_decay=recipe.weight_decay
    ),
}
SCHEDULES: dict[str, Schedule] = {
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "linear": lambda done: 1 - done,
    "constant": lambda done: 1.0,
}
# precision of products -> accelerate's name of it
PRECISIONS = {"auto": "", "float32": "no", "bfloat16": "bf16"}
# For a few epochs with a teacher. On a ResNet-20, a rate of 0.02 helped with 2,000 images and with 40,000.
# A rate of 0.05 helped more with 40,000 images, but did harm with 2,000. The settings of AdamW are usual ones
# for fine-tuning; no others were compared.
SHORT: dict[str, Any] = {"distillation": 0.9, "precision": "auto"}
WITH_BATCH_NORMS: dict[str, Any] = {"learning_rate": 0.02, "weight_decay": 5e-4}
WITHOUT: dict[str, Any] = {"optimizer": "adamw", "learning_rate": 2e-4, "weight_decay": 0.05}


@dataclass(frozen=True)
class Recipe:
    """The settings of `recover`; the defaults are the paper's fine-tuning, except its batch size of 256.

    The batch size is a setting of the data loader. `optimizer` and `schedule` are names or functions:
    (parameters, recipe) -> optimizer, and share of the training done -> factor of the learning rate.
    `loss(output, label)` is cross-entropy by default.

    >>> Recipe(optimizer="adamw", learning_rate=1e-3, ema=0.99).schedule
    'cosine'
    """

    optimizer: str | MakeOptimizer = "sgd"  # with momentum 0.9
    learning_rate: float = 0.005
    weight_decay: float = 0.0
    schedule: str | Schedule = "cosine"
    loss: Loss | None = None
    label_smoothing: float = 0.0
    ema: float = 0.0  # decay of the average of the weights, which is then validated and returned; 0 is off
    distillation: float = 0.5  # weight of the distillation loss, if there is a teacher
    temperature: float = 4.0  # of the distillation loss
    precision: str = "float32"  # of products; or "bfloat16", or "auto" for bfloat16 where it is faster
    seed: int = 0
    checkpoint_every: int = 500  # training steps

    def __post_init__(self) -> None:
        for what, value, table in (
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("schedule", self.schedule, SCHEDULES),
            ("precision", self.precision, PRECISIONS),
        ):
            if not callable(value) and value not in table:
                raise unknown(what, value, table)
        for name, (fits, expected) in RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not fits(value):
                raise FairprunerError(f"Recipe {name}={value!r}, expected {expected}.")
        if self.loss is not None and self.label_smoothing:
            raise FairprunerError(
                f"Recipe label_smoothing={self.label_smoothing:g} applies to cross-entropy, which loss="
                " replaces: give one of the two."
            )

    @classmethod
    def short_for(cls, model: nn.Module) -> Recipe:
        """The recipe for a few epochs with a teacher, which `prune` uses.

        Networks with batch norms are trained by SGD, others, such as transformers, by AdamW.

        >>> Recipe.short_for(nn.Linear(3, 2)).optimizer
        'adamw'
        """
        normed = any(isinstance(module, AnyBatchNorm) for module in model.modules())
        return cls(**SHORT, **(WITH_BATCH_NORMS if normed else WITHOUT))

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """An optimizer for all parameters that are not frozen."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not parameters:
            raise FairprunerError(
                f"There is nothing to train in {type(model).__name__}: all {len(list(model.parameters()))}"
                " parameters are frozen. Call requires_grad_() on it."
            )
        make = OPTIMIZERS[self.optimizer] if isinstance(self.optimizer, str) else self.optimizer
        return make(parameters, self)

    def factor(self, done: float) -> float:
        """The factor of the learning rate when this share of the training is done."""
        schedule = SCHEDULES[self.schedule] if isinstance(self.schedule, str) else self.schedule
        return schedule(done)

    def settings(self) -> dict[str, Any]:
        """The settings that the result depends on, as JSON values; a function is given by its name."""
        settings = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "checkpoint_every":
                name = getattr(value, "__qualname__", type(value).__qualname__)
                settings[field.name] = name if callable(value) else value
        return settings


# field -> (whether a number is valid, what is expected)
RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "learning_rate": (lambda x: 0 < x < math.inf, "a number above 0"),
    "weight_decay": (lambda x: 0 <= x < math.inf, "a number of at least 0"),
    "label_smoothing": (lambda x: 0 <= x < 1, "a share in [0, 1)"),
    "ema": (lambda x: 0 <= x < 1, "a decay in [0, 1), such as 0.999"),
    "distillation": (lambda x: 0 <= x <= 1, "a share in [0, 1]"),
    "temperature": (lambda x: 0 < x < math.inf, "a number above 0"),
    "seed": (lambda x: x >= 0 and isinstance(x, int), "a whole number of at least 0"),
    "checkpoint_every": (lambda x: x >= 1 and isinstance(x, int), "a whole number of steps of at least 1"),
}


def training_loss(recipe: Recipe, output: Any, batch: Batch, teacher: nn.Module | None) -> Tensor:
    """The loss to minimise: (1 - d)·((1 - s)·loss + s·uniform) + d·T²·KL(teacher ‖ model).

    s is the label smoothing, d the weight of the distillation and T its temperature.
    """
    loss = mean_loss(recipe.loss, output, batch)
    if recipe.label_smoothing:
        # Cross-entropy against the uniform distribution. The sum equals torch's label smoothing.
        uniform = -F.log_softmax(_logits("model", output), dim=-1).mean()
        loss = (1 - recipe.label_smoothing) * loss + recipe.label_smoothing * uniform
    if teacher is not None and recipe.distillation:
        distilled = _distillation(recipe.temperature, output, batch, teacher)
        loss = (1 - recipe.distillation) * loss + recipe.distillation * distilled
    return loss


def _distillation(temperature: float, output: Any, batch: Batch, teacher: nn.Module) -> Tensor:
    """Hinton's distillation loss, averaged over all predictions of a batch.

    The factor T² makes its gradient independent of the temperature, to first order.
    """
    with torch.no_grad():
        target = _logits("teacher", forward(teacher, batch))  # [..., C]
    found = _logits("model", output)
    if target.shape != found.shape:
        raise FairprunerError(
            f"The teacher gives logits of shape {list(target.shape)}, the model of {list(found.shape)}: give"
            " the model that was pruned as the teacher."
        )
    # [N, C] each
    log_found, log_target = (
        F.log_softmax(logits.float() / temperature, dim=-1).flatten(0, -2) for logits in (found, target)
    )
    term = temperature**2 * F.kl_div(log_found, log_target, reduction="batchmean", log_target=True)
    if not torch.isfinite(term):
        raise FairprunerError(
            f"The distillation loss of batch {batch.position} is {term.item()}, expected a finite number:"
            " check the teacher's weights."
        )
    return term


def _logits(whose: str, output: Any) -> Tensor:
    """The logits in the output of the model or of the teacher, [..., C]."""
    logits = logits_of(output)
    if logits is None or logits.ndim < 2:
        raise FairprunerError(
            f"The {whose} returned {describe(output)}, expected logits of shape [samples, classes]."
        )
    return logits
