"""The recover stage: fine-tune a cut model; a run that was killed resumes from its checkpoint."""

from fairpruner.recovery.history import Epoch
from fairpruner.recovery.recipe import Recipe
from fairpruner.recovery.training import recover

__all__ = ["Epoch", "Recipe", "recover"]
