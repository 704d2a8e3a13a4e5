"""Cut a Hugging Face model from files to files, part by part: the whole model is never in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from fairpruner.core.arrays import Ints
from fairpruner.core.plan import Plan
from fairpruner.core.writing import is_at_or_below
from fairpruner.errors import FairprunerError
from fairpruner.files.folders import SHARD_SIZE, new_folder, seal, write_documents
from fairpruner.files.pretrained_files import GENERATION, copy_files
from fairpruner.files.shards import parse_size, write_shards
from fairpruner.inputs.checkpoint_layout import ConvertedTensors, as_in_files, parts_of
from fairpruner.inputs.checkpoint_tensors import check_is_plain, holders
from fairpruner.inputs.hugging_face import PREFIX, architecture
from fairpruner.models.narrowing import kept_indices, narrowed
from fairpruner.models.transformers_private import note_conversions, used_conversions
from fairpruner.surgery import cut_without_weights

Changes = Mapping[str, Callable[[], torch.Tensor]]  # tensor of the cut model -> how to read it
KeptIndices = Mapping[str, Mapping[int, Ints]]  # tensor -> dim -> the kept indices


def stream(
    place: str | Path,
    plan: Plan,
    folder: str | Path,
    *,
    max_shard_size: str | int = SHARD_SIZE,
    force: bool = False,
    changes: Changes | None = None,
) -> None:
    """Write the same folder as `save(cut(model, plan))`, without loading the model in the folder `place`.

    The model is built on the meta device, without memory for its tensors. A plan from a file is verified
    with random weights, a few spaces at a time. Tensors are read from the safetensors files part by part (one
    tensor, or the experts of one block), cut, and written. About one file of `max_shard_size` is in memory.
    `force` replaces a folder that `save` or `stream` wrote before. `changes` gives tensors of the cut model
    that replace those of the files, after a repair.
    """
    place = Path(place)
    if is_at_or_below(place, folder):
        raise FairprunerError(
            f"The output folder {folder} contains the model that is read: choose another output folder."
        )
    if any(space.kind in ("block", "stream") and plan.removed[space.name] for space in plan.spaces):
        raise FairprunerError(
            "The plan removes residual blocks, or channels of the residual stream, which cannot be cut from"
            " file to file yet: load the model, and save what cut(model, plan) returns."
        )
    size = parse_size(max_shard_size)
    with torch.device("meta"):
        model: Any = architecture(str(place))
    check_is_plain(model, place)
    small: Any = cut_without_weights(model, plan, room=size)
    places = holders(place)
    parts = parts_of(model, places)
    note_conversions(small, used_conversions(model))
    kept = kept_indices(plan.spaces, plan.removed)
    with new_folder(folder, force=force) as temporary:
        write_documents(small, plan, temporary, f"{PREFIX}:{place}")
        copy_files(str(place), (GENERATION,), temporary)
        write_shards(
            temporary,
            _in_files(small, _pieces(model, small, parts, places, kept), changes or {}),
            {**seal(plan), "streamed": True},
            size,
        )


def _in_files(
    small: Any, pieces: Iterable[dict[str, torch.Tensor]], changes: Changes
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors under the names that files use, some of them changed."""
    for made in pieces:
        for name in made.keys() & changes.keys():
            made[name] = changes[name]().to(made[name].dtype)
        yield from as_in_files(small, made).items()


def _pieces(
    model: Any, small: Any, parts: list[ConvertedTensors], places: Mapping[str, Path], kept: KeptIndices
) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of the smaller model, one part after the other."""
    shapes = {name: tensor.shape for name, tensor in small.state_dict().items()}
    missing = set(shapes)
    for part in parts:
        made = _cut_part(model, part, places, kept)
        wrong = [name for name, tensor in made.items() if tensor.shape != shapes.get(name)]
        if wrong:
            raise FairprunerError(
                f"After the cut, {wrong[0]} of the files has the shape {list(made[wrong[0]].shape)}, expected"
                f" {list(shapes.get(wrong[0], ()))}: load the model, and cut it without --stream."
            )
        missing -= made.keys()
        yield made
    tied = {
        id(tensor) for name, tensor in small.named_parameters(remove_duplicate=False) if name not in missing
    }
    lost = [name for name in missing if id(small.get_parameter_or_buffer(name)) not in tied]
    if lost:
        raise FairprunerError(
            f"{len(lost)} tensors of {type(small).__name__} are missing in the files"
            f" ({', '.join(sorted(lost)[:3])}): give the complete folder of the model."
        )


def _cut_part(
    model: Any, part: ConvertedTensors, places: Mapping[str, Path], kept: KeptIndices
) -> dict[str, torch.Tensor]:
    """The model's tensors that one part gives, cut to the kept indices.

    If files store experts one by one and the model stacks them, only the kept experts are read.
    """
    of_target = kept.get(part.target, {})
    early = part.stacks and 0 in of_target
    stays = {int(i) for i in of_target[0]} if early else None
    wanted = [
        (name, pattern) for position, name, pattern in part.positions() if stays is None or position in stays
    ]
    tensors: dict[str, torch.Tensor] = {}
    files = defaultdict(list)
    for name, _ in wanted:
        files[places[name]].append(name)
    for file, names in files.items():
        with safe_open(file, framework="pt") as opened:  # maps the file; only what is used is read
            tensors |= {name: opened.get_tensor(name) for name in names}
    mapped = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    made = part.convert(model, ((pattern, tensors.pop(name)) for name, pattern in wanted))
    cut_down = {
        name: narrowed(tensor, {dim: i for dim, i in kept.get(name, {}).items() if not (early and dim == 0)})
        for name, tensor in made.items()
    }
    # A tensor that is a view would keep its whole file mapped until it is written.
    return {
        name: tensor.clone() if tensor.untyped_storage().data_ptr() in mapped else tensor.contiguous()
        for name, tensor in cut_down.items()
    }
