"""Fewer heads in attention code that takes the width or the number of its heads from its inputs.

Some code reads `B, N, C = x.shape` and later reshapes what its heads return to `(B, N, C)`. With fewer heads
that is too wide. After a cut, the module keeps its code and gets a class in which `x.shape` gives the width
of the heads that are left.

Other code is given a number for every head, such as ALiBi's slopes, which the model computes once for all
layers. There the class selects the heads that are left from this argument.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fairpruner.models.torch_calls import TorchCalls

# The attribute that holds the width of all heads together after a cut -> the dimension of the module's input
# that its code takes this width from.
HEADS_WIDTHS = {"heads_width": -1, "heads_channels": 1}
# The attribute with the heads that are left names the argument that has numbers for all heads, and the
# dimension that these lie along. Its value is the number of all heads, followed by the heads that are left.
KEPT_HEADS = re.compile(r"kept_heads_of_(\w+)_(\d)")
_SIZES = (Tensor.shape.__get__, Tensor.size)  # type: ignore[attr-defined]  # a property of the C++ class
_RESHAPES = (Tensor.reshape, Tensor.view, torch.reshape)


class NarrowHeads(nn.Module):
    """A module whose input of width `input_width` appears as wide as the heads that are left."""

    input_width: int

    def forward(self, *inputs: Any, **options: Any) -> Any:
        inputs, options = self._of_kept_heads(inputs, options)
        name, dim = next((item for item in HEADS_WIDTHS.items() if item[0] in vars(self)), ("", 0))
        if not name:
            return super().forward(*inputs, **options)
        # The first argument is what the heads read. A mask over as many tokens as it is wide keeps its shape.
        given = inspect.signature(super().forward).bind(*inputs, **options)
        first = next((t for t in (*given.args, *given.kwargs.values()) if isinstance(t, Tensor)), None)
        if first is None or first.ndim < 3 or first.shape[dim] != self.input_width:
            return super().forward(*inputs, **options)
        with _PretendedWidth(first, dim, self.input_width, getattr(self, name)):
            return super().forward(*inputs, **options)

    def _of_kept_heads(self, inputs: Any, options: Any) -> tuple[Any, Any]:
        """The arguments of a call, with the numbers of the kept heads where there were some for all heads."""
        found = [(name, match) for name in vars(self) if (match := KEPT_HEADS.fullmatch(name))]
        if not found:
            return inputs, options
        given = inspect.signature(super().forward).bind(*inputs, **options)
        for name, match in found:
            heads, kept = getattr(self, name)[0], getattr(self, name)[1:]
            numbers, dim = given.arguments.get(match[1]), int(match[2])
            if isinstance(numbers, Tensor) and dim < numbers.ndim and numbers.shape[dim] > 1:
                apart = numbers.unflatten(dim, (-1, heads))  # several samples may lie along this dimension
                chosen = apart.index_select(dim + 1, torch.tensor(kept, device=numbers.device))
                given.arguments[match[1]] = chosen.flatten(dim, dim + 1)
        return given.args, given.kwargs

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Classes made while a program runs cannot be pickled by name."""
        return _rebuilt, (type(self).__mro__[2], self.__dict__)


class _PretendedWidth(TorchCalls):
    """Inside, the shape of one tensor has a pretended size in one dimension.

    A reshape that would fail with this size uses the true one.
    """

    def __init__(self, wide: Tensor, dim: int, true: int, pretended: int) -> None:
        super().__init__()
        self._wide, self._dim, self._true, self._pretended = wide, dim, true, pretended

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if function in _RESHAPES:
            return function(args[0], self._fitting(args[0], kwargs.get("shape", args[1:])))
        result = function(*args, **kwargs)
        if function in _SIZES and args[0] is self._wide:
            return self._pretend(args[0], result, kwargs.get("dim", args[1] if len(args) > 1 else None))
        return result

    def _pretend(self, tensor: Tensor, size: Any, dim: int | None) -> Any:
        """The shape of a tensor, or its size in one dimension, with the pretended size."""
        if dim is None:
            sizes = list(size)
            sizes[self._dim] = self._pretended
            return torch.Size(sizes)
        return self._pretended if dim % tensor.ndim == self._dim % tensor.ndim else size

    def _fitting(self, tensor: Tensor, shape: Sequence[Any]) -> list[Any]:
        """The shape of a reshape, with the true size if the pretended one does not fit the tensor."""
        sizes: list[Any] = list(shape)
        if len(shape) == 1 and not isinstance(shape[0], int):  # given as one tuple
            sizes = list(shape[0])
        pretended = [position for position, size in enumerate(sizes) if size == self._pretended]
        if pretended and -1 in sizes:
            # A channel of the input that keeps its place, as before and after a convolution over space.
            kept = [n for n in pretended if n < tensor.ndim and tensor.shape[n] == self._true]
            return [self._true if n in kept else size for n, size in enumerate(sizes)]
        if pretended and math.prod(sizes) != tensor.numel():
            # Other sizes may be equal by chance: the width stands where it stood in the input.
            wanted = self._dim % len(sizes)
            sizes[min(pretended, key=lambda position: abs(position - wanted))] = self._true
        return sizes


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def narrow_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class with the same code whose heads may be narrower than its input.

    >>> narrow_class(nn.Linear).__name__, narrow_class(narrow_class(nn.Linear)).__name__
    ('NarrowLinear', 'NarrowLinear')
    """
    if issubclass(cls, NarrowHeads):
        return cls
    if cls not in _CLASSES:
        # torch.compile does not follow a shape that is pretended; it compiles the modules around this one.
        names = {"__module__": cls.__module__, "forward": torch.compiler.disable(NarrowHeads.forward)}
        _CLASSES[cls] = type(f"Narrow{cls.__name__}", (NarrowHeads, cls), names)
    return _CLASSES[cls]


def arguments_of(cls: type[nn.Module]) -> list[str]:
    """The names of the arguments of a module's code, also if the module has fewer heads.

    >>> arguments_of(nn.Linear), arguments_of(narrow_class(nn.Linear))
    (['input'], ['input'])
    """
    code: Any = cls.__mro__[2] if issubclass(cls, NarrowHeads) else cls
    return list(inspect.signature(code.forward).parameters)[1:]


def _rebuilt(cls: type[nn.Module], state: dict[str, Any]) -> nn.Module:
    module = cls.__new__(narrow_class(cls))
    module.__dict__ = dict(state)  # copy.copy passes the original's
    return module
