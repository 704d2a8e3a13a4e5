"""A training run on disk: one safetensors file, which always holds a complete state and no pickle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fairpruner.core.fields import field, listed, mapped, real, text, whole
from fairpruner.core.reading import understanding
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
    """Replace the checkpoint in a folder; if the process dies meanwhile, the earlier one stays."""
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


def load_checkpoint(folder: Path, settings: Json, model: nn.Module) -> Checkpoint | None:
    """The checkpoint in a folder, if there is one; refused if another run or another model wrote it."""
    path = folder / FILE
    if not path.exists():
        return None
    file, flat = read_tensors(path, "checkpoint")
    with understanding(path):
        then = mapped(field(file, "settings"), "settings")
        content = mapped(field(file, "content"), "content")
        groups: dict[str, dict[str, Tensor]] = {
            text(group, "the name of a group of tensors"): {}
            for group in listed(field(file, "groups"), "the groups of tensors")
        }
        for key, tensor in flat.items():
            group, _, name = key.partition("/")
            groups[group][name] = tensor
    for name, now in settings.items():
        if then.get(name) != now:
            raise FairprunerError(
                f"{path} belongs to another run: its {name} is {then.get(name)}, this run's is {now}. Use the"
                " settings of that run, or another folder."
            )
    with understanding(path):
        _check_content(content, settings["epochs"])
        for group in ("model", "best", "average"):
            if group == "model" or groups.get(group):
                _check_tensors(groups[group], model)
    return Checkpoint(groups, content)


def _check_content(content: Json, epochs: int) -> None:
    """Refuse numbers that no run writes, so that a resumed run does not fail on them later."""
    whole(field(content, "epoch"), "epoch", at_most=epochs)
    whole(field(content, "position"), "position")
    for name, number in mapped(field(content, "tally"), "tally").items():
        real(number, f"{name} of the tally")
    history = listed(field(content, "history"), "history")
    for number, epoch in enumerate(history, start=1):
        whole(field(epoch, "number"), "the number of an epoch", at_least=number, at_most=number)
        for name, value in epoch.items():
            if value is not None or name in ("learning_rate", "loss", "seconds"):
                real(value, f"{name} of an epoch")
    if field(content, "best") is not None:
        whole(content["best"], "the best epoch", at_least=1, at_most=len(history))


def _check_tensors(found: Tensors, model: nn.Module) -> None:
    """Refuse tensors that are not those of the model by name and shape."""
    expected = tensors_of_model(model)
    for name in sorted(found.keys() | expected.keys()):
        shapes = [list(t[name].shape) if name in t else None for t in (found, expected)]
        if shapes[0] != shapes[1]:
            raise FairprunerError(f"{name} has the shape {shapes[0]}, expected {shapes[1]}.")


def tensors_of_model(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, a shared one once."""
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def fill(model: nn.Module, tensors: Tensors) -> None:
    """Copy values into a model's tensors."""
    with torch.no_grad():
        for name, tensor in tensors_of_model(model).items():
            tensor.copy_(tensors[name])


def identity(model: nn.Module) -> Json:
    """Hashes of the shapes and of the values of the model that a run starts from."""
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
    """Restore an optimizer's memory from the two results of `optimizer_state`.

    Tensors without dimensions, the step counters, stay on the CPU.
    """
    parameters = list(_parameters(optimizer))
    for key, value in (*tensors.items(), *plain.items()):
        position, _, name = key.partition("/")
        parameter = parameters[int(position)]
        on_device = isinstance(value, Tensor) and value.ndim > 0
        optimizer.state[parameter][name] = value.to(parameter.device) if on_device else value


def _parameters(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
