"""What must hold for any cut of any model, in one place."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

import fairpruner as fp
from fairpruner.core.tod import removal_order
from fairpruner.discovery.lively import lively
from fairpruner.models.calling import call, output_tensors
from fairpruner.models.narrowing import copy_with

IN_FLOAT64 = 1e-8


def doubled(example: Any) -> Any:
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, example
    )


def outputs(model: nn.Module, example: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return [t for t in output_tensors(call(model.eval(), example)) if t.is_floating_point()]


def difference(a: nn.Module, b: nn.Module, example: Any) -> float:
    """The largest difference of two models' outputs, as a share of the largest output."""
    first, second = outputs(a, example), outputs(b, example)
    assert [t.shape for t in first] == [t.shape for t in second]
    return max(float((x - y).abs().max() / x.abs().max()) for x, y in zip(first, second, strict=True))


def some_units(spaces: fp.Spaces, share: float, seed: int) -> dict[str, tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    depths = {s.name: min(int(s.size * share), s.size - s.min_keep) // s.groups * s.groups for s in spaces}
    return {
        s.name: tuple(removal_order(np.argsort(rng.permutation(s.size)), s.groups)[: depths[s.name]].tolist())
        for s in spaces
    }


def with_lively_weights(model: nn.Module) -> nn.Module:
    """The model in float64 with weights under which no signal dies on its way: a wrong cut cannot hide."""
    return copy_with(model, lambda name, tensor: lively(name, tensor, torch.float64)).eval()


def check_cut(
    model: nn.Module,
    example: Any,
    spaces: fp.Spaces,
    removed: Mapping[str, tuple[int, ...]],
    tolerance: float = IN_FLOAT64,
) -> nn.Module:
    """Mask equals cut, predicted equals measured, the model given is untouched; returns the cut model."""
    before = copy.deepcopy(model.state_dict())
    plan = fp.Plan.removing(spaces, removed)
    small = fp.cut(model, plan)
    assert difference(fp.mask(model, plan), small, example) < tolerance
    assert plan.predicted["params"] == fp.count_params(small)
    assert plan.predicted["flops"] == fp.count_flops(small, example)
    assert plan.original["params"] == fp.count_params(model)
    assert plan.original["flops"] == fp.count_flops(model, example)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    check_attributes(small)
    return small


def check_attributes(model: nn.Module) -> None:
    """Every module's size attributes say the sizes of its tensors."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            first, second = module.weight.shape[:2]
            sides = (first, second * module.groups) if module.transposed else (second * module.groups, first)
            assert (module.in_channels, module.out_channels) == sides, name
        elif isinstance(module, nn.Linear):
            assert (module.out_features, module.in_features) == tuple(module.weight.shape), name
        elif isinstance(module, nn.modules.batchnorm._NormBase):
            sizes = {t.shape[0] for t in (module.weight, module.running_mean) if t is not None}
            assert sizes <= {module.num_features}, name
        elif isinstance(module, nn.GroupNorm):
            assert module.num_channels == module.weight.shape[0], name
            assert module.num_channels % module.num_groups == 0, name
        elif isinstance(module, nn.PReLU):
            assert module.num_parameters == module.weight.shape[0], name
