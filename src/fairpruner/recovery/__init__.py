"""Recover: fine-tune a cut model; a killed run goes on where it was."""

from .history import Epoch
from .recipe import Recipe
from .training import recover

__all__ = ["Epoch", "Recipe", "recover"]
