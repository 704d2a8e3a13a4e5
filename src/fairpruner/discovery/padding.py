"""Texts with padding: cuts must also be right there, because attention then takes another way."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fairpruner.discovery.failing import raise_if_out_of_memory
from fairpruner.models.calling import call, evaluating

TOKENS, MASK = "input_ids", "attention_mask"


def with_padding(model: nn.Module, examples: Sequence[Any]) -> list[Any]:
    """The examples, and before them those texts whose last token can be made padding.

    Without padding, many models have no mask, and attention shares the keys of query heads by itself. With a
    mask, their own code repeats the keys, by a number that must fit the heads that are left.
    """
    padded = [example for given in examples if (example := _padded(model, given)) is not None]
    return [*padded, *examples]


def _padded(model: nn.Module, example: Any) -> Any:
    """A text of whole tokens with padding at its end; None if the example is no such text."""
    names = list(inspect.signature(model.forward).parameters)
    given = example if isinstance(example, Mapping) else {names[0]: example} if names else {}
    tokens, mask = given.get(TOKENS), given.get(MASK)
    if MASK not in names or not isinstance(tokens, torch.Tensor) or tokens.ndim != 2 or tokens.shape[1] < 2:
        return None
    whole = torch.ones_like(tokens)
    if mask is not None and not (isinstance(mask, torch.Tensor) and torch.equal(mask.to(whole), whole)):
        return None
    shorter = whole.clone()
    shorter[:, -1] = 0
    padded = {**given, MASK: shorter}
    try:
        with evaluating(model), torch.no_grad():
            call(model, padded)
    except Exception as error:  # the model may take no such mask
        raise_if_out_of_memory(error, model)
        return None
    return padded
