"""The outputs of a model's blocks, and how far those of a smaller model are from the original's.

A block is a module that consists of others: a residual block, an attention layer, the model itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fairpruner.inputs.batches import Batch, forward
from fairpruner.inputs.tokens import counted_rows
from fairpruner.models.calling import tensors_of
from fairpruner.models.precision import wide_dtype

Outputs = dict[str, list[Tensor | None]]  # block -> its output tensors, call by call; None: not a target


def blocks_in_common(small: nn.Module, model: nn.Module) -> list[str]:
    """The paths of the modules that consist of others in both models, the models themselves first.

    Modules inside a list that lost some are left out, because their numbers differ between the two models.
    """
    mine, theirs = dict(small.named_modules()), dict(model.named_modules())
    shared = [name for name in mine if name in theirs]
    shortened = tuple(
        f"{name}."
        for name in shared
        if isinstance(theirs[name], nn.ModuleList)
        and len(list(theirs[name].children())) != len(list(mine[name].children()))
    )
    return [
        name
        for name in shared
        if not name.startswith(shortened) and (not name or any(True for _ in mine[name].children()))
    ]


class BlockOutputs:
    """Collects the output tensors of each block, call by call, until they are taken."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        self._blocks = {name: model.get_submodule(name) for name in blocks}
        self._hooks: list[RemovableHandle] = []
        self._seen: Outputs = {}

    def __enter__(self) -> BlockOutputs:
        self._hooks = [
            module.register_forward_hook(
                lambda module, args, output, name=name: self._seen.setdefault(name, []).extend(
                    t for t in tensors_of(output) if t.is_floating_point()
                )
            )
            for name, module in self._blocks.items()
        ]
        return self

    def __exit__(self, *failure: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def taken(self) -> Outputs:
        seen, self._seen = self._seen, {}
        return seen


def number_in_common(small: nn.Module, model: nn.Module, batch: Batch) -> int:
    """How many outputs of blocks have the same shape in both models."""
    outputs = []
    for net in (small, model):
        with torch.no_grad(), BlockOutputs(net, blocks_in_common(small, model)) as given:
            forward(net, batch)
        outputs.append(given.taken())
    return len(_pairs(*outputs))


def relative_error(given: Outputs, wanted: Outputs, batch: Batch) -> Tensor | None:
    """The mean relative squared error of all tensors that have the same shape in both models."""
    pairs = [pair for pair in _pairs(given, wanted) if pair[1].requires_grad]
    terms = [_relative(mine, theirs, batch, name) for name, mine, theirs in pairs]
    # A model over several devices has terms on each of them.
    return torch.stack([term.to(terms[0].device) for term in terms]).mean() if terms else None


def _pairs(given: Outputs, wanted: Outputs) -> list[tuple[str, Tensor, Tensor]]:
    """Block, its output and the wanted one, where their shapes are the same."""
    found = {
        id(mine): (name, mine, theirs)
        for name, tensors in given.items()
        for mine, theirs in zip(tensors, wanted.get(name, []), strict=False)
        if mine is not None and theirs is not None and mine.shape == theirs.shape
    }  # a block inside another may give the very same tensor
    return list(found.values())


def _relative(mine: Tensor, theirs: Tensor, batch: Batch, block: str) -> Tensor:
    """The squared error of a tensor divided by the square of its target; the padding of texts is left out."""
    if mine.ndim >= 3:
        rows = counted_rows(mine.shape[0] * mine.shape[1], batch.inputs, block).to(mine.device)
        if len(rows) < mine.shape[0] * mine.shape[1]:
            mine, theirs = mine.flatten(0, 1)[rows], theirs.flatten(0, 1)[rows]
    # Norms in float32 without a float32 copy of the tensors: this takes a third of the time.
    wide = wide_dtype(theirs)
    square = torch.linalg.vector_norm(theirs, dtype=wide).square().clamp_min(torch.finfo(wide).tiny)
    error: Tensor = torch.linalg.vector_norm(mine - theirs, dtype=wide).square() / square
    return error
