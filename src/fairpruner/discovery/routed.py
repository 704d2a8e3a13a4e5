"""Spaces of routed experts: every tensor and attribute that has one entry for each expert of a block."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairpruner.core.tod import removal_order
from fairpruner.core.units import Count, Role, Slice, UnitSpace
from fairpruner.discovery.failing import raise_if_out_of_memory
from fairpruner.models.calling import call, evaluating
from fairpruner.models.experts import SIZES, ExpertBlock, is_route
from fairpruner.models.narrowing import cut_units

ROW = 8  # numbers of two bytes: kernels that compute all experts at once take rows of 16 bytes


def expert_space(model: nn.Module, block: ExpertBlock, example: Any) -> UnitSpace:
    """The experts of a block as units: their weights, and the rows, biases and scales of the router."""
    owner = np.arange(block.size)
    slices = [
        Slice(tensor, dim, owner, role)
        for tensor, dim, role in (*_weights(model, block), *_routes(model, block))
    ]
    counts = [
        Count(path, name, owner)
        for path in _modules(model, block)
        for name in SIZES
        if vars(model.get_submodule(path)).get(name) == block.size
    ]
    space = UnitSpace(
        block.name, "expert", block.size, tuple(slices), tuple(counts), block.min_keep, block.groups
    )
    return space if block.top_k else replace(space, min_keep=_fewest(model, space, example))


def _fewest(model: nn.Module, space: UnitSpace, example: Any) -> int:
    """The smallest number of experts with which the model runs.

    It is needed if no attribute holds the number of experts that a token uses.
    """

    def runs(kept: int) -> bool:
        small = cut_units(
            model, [space], {space.name: removal_order(np.arange(space.size), space.groups)[kept:]}
        )
        try:
            with evaluating(small), torch.no_grad():
                call(small, example)
        except Exception as error:  # the user's code may raise anything when experts are missing
            raise_if_out_of_memory(error, model)
            return False
        return True

    fewer = range(space.min_keep, space.size, space.groups)
    return next(filter(runs, fewer)) if len(fewer) and runs(fewer[-1]) else space.size


def aligned(space: UnitSpace, fused: Collection[str]) -> UnitSpace:
    """The space; it keeps a multiple of 8 units if fused experts compute or read them."""
    inside = any(part.tensor.rpartition(".")[0] in fused for part in space.slices)
    wide = space.kind in ("hidden", "stream")
    return replace(space, multiple=math.gcd(space.size, ROW)) if inside and wide else space


def _weights(model: nn.Module, block: ExpertBlock) -> Iterator[tuple[str, int, Role]]:
    experts = model.get_submodule(block.experts)
    if isinstance(experts, nn.ModuleList):
        yield block.experts, 0, "carry"
        return
    for name, tensor in (*experts.named_parameters(recurse=False), *experts.named_buffers(recurse=False)):
        if tensor.ndim and tensor.shape[0] == block.size:
            yield f"{block.experts}.{name}", 0, "write" if tensor.ndim == 3 else "carry"


def _routes(model: nn.Module, block: ExpertBlock) -> Iterator[tuple[str, int, Role]]:
    """The rows of the router, and tensors beside them that hold one number for each expert."""
    rows = {
        p.shape
        for p in model.get_submodule(block.router).parameters(recurse=False)
        if is_route(p, block.size)
    }
    for name, tensor in _beside(model, block):
        if tensor.shape in rows:
            yield name, tensor.shape.index(block.size), "route"
        elif tensor.numel() == block.size and block.size in tensor.shape:
            yield (
                name,
                tensor.shape.index(block.size),
                "route" if "bias" in name.rpartition(".")[2] else "carry",
            )


def _beside(model: nn.Module, block: ExpertBlock) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of the router as a whole, and of the block itself."""
    for path in _modules(model, block):
        module = model.get_submodule(path)
        for name, tensor in (
            (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            if path != block.experts
            else ()
        ):
            yield f"{path}.{name}" if path else name, tensor


def _modules(model: nn.Module, block: ExpertBlock) -> Iterator[str]:
    """The paths of the block, its experts, and all of the child that holds the router."""
    above = block.experts.rpartition(".")[0]
    yield from (above, block.experts)
    if block.router != above:
        child = block.router.removeprefix(f"{above}.").partition(".")[0]
        root = f"{above}.{child}" if above else child
        yield from (
            f"{root}.{path}" if path else root for path, _ in model.get_submodule(root).named_modules()
        )
