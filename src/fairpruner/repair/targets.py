"""The outputs of the original's blocks on each sample: the targets of gradient steps.

A block is a module that consists of others: a residual block, an attention layer, the model itself. If units
of a block's own output were removed, as from a residual stream, the target is the original's output without
these units. Targets are kept in memory as far as there is room, so that the original runs less often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from fairpruner.core.plan import Plan
from fairpruner.inputs.activations import BlockOutputs, Outputs, blocks_in_common
from fairpruner.inputs.batches import Batch, Mark, forward
from fairpruner.inputs.tokens import real_tokens
from fairpruner.repair.tensors import kept_by_dim

SAMPLES = 64  # that the models run on together, at most
TOKENS = 2048  # the same for texts, whose logits take most memory
MOST_HELD = 2**30  # bytes

_Narrowed = tuple[int, Tensor] | None  # along which dim an output keeps which indices; None: it keeps all


def together(batch: Batch) -> int:
    """How many samples of a batch the models run on together, at most."""
    tokens = real_tokens(batch.inputs)
    return SAMPLES if tokens is None else max(1, TOKENS // tokens.shape[1])


class Targets:
    """The tensors of all blocks that a cut model and the original have in common."""

    def __init__(
        self, small: nn.Module, model: nn.Module, plan: Plan, read: Callable[[], Iterator[Batch]]
    ) -> None:
        """`read` starts a new pass over the data; batches are recognised, so their order may change."""
        self.blocks = blocks_in_common(small, model)
        self._model, self._kept = model, kept_by_dim(plan)
        self._narrowed: dict[tuple[str, int], _Narrowed] | None = None  # by block and number; None: not known
        self._held: dict[int, tuple[Mark, Outputs]] = {}
        self._room, held, total = MOST_HELD, 0, 0
        for batch in read():
            total += batch.size
            found = self._whole(batch, small)
            if found is not None:
                self._held[batch.position] = batch.mark, found
                held += batch.size
        self.held = held / max(total, 1)  # share of the samples

    def of(self, batch: Batch, chosen: Tensor) -> Outputs:
        """The targets of these samples, [n], of a batch."""
        mark, outputs = self._held.get(batch.position, ((), {}))
        if mark != batch.mark:
            return self._wanted(batch.some(chosen))
        rows = {id(t): t[chosen.to(t.device)] for t in _distinct(outputs)}
        return {name: [rows.get(id(t)) for t in tensors] for name, tensors in outputs.items()}

    def _whole(self, batch: Batch, small: nn.Module) -> Outputs | None:
        """The targets of a whole batch from memory, if each belongs to a sample and there is room."""
        parts: list[Outputs] = []
        if self._narrowed is None:
            few = batch.rows(0, together(batch))
            self._narrowed = self._compared(self._run(small, few), self._run(self._model, few))
        for chosen in torch.arange(batch.size, device="cpu").split(together(batch)) if self._room else ():
            outputs = self._wanted(batch.some(chosen))
            of_samples = all(t.ndim and len(t) == len(chosen) for t in _distinct(outputs))
            if not of_samples or _bytes(outputs) * batch.size // len(chosen) > self._room:
                self._room = 0  # later batches will not fit either
                return None
            parts.append(outputs)
        if not parts:
            return None
        whole = _joined(parts)
        self._room -= _bytes(whole)
        return whole

    def _wanted(self, batch: Batch) -> Outputs:
        """The original's outputs on a batch, without the units that the cut model lost."""
        outputs = self._run(self._model, batch)
        if self._narrowed is None:
            return outputs
        done: dict[int, Tensor] = {}

        def narrowed(tensor: Tensor, how: _Narrowed) -> Tensor:
            if how is None:
                return tensor
            if id(tensor) not in done:
                done[id(tensor)] = tensor.index_select(how[0], how[1].to(tensor.device))
            return done[id(tensor)]

        known = self._narrowed
        return {
            name: [
                narrowed(t, known[name, n]) if t is not None and (name, n) in known else None
                for n, t in enumerate(tensors)
            ]
            for name, tensors in outputs.items()
        }

    def _compared(self, given: Outputs, wanted: Outputs) -> dict[tuple[str, int], _Narrowed]:
        """The part of each output of the original that the cut model has too; other outputs are absent."""
        found: dict[tuple[str, int], _Narrowed] = {}
        for name, tensors in wanted.items():
            for n, (mine, theirs) in enumerate(zip(given.get(name, []), tensors, strict=False)):
                if mine is None or theirs is None or mine.ndim != theirs.ndim:
                    continue
                differing = [d for d in range(mine.ndim) if mine.shape[d] != theirs.shape[d]]
                if not differing:
                    found[name, n] = None
                elif (
                    len(differing) == 1 and (kept := self._units(name, mine, theirs, *differing)) is not None
                ):
                    found[name, n] = differing[0], kept
        return found

    def _units(self, block: str, mine: Tensor, theirs: Tensor, dim: int) -> Tensor | None:
        """The indices along a dim of the original's output that the cut model kept.

        Candidates are the sets of output channels that weights inside the block keep. The set with which the
        two outputs are nearest is taken.
        """
        inside = f"{block}." if block else ""
        sets = {
            tuple(kept.tolist())
            for (tensor, written), kept in self._kept.items()
            if written == 0 and tensor.startswith(inside) and len(kept) == mine.shape[dim]
        }
        fitting = [torch.tensor(kept, device="cpu") for kept in sorted(sets) if max(kept) < theirs.shape[dim]]

        def error(kept: Tensor) -> float:
            return float((theirs.index_select(dim, kept.to(theirs.device)) - mine).square().sum())

        return min(fitting, key=error, default=None)

    def _run(self, model: nn.Module, batch: Batch) -> Outputs:
        with torch.no_grad(), BlockOutputs(model, self.blocks) as outputs:
            forward(model, batch)
            return outputs.taken()


def _distinct(outputs: Outputs) -> list[Tensor]:
    """All tensors, each once; a block and the last block inside it may return the same tensor."""
    return list({id(t): t for tensors in outputs.values() for t in tensors if t is not None}.values())


def _bytes(outputs: Outputs) -> int:
    return sum(t.nbytes for t in _distinct(outputs))


def _joined(parts: Sequence[Outputs]) -> Outputs:
    """The outputs of several parts of a batch, joined; a tensor that two blocks return stays one tensor."""
    joined: dict[int, Tensor] = {}
    whole: Outputs = {}
    for name, tensors in parts[0].items():
        for n, tensor in enumerate(tensors):
            if tensor is not None and id(tensor) not in joined:
                joined[id(tensor)] = torch.cat([t for part in parts if (t := part[name][n]) is not None])
            whole.setdefault(name, []).append(None if tensor is None else joined[id(tensor)])
    return whole
