"""Models that cannot be cut, counted or saved are refused with the next step, never treated half."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import fairpruner as fp

EXAMPLE = torch.ones(2, 4)


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def traced() -> Any:
    return torch.jit.trace(plain(), EXAMPLE)


def scripted() -> Any:
    return torch.jit.script(plain())


def partly_scripted() -> nn.Module:
    return nn.Sequential(scripted(), nn.Linear(2, 2))


def exported() -> Any:
    return torch.export.export(plain(), (EXAMPLE,))


def quantized() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(plain(), {nn.Linear})


def compiled() -> Any:
    return torch.compile(plain(), backend="eager")


def compiled_in_place() -> nn.Module:
    model = plain()
    model[0].compile(backend="eager")
    return model


def sparse() -> nn.Module:
    model = plain()
    model[0].weight = nn.Parameter(model[0].weight.detach().to_sparse(), requires_grad=False)
    return model


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 2))


def divided() -> nn.Module:
    """A tensor that this one process holds as its share of a group of one."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = plain()
        whole = distribute_tensor(model[0].weight.detach(), init_device_mesh("cpu", (1,)))
        model[0].weight = nn.Parameter(whole)
        return model
    finally:
        torch.distributed.destroy_process_group()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "traced": (traced, r"The model \(TopLevelTracedModule\) is TorchScript, .* Give the Python module"),
    "scripted": (scripted, r"The model \(RecursiveScriptModule\) is TorchScript"),
    "frozen": (lambda: torch.jit.freeze(scripted().eval()), r"is TorchScript"),
    "partly scripted": (partly_scripted, r"The model's '0' \(RecursiveScriptModule\) is TorchScript"),
    "exported": (exported, r"The model \(ExportedProgram\) is an exported graph"),
    "exported module": (lambda: exported().module(), r"is an exported graph"),
    "quantized": (quantized, r"The model's '0' \(Linear\) is quantized: .* Prune the model before"),
    "compiled": (compiled, r"The model \(OptimizedModule\) is compiled, .* Give the module it was made from"),
    "compiled in place": (compiled_in_place, r"The model's '0' \(Linear\) is compiled, .* Prune the model"),
    "sparse": (sparse, r"The model's '0' \(Linear\) has a sparse tensor weight, .* Make it dense"),
    "lazy": (lazy, r"The model's '0' \(LazyLinear\) is lazy: its weight has no shape"),
    "parallel": (
        lambda: nn.DataParallel(plain()),
        r"\(DataParallel\) divides its work .* Give the model inside",
    ),
    "divided": (divided, r"The model's '0' \(Linear\) has a tensor weight that is divided among processes"),
    "no module": (lambda: plain().forward, r"The model is of type method, expected a torch.nn.Module"),
}


@pytest.fixture(params=REFUSED)
def refused(request: pytest.FixtureRequest) -> tuple[Any, str]:
    build, sentence = REFUSED[request.param]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit and eager quantization are on their way out
        return build(), sentence


def test_no_stage_takes_a_model_that_it_would_treat_half(refused: tuple[Any, str], tmp_path: Path) -> None:
    model, sentence = refused
    plan = fp.Plan.removing(fp.discover(plain(), EXAMPLE), {"0": (1, 5)})
    data = [(EXAMPLE, torch.tensor([0, 1]))]
    stages: list[Callable[[], Any]] = [
        lambda: fp.discover(model, EXAMPLE),
        lambda: fp.score(model, data),
        lambda: fp.cut(model, plan),
        lambda: fp.mask(model, plan),
        lambda: fp.count_params(model),
        lambda: fp.count_flops(model, EXAMPLE),
        lambda: fp.save(model, plan, tmp_path / "folder"),
        lambda: fp.repair(model, plain(), plan, data),
        lambda: fp.repair(plain(), model, plan, data),
        lambda: fp.recover(model, data, epochs=1),
        lambda: fp.recover(plain(), data, epochs=1, teacher=model),
        lambda: fp.prune(model, data, alpha=0.2),
    ]
    for stage in stages:
        with pytest.raises(fp.FairprunerError, match=sentence):
            stage()


def test_load_refuses_an_architecture_that_it_could_not_fill(
    refused: tuple[Any, str], tmp_path: Path
) -> None:
    model, _ = refused
    original = plain()
    plan = fp.Plan.removing(fp.discover(original, EXAMPLE), {"0": (1, 5)})
    fp.save(fp.cut(original, plan), plan, tmp_path / "folder")
    with pytest.raises(fp.FairprunerError, match=r"expected|fixed|quantized|compiled|sparse|lazy|divide"):
        fp.load(tmp_path / "folder", build=lambda: model)


def test_a_lazy_model_is_not_given_its_shapes_behind_the_users_back() -> None:
    model = lazy()
    with pytest.raises(fp.FairprunerError, match="Call the model once on an example, then try again"):
        fp.discover(model, EXAMPLE)
    assert isinstance(model[0], nn.LazyLinear)
    model(EXAMPLE)
    assert fp.discover(model, EXAMPLE).names == ("0",)


def test_a_scripted_activation_without_tensors_is_no_obstacle() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        activation = torch.jit.script(nn.ReLU())
    model = nn.Sequential(nn.Linear(4, 8), activation, nn.Linear(8, 2))
    plan = fp.Plan.removing(fp.discover(model, EXAMPLE), {"0": (1, 5)})
    assert torch.allclose(fp.cut(model, plan)(EXAMPLE), fp.mask(model, plan)(EXAMPLE))
