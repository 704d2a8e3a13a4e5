"""The features of each sample: what the last matrix product or convolution of a model reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fairpruner.errors import FairprunerError
from fairpruner.models.observing import OBSERVED_OPERATIONS
from fairpruner.models.precision import in_float32
from fairpruner.models.torch_calls import TorchCalls


class LastInput(TorchCalls):
    """Keeps the input of the last convolution or matrix product of a forward pass, as features [N, C]."""

    def __init__(self) -> None:
        super().__init__()
        self._last: tuple[Tensor, int] | None = None

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        operation = OBSERVED_OPERATIONS.get(function)
        if operation is not None:
            self._last = (operation.argument("input", args, kwargs), operation.axis)
        return function(*args, **kwargs)

    def features(self, samples: int, real: Tensor | None = None) -> Tensor:
        """The penultimate features of each sample, [N, C].

        They are means over positions, or over the `real` tokens, bool [N, T], of each text.
        """
        if self._last is None or self._last[0].shape[0] != samples:
            raise FairprunerError(
                "The model's last linear operation does not read one row of features for each sample, so its"
                " classes cannot be grouped. Leave out groups=."
            )
        source, axis = self._last[0].detach(), self._last[1]
        if real is not None and source.shape[:-1] == real.shape:
            return mean_over_tokens(source, real)
        return source.movedim(axis, 1).flatten(2).mean(2) if source.ndim > 2 else source


def mean_over_tokens(source: Tensor, real: Tensor) -> Tensor:
    """The mean over the real tokens of each text, [N, T, C] -> [N, C]."""
    source = in_float32(source)
    weights = real.to(source) / real.sum(1, keepdim=True).clamp(min=1)  # [N, T]
    return torch.bmm(weights.unsqueeze(1), source).squeeze(1)
