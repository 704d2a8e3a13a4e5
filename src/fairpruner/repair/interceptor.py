"""A forward pass seen operation by operation: its products, batch norms and additions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairpruner.models.torch_calls import TorchCalls
from fairpruner.repair.products import Product

ADDITIONS = (torch.add, torch.Tensor.add, torch.Tensor.add_)


class Interceptor(TorchCalls):
    """Shows every product with a named weight, every batch norm and every addition of a forward pass.

    A subclass may change what products return and what additions add.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(t): name for name, t in chain(model.named_buffers(), model.named_parameters())}
        self.additions = 0  # so far

    def product(self, product: Product) -> Tensor:
        """The output of a product."""
        return product.run()

    def norm(self, source: Tensor, mean: Tensor) -> None:
        """A batch norm's input, and its running mean, which has a name."""

    def addition(self, number: int, operands: list[Tensor], in_place: bool) -> None:
        """The number-th addition of two tensors of one shape; `operands` may be replaced."""

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        product = Product.of_call(self.names, function, args, kwargs)
        if product is not None:
            return self.product(product)
        if is_addition(function, args, kwargs):
            operands, self.additions = list(args), self.additions + 1
            self.addition(self.additions - 1, operands, function is torch.Tensor.add_)
            args = operands
        if function is F.batch_norm and len(args) > 1 and id(args[1]) in self.names:
            self.norm(args[0], args[1])
        return function(*args, **kwargs)


def is_addition(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call adds two tensors of one shape."""
    if function not in ADDITIONS or kwargs or len(args) != 2:
        return False
    return all(isinstance(a, Tensor) for a in args) and args[0].shape == args[1].shape
