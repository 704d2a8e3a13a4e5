"""How a model uses its weights: which tensor takes an offset, and at which addition an output arrives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairpruner.inputs.batches import Batch, forward
from fairpruner.inputs.tokens import real_tokens
from fairpruner.models.calling import tensors_of
from fairpruner.repair.interceptor import Interceptor, is_addition
from fairpruner.repair.products import Product
from fairpruner.repair.regression import float64

SAMPLES = 4  # samples that are run; only one text, because it has many tokens
ROWS = 256  # of an output that are compared


class Offset(NamedTuple):
    """The tensor to which a constant can be added instead of to an output.

    It is a bias (sign +1), or the running mean of the batch norm that reads the output (sign -1).
    """

    tensor: str
    sign: int


class Addition(NamedTuple):
    """The number-th addition of a forward pass, and one of its two operands (0 or 1)."""

    number: int
    side: int
    follows: int | None = None  # the addition whose sum is the other operand


@dataclass(frozen=True)
class WeightUse:
    """What a forward pass does with one weight."""

    calls: int
    # False for an embedding that is also the last layer, and for a weight that is read along two dims, as
    # by a tied autoencoder.
    only_multiplies: bool
    offset: Offset | None
    # Where its output is added to something, perhaps scaled and shifted channel by channel.
    addition: Addition | None


def find_weight_uses(model: nn.Module, batch: Batch) -> dict[str, WeightUse]:
    """The uses of all weights that multiply, in the order of their first calls."""
    tracer = UseTracer(model)
    with torch.no_grad(), tracer:
        forward(model, batch.rows(0, SAMPLES if real_tokens(batch.inputs) is None else 1))
    return tracer.uses()


def channel_scale(outputs: Tensor, operand: Tensor) -> Tensor:
    """The s of `operand = s * outputs + t`, channel by channel, from rows [rows, C] of both: [C].

    It is the slope of a straight line through the rows, and 0 where the output is constant.
    """
    x, y = outputs - outputs.mean(0), operand - operand.mean(0)
    variance = x.square().sum(0)
    slope = (x * y).sum(0) / variance.clamp_min(torch.finfo(x.dtype).tiny)
    return torch.where(variance > 0, slope, 0.0)


class UseTracer(Interceptor):
    """Follows the output of every product until the next product or addition.

    A tensor may be a copy of an output, scaled and shifted channel by channel. Every tensor carries the
    outputs that led to it by operations that kept the shape. Only those few are compared with an operand of
    an addition, so the cost grows linearly with the depth of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._outputs: dict[str, list[_Output]] = {}  # of each weight, call by call
        self._readers = dict.fromkeys(self.names, 0)  # how many operations read a named tensor, by id
        self._latest: Tensor | None = None  # output of a product

    def uses(self) -> dict[str, WeightUse]:
        """The uses of all weights that were seen."""
        return {
            name: WeightUse(
                calls=len(outputs),
                only_multiplies=self._readers[id(outputs[0].product.weight)] == len(outputs)
                and len({output.product.read_dim for output in outputs}) == 1,
                offset=self._offset(*outputs),
                addition=outputs[0].addition if len(outputs) == 1 else None,
            )
            for name, outputs in self._outputs.items()
        }

    def _offset(self, output: _Output, *others: _Output) -> Offset | None:
        """A bias or a running mean that serves this weight alone."""
        bias, mean = output.product.bias, output.norm_mean
        if bias is not None:
            alone = self._readers.get(id(bias)) == 1 + len(others)
            return Offset(self.names[id(bias)], 1) if alone else None
        alone = mean is not None and not others and output.readers == self._readers[id(mean)] == 1
        return Offset(self.names[id(mean)], -1) if alone else None

    def product(self, product: Product) -> Tensor:
        self._latest = out = product.run()
        output = _Output(product, out)
        self._outputs.setdefault(product.name, []).append(output)
        setattr(out, _IS, output)
        setattr(out, _COMES_FROM, [output])
        return out

    def norm(self, source: Tensor, mean: Tensor) -> None:
        output = getattr(source, _IS, None)
        if isinstance(output, _Output):
            output.norm_mean = mean

    def addition(self, number: int, operands: list[Tensor], in_place: bool) -> None:
        sums = [getattr(operand, _SUM, None) for operand in operands]
        arriving = [
            (output, Addition(number, side, sums[1 - side]))
            for side, operand in enumerate(operands)
            for output in getattr(operand, _COMES_FROM, ())
            if output.addition is None and output.arrives_as(operand)
        ]
        if arriving:
            # Of two outputs that are added, the one with more features can correct more of the other's error.
            output, where = max(arriving, key=lambda found: found[0].features)
            output.addition = where

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = super().call(function, args, kwargs)
        if next(tensors_of(result), None) is None:
            return result  # a shape or a type was asked for
        if is_addition(function, args, kwargs):
            setattr(result, _SUM, self.additions - 1)
        read = list(tensors_of([*args, *kwargs.values()]))
        for tensor in read:
            if id(tensor) in self._readers:
                self._readers[id(tensor)] += 1
            if isinstance(output := getattr(tensor, _IS, None), _Output):
                output.readers += 1
        if isinstance(result, Tensor) and result is not self._latest:
            before = [] if is_addition(function, args, kwargs) else read
            led_here = {id(o): o for tensor in before for o in getattr(tensor, _COMES_FROM, ())}.values()
            setattr(result, _COMES_FROM, [output for output in led_here if output.shape == result.shape])
        return result


# Attributes of tensors during a trace: the output that a tensor is, those that it may be a copy of, and the
# number of the addition whose sum it is.
_IS, _COMES_FROM, _SUM = "_fairpruner_is", "_fairpruner_comes_from", "_fairpruner_sum"


class _Output:
    """The output of one call of a product."""

    def __init__(self, product: Product, out: Tensor) -> None:
        self.product, self.shape = product.without_input(), out.shape
        self.features = product.weight.numel() // out.shape[product.axis]  # that each number of it reads
        self.readers = 0
        self.norm_mean: Tensor | None = None  # the running mean of a batch norm that reads it
        self.addition: Addition | None = None
        self._rows = self._some_rows(out)

    def arrives_as(self, operand: Tensor) -> bool:
        """Whether each channel of the operand is this output's channel, scaled and shifted."""
        if operand.shape != self.shape or len(self._rows) <= 3:
            return False
        rows = self._some_rows(operand)
        scale = channel_scale(self._rows, rows)
        varying = rows - rows.mean(0)
        unexplained = varying - scale * (self._rows - self._rows.mean(0))
        rounding = max(1e-6, 64 * torch.finfo(operand.dtype).eps ** 2)  # share of a variance
        return bool(unexplained.square().sum() <= rounding * varying.square().sum()) and bool(scale.any())

    def _some_rows(self, tensor: Tensor) -> Tensor:
        """Up to about ROWS rows of a tensor of this shape, evenly spread, float64 [rows, C]."""
        last = tensor.movedim(self.product.axis, -1)
        total = last.numel() // last.shape[-1]
        index = torch.arange(0, total, max(1, total // ROWS), device=tensor.device)
        return float64(last[torch.unravel_index(index, last.shape[:-1])])
