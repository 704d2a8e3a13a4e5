"""Recover: fine-tune a cut model; a killed run goes on where it was."""

from fairpruner.recovery.history import Epoch
from fairpruner.recovery.recipe import Recipe
from fairpruner.recovery.training import recover

__all__ = ["Epoch", "Recipe", "recover"]
