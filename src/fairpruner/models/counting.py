"""Parameters and FLOPs of a model, counted.

FLOPs are multiply-accumulates (MACs), as the pruning literature counts them: half of what
`torch.utils.flop_counter` prints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fairpruner.models.calling import call_checked, evaluating
from fairpruner.models.experts import plain_experts
from fairpruner.models.recurrence import plain_recurrence
from fairpruner.models.supported import check_supported
from fairpruner.models.torch_private import FLOP_FORMULAS


def count_params(model: nn.Module) -> int:
    """The number of parameters, shared ones once.

    >>> count_params(nn.Linear(3, 2))
    8
    """
    check_supported(model)
    return sum(p.numel() for p in model.parameters())


def embedding_tables(model: nn.Module) -> set[int]:
    """The ids of the parameters of all embeddings, and of the output head of a Hugging Face model."""
    outer: list[nn.Module] = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    asked: Any = getattr(model, "get_output_embeddings", None)
    head = asked() if outer and callable(asked) else None
    if isinstance(head, nn.Module):
        outer.append(head)
    return {id(parameter) for module in outer for parameter in module.parameters()}


def count_flops(model: nn.Module, example: Any) -> int:
    """MACs of one forward pass over the whole example, in eval mode: a batch of 8 counts eight times.

    A plan's `predicted["flops"]` counts in the same way, for the example that `discover` was given. `score`
    and `prune` call `discover` with one sample.

    >>> count_flops(nn.Linear(3, 2), torch.zeros(1, 3)), count_flops(nn.Linear(3, 2), torch.zeros(8, 3))
    (6, 48)
    """
    check_supported(model)
    with plain_experts(model), evaluating(model), torch.no_grad(), plain_recurrence(model):
        # The counter fails on inputs that require gradients and are views of a parameter.
        model.requires_grad_(False)
        with FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS) as counter:
            call_checked(model, example)
    return int(counter.get_total_flops()) // 2
