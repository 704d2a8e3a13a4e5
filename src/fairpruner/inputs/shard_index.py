"""The files that hold the tensors of a Hugging Face model: one, or several that an index names."""

from __future__ import annotations

from pathlib import Path

from fairpruner.core.reading import read_plain_json
from fairpruner.errors import FairprunerError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED_INDEX = "pytorch_model.bin.index.json"


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the tensors of a folder, in order."""
    if not (folder / INDEX).is_file():
        return [folder / SINGLE] if (folder / SINGLE).is_file() else []
    return [folder / name for name in indexed_names(folder / INDEX)]


def check_indexes(folder: Path) -> None:
    """Refuse a folder with an index that names files outside of it."""
    for name in (INDEX, PICKLED_INDEX):
        if (folder / name).is_file():
            indexed_names(folder / name)


def indexed_names(index: Path) -> list[str]:
    """The files that an index names, each once; all must lie beside the index."""
    content = read_plain_json(index)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise FairprunerError(f"{index} is not an index of tensors: expected a weight_map of names to files.")
    names = sorted(set(places.values()))
    for name in names:
        if not name or Path(name).name != name or "\\" in name or "\0" in name:
            raise FairprunerError(f"{index} names the file {name!r}, expected only files of the same folder.")
    return names
