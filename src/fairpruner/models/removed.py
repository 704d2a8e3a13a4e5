"""Modules without weights that replace a removed residual block.

`fairpruner` copies this file into the folder of a Hugging Face model that has such modules. It needs only
torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

MOST_OUTPUTS = 64
CACHES = ("past_key_values", "past_key_value")


class Removed(nn.Module):
    """A module without tensors that replaces a removed one; it keeps attributes that other code may read."""

    argument: int | str  # which of its arguments the block reads from the stream
    outputs: int  # the length of the tuple that it returns; 0 for a tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stream = kwargs[self.argument] if isinstance(self.argument, str) else args[self.argument]
        self._count_tokens(stream, kwargs)
        result = self.result(stream)
        return (result, *[None] * (self.outputs - 1)) if self.outputs else result

    def result(self, stream: Tensor) -> Tensor:
        raise NotImplementedError

    def _count_tokens(self, stream: Tensor, kwargs: dict[str, Any]) -> None:
        """Give a cache of keys and values one number for each token.

        transformers takes the position of the next token from the length of the first layer's cache.
        """
        cache = next((kwargs[name] for name in CACHES if kwargs.get(name) is not None), None)
        number = getattr(self, "layer_idx", None)
        if cache is not None and number is not None and hasattr(cache, "update") and stream.ndim == 3:
            token = stream.detach()[:, None, :, :1] * 0  # [batch, 1, tokens, 1]
            cache.update(token, token, number)


class PassesInput(Removed):
    """Returns its input: a residual block that adds nothing."""

    def result(self, stream: Tensor) -> Tensor:
        return stream


class ReturnsZeros(Removed):
    """Returns zeros in the shape of its input: a branch that adds nothing to its stream."""

    def result(self, stream: Tensor) -> Tensor:
        return torch.zeros_like(stream)


STAND_INS: dict[str, type[Removed]] = {"input": PassesInput, "zeros": ReturnsZeros}


def remove(module: nn.Module, by: str, argument: int | str, outputs: int) -> None:
    """Turn a module into its stand-in, in place: its tensors and its children are removed."""
    if not 0 <= outputs <= MOST_OUTPUTS:
        raise ValueError(f"A removed module has {outputs} outputs, expected at most {MOST_OUTPUTS}.")
    number = next(
        (found for inner in module.modules() if type(found := getattr(inner, "layer_idx", None)) is int), None
    )
    parameters = [name for name, _ in module.named_parameters(recurse=False)]
    while names := _held_names(module):  # again, because a module or tensor with two names is listed once
        for name in names:
            delattr(module, name)
    for name in parameters:  # torch's encoder layers look whether a bias is None
        setattr(module, name, None)
    module.__class__ = STAND_INS[by]
    module.argument, module.outputs = argument, outputs  # type: ignore[assignment]
    if number is not None:
        module.layer_idx = number  # type: ignore[assignment]


def _held_names(module: nn.Module) -> list[str]:
    """The names of a module's children, parameters and buffers."""
    parameters, buffers = module.named_parameters(recurse=False), module.named_buffers(recurse=False)
    return [name for held in (module.named_children(), parameters, buffers) for name, _ in held]
