"""Errors of the model's code while cuts are tried: they show a wrong cut, unless memory ran out."""

from __future__ import annotations

from torch import nn

from fairpruner.errors import FairprunerError
from fairpruner.models.calling import is_out_of_memory


def raise_if_out_of_memory(error: Exception, model: nn.Module) -> None:
    """Stop with one sentence if memory ran out; return otherwise."""
    if is_out_of_memory(error):
        raise FairprunerError(
            f"Memory ran out while cuts of {type(model).__name__} were tried: {first_line(error)}. Discover"
            " with a smaller example, or on a machine with more memory."
        ) from error


def first_line(error: Exception) -> str:
    """The type and the first line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
