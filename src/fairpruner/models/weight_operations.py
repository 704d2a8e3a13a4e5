"""The torch functions that multiply an input with a weight: one table for observing, repair and masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class WeightOperation(NamedTuple):
    """One such function: its arguments in order, and the dimensions along which input and weight meet."""

    arguments: tuple[str, ...]
    axis: int  # the input's channels
    dim: int  # the weight's dim that reads them

    def argument(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The argument of this name in a call; None if the call does not give it."""
        position = self.arguments.index(name)
        if position < len(args):
            return args[position]
        return next((value for key, value in kwargs.items() if ALIASES.get(key, key) == name), None)

    def with_input(
        self, value: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments of a call with another input."""
        position = self.arguments.index("input")
        if position < len(args):
            return (*args[:position], value, *args[position + 1 :]), kwargs
        return args, {key: value if ALIASES.get(key, key) == "input" else old for key, old in kwargs.items()}


# torch's other names for the input and the weight.
ALIASES = {"other": "weight", "mat1": "input", "mat2": "weight"}

LINEAR = ("input", "weight", "bias")
CONVOLUTION = (*LINEAR, "stride", "padding", "dilation", "groups")
TRANSPOSED_CONVOLUTION = (*LINEAR, "stride", "padding", "output_padding", "groups", "dilation")
_PRODUCT = WeightOperation(("input", "weight"), axis=-1, dim=0)
_SUM_AND_PRODUCT = WeightOperation(("bias", "input", "weight"), axis=-1, dim=0)

WEIGHT_OPERATIONS: dict[Callable[..., Any], WeightOperation] = {
    F.linear: WeightOperation(LINEAR, axis=-1, dim=1),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), WeightOperation(CONVOLUTION, axis=1, dim=1)),
    **dict.fromkeys(
        (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        WeightOperation(TRANSPOSED_CONVOLUTION, axis=1, dim=0),
    ),
    **dict.fromkeys((torch.matmul, Tensor.matmul, torch.mm, Tensor.mm), _PRODUCT),  # `@` calls Tensor.matmul
    **dict.fromkeys((torch.addmm, Tensor.addmm), _SUM_AND_PRODUCT),
}
