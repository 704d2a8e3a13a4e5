"""The tensors of a Hugging Face model on disk: one safetensors file, or several with an index.

`transformers` reads them. `split_torch_state_dict_into_shards` of huggingface_hub is not used, because it
plans from a whole state dictionary, and a streamed cut never holds one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch

from fairpruner.core.sealed import Json, readable, write_tensors
from fairpruner.errors import FairprunerError
from fairpruner.files import MODEL
from fairpruner.inputs.shard_index import INDEX

SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_size(text: str | int) -> int:
    """A number of bytes, from a number or from text with a unit.

    >>> parse_size("5GB")
    5000000000
    """
    number, unit = (str(text)[:-2], str(text)[-2:].upper()) if str(text)[-1:].isalpha() else (str(text), "")
    try:
        size = int(float(number) * (UNITS[unit] if unit else 1))
    except (KeyError, ValueError) as error:
        raise FairprunerError(
            f"The shard size is {text!r}, expected a number with KB, MB or GB, such as 5GB."
        ) from error
    if size < 1:
        raise FairprunerError(f"The shard size is {text!r}, expected at least 1 byte.")
    return size


def write_shards(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], content: Json, max_bytes: int
) -> None:
    """Write tensors in their order; a file is written as soon as the next tensor would make it too large.

    So at most `max_bytes`, or one larger tensor, are in memory.
    """
    files: list[tuple[Path, list[str]]] = []
    held: dict[str, torch.Tensor] = {}
    total, size = 0, 0  # bytes of all tensors, bytes of the tensors held

    def flush() -> None:
        path = folder / f"shard-{len(files)}.safetensors"
        write_tensors(path, "model", content, held)
        files.append((path, list(held)))
        held.clear()

    for name, tensor in tensors:
        if held and size + tensor.nbytes > max_bytes:
            flush()
            size = 0
        held[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(files) == 1:
        files[0][0].rename(folder / MODEL)
        return
    places: dict[str, str] = {}
    for number, (path, names) in enumerate(files, start=1):
        # The names contain the number of files, which is known only now.
        final = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        path.rename(folder / final)
        places |= dict.fromkeys(names, final)
    (folder / INDEX).write_text(
        readable({"metadata": {"total_size": total}, "weight_map": places}) + "\n", encoding="utf-8"
    )
