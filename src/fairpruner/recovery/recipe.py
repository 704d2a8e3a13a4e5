"""The settings of `recover`: the paper's recipe by default."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fairpruner.errors import FairprunerError, unknown
from fairpruner.inputs.losses import Loss, checked_task
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
# For a few epochs with a teacher. DISTILLED: on a ResNet-20, a rate of 0.02 helped with 2,000 images and with
# 40,000. MATCHED: a cut and repaired ResNet-56 is so near to its teacher that distilling logits on training
# images, where the teacher is nearly always right, moved it away on other images. Matching the outputs of
# its blocks brought it nearer, and distillation beside it did harm. The rates for networks without batch
# norms are usual ones; no others were compared.
DISTILLED: dict[str, Any] = {"distillation": 0.9, "precision": "auto"}
DISTILLED_NORMED: dict[str, Any] = {"learning_rate": 0.02, "weight_decay": 5e-4}
DISTILLED_OTHERS: dict[str, Any] = {"optimizer": "adamw", "learning_rate": 2e-4, "weight_decay": 0.05}
MATCHED: dict[str, Any] = {"optimizer": "adamw", "distillation": 0.0, "matching": 1.0, "precision": "auto"}
MATCHED_NORMED: dict[str, Any] = {"learning_rate": 1e-3}
MATCHED_OTHERS: dict[str, Any] = {"learning_rate": 1e-4}


@dataclass(frozen=True)
class Recipe:
    """The settings of `recover`; the defaults are the paper's fine-tuning, except its batch size of 256.

    The batch size is a setting of the data loader. `optimizer` and `schedule` are names or functions:
    (parameters, recipe) -> optimizer, and share of the training done -> factor of the learning rate.
    `loss` is a function (output, label) -> mean, or the name of a task; by default the labels show the task.

    >>> Recipe(optimizer="adamw", learning_rate=1e-3, ema=0.99).schedule
    'cosine'
    """

    optimizer: str | MakeOptimizer = "sgd"  # with momentum 0.9
    learning_rate: float = 0.005
    weight_decay: float = 0.0
    schedule: str | Schedule = "cosine"
    loss: Loss | str | None = None
    label_smoothing: float = 0.0
    ema: float = 0.0  # decay of the average of the weights, which is then validated and returned; 0 is off
    distillation: float = 0.5  # weight of the distillation loss, if there is a teacher
    temperature: float = 4.0  # of the distillation loss
    # Weight of the error of all blocks' outputs to the teacher's. Batch norms then keep their statistics.
    matching: float = 0.0
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
        checked_task(self.loss)
        for name, (fits, expected) in RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not fits(value):
                raise FairprunerError(f"Recipe {name}={value!r}, expected {expected}.")
        if self.distillation + self.matching > 1:
            raise FairprunerError(
                f"Recipe distillation={self.distillation:g} and matching={self.matching:g} are shares of one"
                " loss, expected a sum of at most 1."
            )
        if callable(self.loss) and self.label_smoothing:
            raise FairprunerError(
                f"Recipe label_smoothing={self.label_smoothing:g} applies to cross-entropy, which loss="
                " replaces: give one of the two."
            )

    @classmethod
    def short_for(cls, model: nn.Module, *, near: bool = False) -> Recipe:
        """The recipe for a few epochs with a teacher, which `prune` uses.

        It distils the teacher's outputs. `near` is for a repaired model whose blocks give outputs of the
        teacher's shapes: then these outputs are matched, and no labels are needed. Networks with batch
        norms are trained at higher rates than others, such as transformers.

        >>> Recipe.short_for(nn.Linear(3, 2), near=True).matching
        1.0
        """
        normed = any(isinstance(module, AnyBatchNorm) for module in model.modules())
        if near:
            return cls(**MATCHED, **(MATCHED_NORMED if normed else MATCHED_OTHERS))
        return cls(**DISTILLED, **(DISTILLED_NORMED if normed else DISTILLED_OTHERS))

    @property
    def label_weight(self) -> float:
        """The weight of the labels' loss if there is a teacher."""
        return 1 - (self.distillation + self.matching)  # exactly 0 for 0.9 and 0.1

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """An optimizer for all parameters that are not frozen."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not parameters:
            raise FairprunerError(
                f"There is nothing to train in {type(model).__name__}: all {len(list(model.parameters()))}"
                " parameters are frozen. Call requires_grad_() on it."
            )
        make = OPTIMIZERS[self.optimizer] if isinstance(self.optimizer, str) else self.optimizer
        try:
            optimizer: object = make(parameters, self)
            found = f"it returned a {type(optimizer).__name__}"
        except Exception as error:  # a class of torch.optim, for example, takes no recipe
            optimizer, found = error, f"it raised {type(error).__name__}: {error}"
        if isinstance(optimizer, Optimizer):
            return optimizer
        cause = optimizer if isinstance(optimizer, Exception) else None
        raise FairprunerError(
            f"Recipe optimizer={make!r} made no optimizer, {found}: give a function of parameters and recipe,"
            " such as lambda parameters, recipe: torch.optim.Adam(parameters, recipe.learning_rate)."
        ) from cause

    def factor(self, done: float) -> float:
        """The factor of the learning rate when this share of the training is done."""
        schedule = SCHEDULES[self.schedule] if isinstance(self.schedule, str) else self.schedule
        found: object = schedule(done)
        if not isinstance(found, (Real, torch.Tensor)) or not math.isfinite(found):
            raise FairprunerError(
                f"Recipe schedule={self.schedule!r} gave {found!r} for {done:g}, expected a finite number:"
                " the factor of the learning rate."
            )
        return float(found)

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
    "matching": (lambda x: 0 <= x <= 1, "a share in [0, 1]"),
    "temperature": (lambda x: 0 < x < math.inf, "a number above 0"),
    "seed": (lambda x: x >= 0 and isinstance(x, int), "a whole number of at least 0"),
    "checkpoint_every": (lambda x: x >= 1 and isinstance(x, int), "a whole number of steps of at least 1"),
}
