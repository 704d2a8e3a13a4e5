"""Calling a user's model, and leaving it as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from fairpruner.errors import FairprunerError


def call(model: nn.Module, example: Any) -> Any:
    """Call the model with an example: a tensor, a tuple of arguments, or a dict of keyword arguments."""
    if isinstance(example, Mapping):
        return model(**example)
    if isinstance(example, (tuple, list)):
        return model(*example)
    return model(example)


def call_checked(model: nn.Module, example: Any) -> Any:
    """`call`, with a failure turned into one sentence that shows the example."""
    try:
        return call(model, example)
    except FairprunerError:
        raise
    except Exception as error:
        raise FairprunerError(
            f"The example does not fit the model: {type(model).__name__} called with {describe(example)}"
            f" raised {type(error).__name__}: {error}"
        ) from error


def describe(value: Any) -> str:
    """Types, dtypes and shapes of an example, in one line."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {describe(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(describe(v) for v in value) + ")"
    return type(value).__name__


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor inside an output or an example, in order; objects that are no plain container, such as
    a cache, are not looked into.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_of([getattr(value, f.name) for f in fields(value)])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards every module's mode, buffers, tensors kept as attributes and the
    random state are as they were.

    The fused kernel of `nn.MultiheadAttention` is off meanwhile: it hides the projections from tracing,
    counting and signals.
    """
    fastpath = torch.backends.mha.get_fastpath_enabled()
    modes = [(module, module.training) for module in model.modules()]
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(d.index for d in devices if d.index is not None)):
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            # modules that keep derived tensors (a bias table looked up once) drop them when training
            # starts
            model.train()
            model.eval()
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fastpath)
            for module, training in modes:
                module.training = training
            for module, before in attributes:
                for name in [
                    name
                    for name, value in vars(module).items()
                    if value is not before.get(name) and any(True for _ in tensors_of(value))
                ]:
                    vars(module).pop(name)
                    vars(module).update({name: before[name]} if name in before else {})
            with torch.no_grad():
                for buffer, numbers in buffers:
                    if buffer.shape == numbers.shape and not torch.equal(buffer, numbers):
                        buffer.copy_(numbers)
