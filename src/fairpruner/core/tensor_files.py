"""Reading and writing safetensors files of any origin.

Tensors are read into memory, not mapped from the file. Reading a mapped tensor kills the process if another
program has shortened the file, and sums over it depend on its place in the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fairpruner.core.reading import check_regular, unreadable
from fairpruner.errors import FairprunerError

LENGTH = 8  # bytes at the beginning of a file that hold the length of its header


class TensorFile:
    """An open safetensors file: its metadata, the names of its tensors, and each of them on request."""

    def __init__(self, path: Path, mapped: Any, file: IO[bytes]) -> None:
        self.path = path
        self.metadata: dict[str, str] = mapped.metadata() or {}
        self.names: list[str] = list(mapped.keys())
        self._mapped, self._file = mapped, file
        self._header = _read_header(file)
        self._start = file.tell()

    def shape(self, name: str) -> list[int]:
        """The shape of one tensor, which is not read."""
        shape: list[int] = self._header[name]["shape"]
        return shape

    def read(self, name: str) -> Tensor:
        """One tensor."""
        like = self._mapped.get_tensor(name)  # only for its type and shape; its numbers are not read
        tensor = torch.empty(like.shape, dtype=like.dtype, device="cpu")
        begin, end = self._header[name]["data_offsets"]
        self._file.seek(self._start + begin)
        room = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
        if len(room) != end - begin or (len(room) and self._file.readinto(room) != len(room)):  # type: ignore[attr-defined]
            raise FairprunerError(f"{self.path} became shorter while it was read: restore it, and try again.")
        return tensor


@contextmanager
def open_tensors(path: str | Path) -> Iterator[TensorFile]:
    """Open a safetensors file; any fault in it is reported in one sentence."""
    path = Path(path)
    check_regular(path)
    try:
        with safe_open(path, framework="pt") as mapped, path.open("rb") as file:
            yield TensorFile(path, mapped, file)
    except OSError as error:
        raise unreadable(path, error) from error
    except (SafetensorError, ValueError, KeyError) as error:
        raise FairprunerError(f"{path} is not a complete safetensors file: {error}.") from error


def read_all(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and all tensors of a file."""
    with open_tensors(path) as file:
        return file.metadata, {name: file.read(name) for name in file.names}


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with the usual permissions; equal values give equal bytes."""
    for name, tensor in tensors.items():
        if tensor.dtype is torch.complex128:
            raise FairprunerError(
                f"Tensor {name!r} is complex128, which no safetensors file can hold: make it complex64, or"
                " register it with persistent=False."
            )
    path.touch()
    mode = path.stat().st_mode  # safetensors writes files that only their owner can read
    save_file(dict(tensors), path, metadata=dict(metadata))
    path.chmod(mode)
    with path.open("r+b") as file:  # safetensors writes the metadata in a random order
        header = _read_header(file)
        room = file.tell() - LENGTH
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        ordered = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(room)
        assert len(ordered) == room, "safetensors and json write the same header in different lengths"
        file.seek(LENGTH)
        file.write(ordered)


def _read_header(file: IO[bytes]) -> dict[str, Any]:
    """The header of a file; the next read from `file` gives the numbers of the first tensor."""
    header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(LENGTH), "little")))
    return header
