"""The tensors of a Hugging Face folder as its model holds them, read part by part from safetensors files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fairpruner.core.tensor_files import open_tensors
from fairpruner.errors import FairprunerError
from fairpruner.inputs.checkpoint_layout import ConvertedTensors, parts_of
from fairpruner.inputs.shard_index import shard_files
from fairpruner.models.copying import deep_copy


def check_is_plain(model: Any, place: Path) -> None:
    """Refuse quantised tensors, which can be neither cut nor computed with as they lie."""
    if getattr(model.config, "quantization_config", None) is not None:
        raise FairprunerError(
            f"The tensors of {place} are quantised, so they cannot be cut: give the model in bfloat16 or"
            " float32."
        )


def holders(place: Path) -> dict[str, Path]:
    """Which file holds each tensor."""
    files = shard_files(place)
    if not files:
        raise FairprunerError(
            f"Folder {place} has neither a model.safetensors nor an index of several files: give the folder"
            " of a model in safetensors files."
        )
    found: dict[str, Path] = {}
    for file in files:
        with open_tensors(file) as opened:
            found |= dict.fromkeys(opened.names, file)
    return found


class CheckpointTensors:
    """The tensors of a folder for one model, which itself is on the meta device."""

    def __init__(self, model: nn.Module, place: Path) -> None:
        self._model, self._place = model, place
        self._holders = holders(place)
        self._parts = parts_of(model, self._holders)

    def filled(self, module: nn.Module, prefix: str, inside: Callable[[str], bool]) -> nn.Module:
        """A copy of a module at the path `prefix`, filled in float32 with the tensors that `inside` names.

        A parameter that lies under several names is filled once.
        """
        read = self._read(part for part in self._parts if inside(part.target))
        memo: dict[int, Any] = {}
        for name, parameter in module.named_parameters(prefix=prefix, remove_duplicate=False):
            if name in read:
                memo[id(parameter)] = nn.Parameter(read.pop(name), requires_grad=parameter.requires_grad)
        for name, buffer in module.named_buffers(prefix=prefix, remove_duplicate=False):
            if name in read:
                memo[id(buffer)] = read.pop(name)
        lost = [name for name, p in module.named_parameters(prefix=prefix) if id(p) not in memo]
        if lost:
            raise FairprunerError(
                f"{len(lost)} tensors of {type(self._model).__name__} are missing in the files of"
                f" {self._place} ({', '.join(lost[:3])})."
            )
        return deep_copy(module, memo)

    def _read(self, parts: Iterable[ConvertedTensors]) -> dict[str, Tensor]:
        shapes = {name: tensor.shape for name, tensor in self._model.state_dict().items()}
        read: dict[str, Tensor] = {}
        for part in parts:
            sources = dict(self._sources(name for name, _ in part.sources))
            made = part.convert(self._model, ((pattern, sources.pop(name)) for name, pattern in part.sources))
            for name, tensor in made.items():
                if tensor.shape != shapes.get(name):
                    raise FairprunerError(
                        f"The files of {self._place} give {name} of shape {list(tensor.shape)}, its"
                        f" configuration asks for {list(shapes.get(name, ()))}."
                    )
                read[name] = tensor.float() if tensor.is_floating_point() else tensor
        return read

    def _sources(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        files: Mapping[Path, list[str]] = defaultdict(list)
        for name in names:
            files[self._holders[name]].append(name)
        for file, wanted in files.items():
            with open_tensors(file) as opened:
                for name in wanted:
                    yield name, opened.read(name)
