"""A language model that is larger than memory: a folder from which one layer is read at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fairpruner.core.sealed import digest
from fairpruner.errors import FairprunerError
from fairpruner.inputs.checkpoint_tensors import CheckpointTensors, check_is_plain
from fairpruner.inputs.hugging_face import architecture, is_causal, is_source, place_of
from fairpruner.inputs.shard_index import check_indexes, shard_files
from fairpruner.models.layer_calls import LayerModel
from fairpruner.models.layer_stack import Shell, passing_on, path_of_layers, with_stubs
from fairpruner.models.randomness import random_state_kept
from fairpruner.models.transformers_private import compute_buffers
from fairpruner.terminal.progress import announce

ORIGINAL = "original"  # the role of the layers of the folder's own model
EXAMPLE = {"input_ids": torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]])}  # shows how the layers are called


class Streamed:
    """A causal language model in a folder of safetensors files, of which one layer is in memory at a time.

    `discover`, `score`, `cut_files` and `perplexity` take it in place of a model. They keep intermediate
    results in the folder `work`, which must be on a disk with room, and remove them at the end. A call that
    was killed continues where it was if it finds its work folder; without `work`, it begins again.
    All computations are in float32, whatever the precision of the weights.
    """

    def __init__(
        self, source: str, *, work: str | Path | None = None, say: Callable[[str], None] = announce
    ) -> None:
        """Open "hf:folder"; `say` gets one sentence about the disk that a call needs."""
        place = Path(place_of(source))
        if not is_source(source) or not place.is_dir():
            raise FairprunerError(
                f"{source} is not the folder of a Hugging Face model: give hf:FOLDER, which is read layer by"
                " layer."
            )
        check_indexes(place)
        self.source, self.place, self.say = source, place, say
        self.work = None if work is None else Path(work)
        with random_state_kept(()), torch.no_grad():
            with torch.device("meta"):
                self.model: Any = architecture(str(place))
            compute_buffers(self.model)
        if not is_causal(self.model):
            raise FairprunerError(
                f"{type(self.model).__name__} is not a causal language model: load it, and leave out"
                " --stream."
            )
        check_is_plain(self.model, place)
        kept = getattr(self.model.config, "dtype", None)
        for parameter in self.model.parameters() if isinstance(kept, torch.dtype) else ():
            parameter.data = parameter.data.to(kept)  # as it lies in the files, for costs in bytes
        self._tensors = CheckpointTensors(self.model, place)
        self.path = path_of_layers(self.model)
        self._stubs = with_stubs(self.model, self.path)
        self._tuples = False
        shell = self.shell()
        self.width = shell.check(EXAMPLE)  # of the stream
        self.count, self._tuples = shell.count, shell.tuples

    def layer(self, number: int, role: str = ORIGINAL) -> LayerModel:
        """One layer with its weights, read from the files."""
        gc.collect()  # an earlier layer that is part of a cycle of references would stay in memory beside it
        path = f"{self.path}.{number}"
        layer = self._tensors.filled(
            self.model.get_submodule(path), path, lambda name: name.startswith(f"{path}.")
        )
        return LayerModel(path, layer, role)

    def shell(self) -> Shell:
        """All but the layers, with weights."""
        filled = self._tensors.filled(self._stubs, "", lambda name: self.layer_of(name) is None)
        return Shell(filled.requires_grad_(False), tuples=self._tuples)

    @contextmanager
    def only(self, number: int) -> Iterator[Any]:
        """Inside, the model without weights, whose other layers pass their stream on."""
        with passing_on(self.model, self.path, number, tuples=self._tuples):
            yield self.model

    def layer_of(self, tensor: str) -> int | None:
        """The number of the layer that holds a tensor; None for tensors outside of all layers."""
        inside = tensor.removeprefix(f"{self.path}.").partition(".")[0]
        return int(inside) if tensor.startswith(f"{self.path}.") else None

    @property
    def identity(self) -> str:
        """A digest of the configuration, and of the sizes and times of the files."""
        files = [
            (file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in shard_files(self.place)
        ]
        return digest({"files": files, "config": (self.place / "config.json").read_text(encoding="utf-8")})

    def __repr__(self) -> str:
        return f"Streamed({self.source!r})"
