"""What the blocks of the original give on each sample: the targets of gradient steps, computed once.

A block is a module made of others: a residual block, an attention layer, the model itself. Targets are held
as far as there is room, so that the original need not run in every epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fairpruner.inputs.batches import Batch, forward
from fairpruner.models.calling import tensors_of

SAMPLES = 64  # that the models run on together, at most
MOST_HELD = 2**30  # bytes

Outputs = dict[str, list[Tensor | None]]  # block -> its tensors, call by call; None for one that is no target
_Mark = tuple[tuple[tuple[int, ...], float], ...]


class Targets:
    """The tensors of all blocks that have the same shape in a cut model and in the original."""

    def __init__(self, small: nn.Module, model: nn.Module, read: Callable[[], Iterator[Batch]]) -> None:
        """`read` reads the data once more; what it gives is compared, so that it may come in any order."""
        self.blocks = _blocks(small, model)
        self._model = model
        self._held: dict[int, tuple[_Mark, Outputs]] = {}
        self._room, held, total = MOST_HELD, 0, 0
        for batch in read():
            total += batch.size
            found = self._whole(batch, small)
            if found is not None:
                self._held[batch.position] = _mark(batch), found
                held += batch.size
        self.held = held / max(total, 1)  # share of the samples

    def of(self, batch: Batch, chosen: Tensor) -> Outputs:
        """The targets of these samples, [n], of a batch."""
        mark, outputs = self._held.get(batch.position, ((), {}))
        if mark != _mark(batch):
            return self._run(self._model, batch.some(chosen))
        rows = {id(t): t[chosen.to(t.device)] for t in _distinct(outputs)}
        return {name: [rows.get(id(t)) for t in tensors] for name, tensors in outputs.items()}

    def _whole(self, batch: Batch, small: nn.Module) -> Outputs | None:
        """The targets of a whole batch, if each belongs to a sample and there is room."""
        parts: list[Outputs] = []
        for chosen in torch.arange(batch.size).split(SAMPLES) if self._room else ():
            part = batch.some(chosen)
            outputs = self._run(self._model, part)
            given = parts[0] if parts else self._run(small, part)
            outputs = _only_targets(outputs, given, same_size=not parts)
            of_samples = all(t.ndim and len(t) == len(chosen) for t in _distinct(outputs))
            if not of_samples or _bytes(outputs) * batch.size // len(chosen) > self._room:
                self._room = 0  # the batches to come are not different
                return None
            parts.append(outputs)
        if not parts:
            return None
        whole = _joined(parts)
        self._room -= _bytes(whole)
        return whole

    def _run(self, model: nn.Module, batch: Batch) -> Outputs:
        with torch.no_grad(), BlockOutputs(model, self.blocks) as outputs:
            forward(model, batch)
            return outputs.taken()


def _distinct(outputs: Outputs) -> list[Tensor]:
    """All tensors; one that several blocks give, because it is the output of the last inside, only once."""
    return list({id(t): t for tensors in outputs.values() for t in tensors if t is not None}.values())


def _bytes(outputs: Outputs) -> int:
    return sum(t.nbytes for t in _distinct(outputs))


def _only_targets(outputs: Outputs, given: Outputs, *, same_size: bool) -> Outputs:
    """The original's outputs without those that the cut model does not give in the same shape.

    `given` are outputs of the cut model on the same samples, or targets of others if not of `same_size`.
    """

    def fits(theirs: Tensor, mine: Tensor | None) -> bool:
        first = 0 if same_size else 1
        return mine is not None and mine.ndim == theirs.ndim and mine.shape[first:] == theirs.shape[first:]

    return {
        name: [
            theirs if theirs is not None and fits(theirs, mine) else None
            for theirs, mine in zip_longest(tensors, given.get(name, [])[: len(tensors)])
        ]
        for name, tensors in outputs.items()
    }


def _joined(parts: Sequence[Outputs]) -> Outputs:
    """The outputs of consecutive samples, one after the other; a tensor given by two blocks stays one."""
    joined: dict[int, Tensor] = {}
    whole: Outputs = {}
    for name, tensors in parts[0].items():
        for n, tensor in enumerate(tensors):
            if tensor is not None and id(tensor) not in joined:
                joined[id(tensor)] = torch.cat([t for part in parts if (t := part[name][n]) is not None])
            whole.setdefault(name, []).append(None if tensor is None else joined[id(tensor)])
    return whole


def _mark(batch: Batch) -> _Mark:
    """What tells the inputs of one batch from those of another."""
    return tuple((tuple(t.shape), float(t.double().sum())) for t in tensors_of(batch.inputs))


def _blocks(small: nn.Module, model: nn.Module) -> list[str]:
    """The modules made of others, the model itself first; in a list that lost modules the others moved up,
    so that nothing inside it is the same module in both models.
    """
    shortened = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) != len(list(small.get_submodule(name).children()))
    )
    return [
        name
        for name, module in small.named_modules()
        if not name.startswith(shortened) and (not name or any(True for _ in module.children()))
    ]


class BlockOutputs:
    """The tensors that each block of a model gave, call by call, since they were last taken."""

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
