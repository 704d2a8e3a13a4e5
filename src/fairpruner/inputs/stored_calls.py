"""What the layers of a streamed model are called with beside the stream, with the tensors on disk.

The attention mask of a batch with padding has N x T x T numbers, so in memory they would grow with the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fairpruner.core.work_folder import WorkFolder
from fairpruner.models.layer_calls import LayerCall

STAGE = "calls"


@dataclass(frozen=True)
class StoredTensor:
    """Stands in a call for a tensor that is on disk."""

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    sizes: tuple[int, ...]  # on disk, where a dim along which all numbers are the same has size 1


class StoredCalls:
    """The calls of each batch and layer, without streams; only the tensors of one batch are in memory."""

    def __init__(self, folder: WorkFolder) -> None:
        self._folder = folder
        self._calls: list[list[LayerCall]] = []
        self._recent: dict[StoredTensor, Tensor] = {}  # of the batch that was seen last
        self._count = 0
        self.bytes = 0  # on disk

    @contextmanager
    def writing(self) -> Iterator[Callable[[Sequence[LayerCall]], None]]:
        """Yields a function that adds the calls of one more batch; those before a kill are made again."""
        self._folder.drop(STAGE)
        with self._folder.writing(STAGE) as write:
            yield partial(self._add, write)
        self._recent = {}

    def _add(self, write: Callable[[int, np.ndarray], None], calls: Sequence[LayerCall]) -> None:
        seen: dict[StoredTensor, Tensor] = {}

        def stored(tensor: Tensor) -> StoredTensor:
            for known in (seen, self._recent):
                for one, other in known.items():
                    if other is tensor or (other.dtype == tensor.dtype and torch.equal(other, tensor)):
                        seen[one] = other
                        return one
            once = tensor[tuple(slice(1) if step == 0 else slice(None) for step in tensor.stride())]
            new = StoredTensor(self._count, tensor.dtype, tuple(tensor.shape), tuple(once.shape))
            write(new.number, once.reshape(-1).view(torch.uint8).numpy())  # numpy has no bfloat16
            self._count += 1
            self.bytes += once.nbytes
            seen[new] = tensor
            return new

        empty = torch.empty(0)
        self._calls.append([replace(given.with_rest(Tensor, stored), stream=empty) for given in calls])
        self._recent = seen

    def of(self, index: int, layer: int, stream: Tensor) -> LayerCall:
        """The call of a layer in a batch, with this stream."""
        read: dict[StoredTensor, Tensor] = {}

        def found(stored: StoredTensor) -> Tensor:
            if stored not in read:
                known = self._recent.get(stored)
                read[stored] = self._read(stored) if known is None else known
            return read[stored]

        given = self._calls[index][layer].with_rest(StoredTensor, found)
        self._recent = read
        return replace(given, stream=stream)

    def _read(self, stored: StoredTensor) -> Tensor:
        numbers = torch.from_numpy(self._folder.read(STAGE, stored.number)).view(stored.dtype)
        return numbers.view(stored.sizes).expand(stored.shape)
