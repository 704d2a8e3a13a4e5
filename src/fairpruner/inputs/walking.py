"""Walking batches through a streamed model, layer by layer, with the streams between layers on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairpruner.core.sealed import Json, digest
from fairpruner.core.work_folder import WorkFolder
from fairpruner.errors import FairprunerError
from fairpruner.inputs.batches import Batch, forward
from fairpruner.inputs.stored_calls import StoredCalls
from fairpruner.inputs.streamed import ORIGINAL, Streamed
from fairpruner.models.calling import describe, in_eval_mode, tensors_of
from fairpruner.models.layer_calls import CALLS, LayerModel
from fairpruner.models.randomness import random_state_kept
from fairpruner.terminal.progress import batch_bar


def stage(role: str, layer: int) -> str:
    """The name on disk of what layer `layer` reads in a role; the last one is what the last layer returns.

    >>> stage("original", 3)
    'original-0003'
    """
    return f"{role}-{layer:04d}"


def _alone(model: LayerModel, layer: int) -> AbstractContextManager[None]:
    return nullcontext()


class Walk:
    """Some batches on their way through a streamed model."""

    def __init__(
        self,
        streamed: Streamed,
        batches: Sequence[Batch],
        folder: WorkFolder,
        show: Callable[[str, int, str], None],
        *,
        room: int,
    ) -> None:
        """`room`: bytes on disk that the walk takes, without those of what layers are called with."""
        self.streamed, self.batches, self.folder = streamed, batches, folder
        self._show, self._done, self._room = show, 0, room
        self._calls = StoredCalls(folder)

    def start(self, *roles: str) -> None:
        """Find out what the layers are called with, and keep what the first one reads, once for each role."""
        self.folder.check_room(self._room)  # before anything is read or written
        shell = self.streamed.shell()
        missing = [role for role in roles if not self._begun(role)]
        with ExitStack() as stages:
            writers = [stages.enter_context(self.folder.writing(stage(role, 0))) for role in missing]
            add = stages.enter_context(self._calls.writing())
            for index, batch in enumerate(self.batches):
                calls = shell.calls(batch.inputs)
                add(calls)
                for write in writers:
                    write(index, calls[0].stream.numpy())
        self.streamed.say(self.folder.check_room(self._room + self._calls.bytes))

    def _begun(self, role: str) -> bool:
        return any(name.startswith(f"{role}-") for name in self.folder.stages())

    def batch(self, index: int, layer: int, roles: Sequence[str]) -> Batch:
        """A batch as a `LayerModel` of one of these roles is called with it."""
        whole = self.batches[index]
        calls = {role: self._calls.of(index, layer, self.stream(index, layer, role)) for role in roles}
        return replace(whole, inputs={**whole.inputs, CALLS: calls})

    def stream(self, index: int, layer: int, role: str = ORIGINAL) -> Tensor:
        """What a layer reads in a batch, [N, T, H]."""
        return torch.from_numpy(self.folder.read(stage(role, layer), index))

    def write(
        self, name: str, title: str, step: Callable[[int], Tensor], indices: Sequence[int] | None = None
    ) -> None:
        """Write a stage: what `step` gives for each batch."""
        with self.folder.writing(name) as write:
            for index in range(len(self.batches)) if indices is None else indices:
                write(index, step(index).detach().numpy())
                self.advance(title)

    def advance(self, title: str) -> None:
        """Show that one more batch has passed a layer."""
        self._done += 1
        self._show(title, self._done, f"{len(self.batches)} in each pass")

    def forward(
        self, *, keep: bool, around: Callable[[LayerModel, int], AbstractContextManager[None]] = _alone
    ) -> None:
        """Take all batches through all layers, each inside of `around`.

        Unless `keep`, a stream is removed once the next one is there.
        """
        for layer in range(self.streamed.count):
            if self.folder.has(stage(ORIGINAL, layer + 1)) or not self.folder.has(stage(ORIGINAL, layer)):
                continue
            self._through(layer, around)
            if not keep:
                self.folder.drop(stage(ORIGINAL, layer))

    def _through(self, layer: int, around: Callable[[LayerModel, int], AbstractContextManager[None]]) -> None:
        """Take all batches through one layer."""
        model = self.streamed.layer(layer)
        title = f"forward, layer {layer + 1} of {self.streamed.count}"
        with around(model, layer), in_eval_mode(model):
            self.write(stage(ORIGINAL, layer + 1), title, partial(self._run, model, layer))

    def _run(self, model: LayerModel, layer: int, index: int) -> Tensor:
        output: Tensor = forward(model, self.batch(index, layer, [ORIGINAL]))
        return output

    def outputs(self) -> Iterator[tuple[Batch, Any]]:
        """The model's output on each batch, after `forward`."""
        shell = self.streamed.shell()
        for index, batch in enumerate(self.batches):
            yield batch, shell.finish(batch.inputs, self.stream(index, self.streamed.count))


class Disk(NamedTuple):
    """What a walk keeps on disk at once: a number of streams, and bytes beside them."""

    streams: int
    beside: int = 0


@contextmanager
def walking(
    streamed: Streamed, batches: Sequence[Batch], job: Json, *, disk: Disk, passes: int, process: int = 0
) -> Iterator[Walk]:
    """A walk in the work folder of a model; `passes` is how often a batch passes each layer.

    The folder is removed at the end. After an exception it stays, so that the same call can continue.
    """
    for batch in batches:
        _check_tokens(batch)
    seen = {
        f"{number}": tensor
        for number, tensor in enumerate(tensors_of([(batch.inputs, batch.labels) for batch in batches]))
    }
    folder = WorkFolder(
        streamed.work, {**job, "model": streamed.identity, "data": digest({}, seen)}, process=process
    )
    finished = False
    try:
        tokens = sum(batch.inputs["input_ids"].numel() for batch in batches)
        room = disk.streams * tokens * streamed.width * 4 + disk.beside
        with batch_bar(passes * streamed.count * len(batches)) as show, random_state_kept(), torch.no_grad():
            yield Walk(streamed, batches, folder, show, room=room)
        finished = True
    finally:
        folder.close(finished=finished)


def _check_tokens(batch: Batch) -> None:
    if not isinstance(batch.inputs, Mapping) or not isinstance(batch.inputs.get("input_ids"), Tensor):
        raise FairprunerError(
            f"Batch {batch.position} has {describe(batch.inputs)} as its input, expected a dict with"
            " input_ids: a model is read layer by layer for batches of tokens only."
        )
