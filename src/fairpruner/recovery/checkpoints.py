"""A training run on disk: one safetensors file that always holds a whole state, never pickle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fairpruner.core.sealed import Json, digest, read_tensors, write_tensors
from fairpruner.core.writing import written_whole
from fairpruner.errors import FairprunerError
from fairpruner.models.fingerprint import fingerprint

FILE = "checkpoint.safetensors"
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state of a run: sets of named tensors, and everything else as JSON."""

    tensors: Mapping[str, Tensors]  # "model", "optimizer", … -> name -> tensor
    content: Json


def save_checkpoint(checkpoint: Checkpoint, folder: Path, settings: Json) -> None:
    """Put a checkpoint in the place of the one before; whoever dies meanwhile leaves that one."""
    flat = {
        f"{group}/{name}": tensor.detach().cpu().contiguous()
        for group, tensors in checkpoint.tensors.items()
        for name, tensor in tensors.items()
    }
    with written_whole(folder / FILE) as temporary:
        write_tensors(
            temporary,
            "checkpoint",
            {"settings": settings, "groups": list(checkpoint.tensors), "content": checkpoint.content},
            flat,
        )


def load_checkpoint(folder: Path, settings: Json) -> Checkpoint | None:
    """The checkpoint in a folder, if there is one; refused if another run made it."""
    path = folder / FILE
    if not path.exists():
        return None
    file, flat = read_tensors(path, "checkpoint")
    for name, now in settings.items():
        then = file["settings"].get(name)
        if then != now:
            raise FairprunerError(
                f"{path} belongs to another run: its {name} is {then}, this run's is {now}. Give what that"
                " run was given, or another folder."
            )
    groups: dict[str, dict[str, Tensor]] = {group: {} for group in file["groups"]}
    for key, tensor in flat.items():
        group, _, name = key.partition("/")
        groups[group][name] = tensor
    return Checkpoint(groups, file["content"])


def tensors_of_model(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, a shared one once."""
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def fill(model: nn.Module, tensors: Tensors) -> None:
    """Give a model's tensors these values, in place."""
    with torch.no_grad():
        for name, tensor in tensors_of_model(model).items():
            tensor.copy_(tensors[name])


def identity(model: nn.Module) -> Json:
    """Which model a run starts from: its shapes, and its values."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors_of_model(model).items()}
    return {"model": fingerprint(model), "starting weights": digest({}, tensors)[:16]}


def optimizer_state(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's memory by "position of the parameter/name": tensors, and plain values."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for position, parameter in enumerate(_parameters(optimizer)):
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{position}/{name}"] = value
            elif value is None or isinstance(value, (bool, int, float, str)):
                plain[f"{position}/{name}"] = value
            else:
                raise FairprunerError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} as {name!r}, which no"
                    " checkpoint can hold without pickle: choose another optimizer, or no folder."
                )
    return tensors, plain


def restore_optimizer(optimizer: Optimizer, tensors: Tensors, plain: Mapping[str, Any]) -> None:
    """Give an optimizer the memory that `optimizer_state` told; step counters stay where it keeps them,
    on the CPU or beside the parameter.
    """
    parameters = list(_parameters(optimizer))
    for key, value in (*tensors.items(), *plain.items()):
        position, _, name = key.partition("/")
        parameter = parameters[int(position)]
        on_device = isinstance(value, Tensor) and value.ndim > 0
        optimizer.state[parameter][name] = value.to(parameter.device) if on_device else value


def _parameters(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
