"""Recovery inside `prune`: which recipe follows a cut, and who teaches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fairpruner.inputs.activations import number_in_common
from fairpruner.inputs.batches import read_batches
from fairpruner.models.calling import evaluating
from fairpruner.models.devices import device_of_model
from fairpruner.pipeline.options import Options, repair_options
from fairpruner.recovery import Recipe, recover

FEWEST_BLOCKS = 4  # whose outputs are matched in recovery: fewer say little more than the logits


@dataclass(frozen=True, eq=False)
class Learning:
    """The recovery after each cut."""

    teacher: nn.Module
    train: Iterable[Any]
    epochs: int
    short: bool  # by the recipe for few epochs, with the teacher; else by the paper's
    options: Options

    def learn(self, small: nn.Module, number: int, *, repaired: bool = False) -> nn.Module:
        """The model after the epochs of a round; `repaired`: a search made it, so it is near the teacher."""
        if not self.epochs:
            return small
        settings: dict[str, Any] = {"teacher": self.teacher} if self.short else {}
        settings["recipe"] = self._recipe(small, repaired)
        options = _of_round(number, settings, self.options["recover"])
        return recover(small, self.train, epochs=self.epochs, **options)

    def _recipe(self, small: nn.Module, repaired: bool) -> Recipe:
        """The recipe without the settings that the caller changes."""
        recipe = Recipe()
        if self.short:
            first = next(read_batches(self.train, device_of_model(small), small))
            with evaluating(small), evaluating(self.teacher):
                near = repaired and number_in_common(small, self.teacher, first.rows(0, 2)) >= FEWEST_BLOCKS
            recipe = Recipe.short_for(small, near=near)
            if first.labels is None:
                recipe = replace(recipe, distillation=1 - recipe.matching)
        loss = repair_options(self.options).get("loss")
        return recipe if loss is None else replace(recipe, loss=loss)


def _of_round(number: int, learning: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `recover`: those of the options first, and for each round a folder of its own.

    A mapping for the recipe changes settings of the one in `learning`. If it sets the share of distillation
    or of matching, the other one gets at most the rest.
    """
    found = {**learning, **options}
    if isinstance(settings := found.get("recipe"), Mapping):
        recipe = learning["recipe"]
        shares = {
            one: min(getattr(recipe, one), 1 - settings[other])
            for one, other in (("distillation", "matching"), ("matching", "distillation"))
            if other in settings
        }
        found["recipe"] = replace(recipe, **{**shares, **settings})
    if found.get("folder") is not None:
        found["folder"] = Path(found["folder"]) / f"round-{number}"
    return found
