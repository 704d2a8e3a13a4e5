"""Finding the blocks of routed experts in a model, by their tensors and attributes, not by the model's name.

Experts are held by an attribute with "expert" in its name, in one of two forms. *Fused*: a module with
parameters [E, …]. *Listed*: an `nn.ModuleList` of E modules with equal parameter shapes. Beside them is a
router, which has one row for each expert.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from fairpruner.models.constant_experts import ConstantExperts
from fairpruner.models.torch_private import AnyConvolution
from fairpruner.models.transformers_private import ONE_BY_ONE, experts_run_by

# The attributes of modules and configurations that hold the number of experts, how many of them a token
# uses, and the groups of a router.
SIZES = (
    "num_experts",
    "n_experts",
    "n_routed_experts",
    "num_routed_experts",
    "num_local_experts",
    "moe_num_experts",
    "num_total_experts",
)
TOP_K = (
    "num_experts_per_tok",
    "top_k_experts",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "num_activated_experts",
    "n_activated_experts",
    "num_active_experts",
    "num_selected_experts",
)
# Only on a module: in a configuration, top_k is a setting of text generation.
MODULE_TOP_K = ("top_k", "topk", "k")
GROUPS = ("num_group", "n_group", "num_expert_group")
CHOSEN_GROUPS = ("topk_group", "top_k_group")
FORMS = "nn.ModuleList of equal modules or module with parameters [experts, …]"


@dataclass(frozen=True, eq=False)
class ExpertBlock:
    """One block of routed experts: E of them, of which every token uses `top_k`."""

    name: str  # path of the block; also the name of its space
    router: str  # path of the module that holds the router's rows, which may be the block itself
    experts: str  # path of the fused experts, or of their nn.ModuleList
    size: int  # E
    top_k: int | None  # None if no attribute holds it: running the block shows it
    groups: int  # router groups, consecutive and equally long; 1 if there are none
    min_keep: int  # fewer experts could not serve every token


def expert_blocks(model: nn.Module) -> tuple[ExpertBlock, ...]:
    """Every block of routed experts whose parts are all found, in the model's order.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.top_k, self.gate = 2, nn.Linear(4, 6)
    ...         self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
    >>> [(b.name, b.router, b.experts, b.size, b.top_k) for b in expert_blocks(nn.Sequential(Block()))]
    [('0', '0.gate', '0.experts', 6, 2)]
    """
    return tuple(found for found in _examined(model).values() if isinstance(found, ExpertBlock))


def unsupported_experts(model: nn.Module) -> dict[str, str]:
    """Path -> reason, for what looks like routed experts and cannot be cut."""
    return {path: found for path, found in _examined(model).items() if isinstance(found, str)}


def expert_lists(model: nn.Module) -> tuple[str, ...]:
    """The paths of the lists of experts."""
    return tuple(
        block.experts
        for block in expert_blocks(model)
        if isinstance(model.get_submodule(block.experts), nn.ModuleList)
    )


@contextmanager
def plain_experts(model: nn.Module) -> Iterator[None]:
    """Inside, transformers models run their experts one by one.

    This can be traced, it runs in float64, and its FLOPs are counted correctly.
    """
    configs = [getattr(module, "config", None) for module in model.modules()]
    with experts_run_by(ONE_BY_ONE, configs):
        yield


def _examined(model: nn.Module) -> dict[str, ExpertBlock | str]:
    """Path of a module that holds routed experts -> its block, or the reason why it is not supported."""
    modules = dict(model.named_modules())
    found: dict[str, ExpertBlock | str] = {}
    for path, module in modules.items():
        parent, _, attribute = path.rpartition(".")
        if isinstance(module, ConstantExperts):
            found[parent or path] = "experts that were removed before left constants behind"
        elif "expert" in attribute.lower() and "shared" not in attribute.lower():
            size = _listed(module) or _fused(module)
            router = _router(modules[parent], module, size) if size else None
            if router is not None:
                router_path = ".".join(part for part in (parent, router) if part)
                found[parent or path] = _block(modules, path, router_path, size)
            elif isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(module) > 1:
                found[parent or path] = _why_not(module, size)
    return {**found, **_unfound(modules, found)}


def _unfound(modules: dict[str, nn.Module], found: Collection[str]) -> dict[str, str]:
    """Path -> reason, for modules that count experts and belong to no block that was found."""
    counting = {place for path, module in modules.items() if (place := _counting_block(path, module))}
    reason = (
        f"it has a number of experts, but no {FORMS} in an attribute named after them beside a router with a"
        " row for each"
    )
    return {
        path: reason
        for path in sorted(counting)
        if not any(_nested(path, other) for other in (*found, *(counting - {path})))
    }


def _nested(path: str, other: str) -> bool:
    """Whether two paths are equal, or one lies inside the other."""
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")


def _why_not(experts: nn.ModuleList | nn.ModuleDict, size: int) -> str:
    """Why modules named experts are not supported."""
    if isinstance(experts, nn.ModuleDict):
        return f"its {len(experts)} experts are an nn.ModuleDict, expected {FORMS}"
    if size:
        return f"no matrix beside its {size} experts has a row for each"
    return f"its {len(experts)} experts differ in their parameters, expected equal ones"


def _counting_block(path: str, module: nn.Module) -> str:
    """The path of the block that a module with an attribute for the number of experts belongs to.

    It is the module if one of its submodules may be the router, otherwise its parent; "" without such an
    attribute.
    """
    size = next((vars(module)[name] for name in SIZES if type(vars(module).get(name)) is int), 0)
    if not size:
        return ""
    own = {id(p) for p in module.parameters(recurse=False)}
    holds_router = any(id(p) not in own and is_route(p, size) for p in module.parameters())
    return path if holds_router else path.rpartition(".")[0]


def _listed(module: nn.Module) -> int:
    """The number of modules in a list whose parameters have equal shapes; 0 for any other module."""
    if not isinstance(module, nn.ModuleList) or len(module) < 2:
        return 0
    shapes = [[(name, tuple(p.shape)) for name, p in child.named_parameters()] for child in module]
    return len(module) if shapes[0] and all(other == shapes[0] for other in shapes) else 0


def _fused(module: nn.Module) -> int:
    """The number of experts in a module with parameters [E, …]; 0 for any other module.

    At least two of the parameters must be stacks of matrices.
    """
    if isinstance(module, AnyConvolution):
        return 0
    parameters = list(module.parameters(recurse=False))
    lengths = {p.shape[0] for p in parameters if p.ndim}
    return lengths.pop() if sum(p.ndim == 3 for p in parameters) >= 2 and len(lengths) == 1 else 0


def is_route(tensor: Tensor, size: int) -> bool:
    """Whether a tensor may be a router's: a matrix with one row, or one column, for each expert."""
    return tensor.ndim == 2 and size in tensor.shape and tensor.numel() > size


def _router(block: nn.Module, experts: nn.Module, size: int) -> str | None:
    """The path, from the block, of the module that holds a matrix with one row or column for each expert."""
    inside = {id(m) for m in experts.modules()}
    holders = {
        path: module
        for path, module in block.named_modules()
        if id(module) not in inside and any(is_route(p, size) for p in module.parameters(recurse=False))
    }
    named = [
        path
        for path in holders
        if any(word in path.lower() for word in ("router", "gate", "switch")) and "shared" not in path.lower()
    ]
    return next(reversed(named or list(holders)), None)  # the last layer of a router has the rows


def _block(modules: dict[str, nn.Module], experts: str, router: str, size: int) -> ExpertBlock | str:
    """The block of experts and a router at these paths, or the reason why it is not supported."""
    name = experts.rpartition(".")[0]
    near = [modules[path] for path in (*_upwards(router, name), experts)]
    configs = [getattr(module, "config", None) for module in near]
    top_k = _attribute(near, MODULE_TOP_K + TOP_K) or _attribute(configs, TOP_K)
    if top_k is not None and not 1 <= top_k <= size:
        return f"a token uses {top_k} of its {size} experts, expected 1 to {size}"
    groups = _attribute([*near, *configs], GROUPS) or 1
    if size % groups:
        return f"its {size} experts do not divide into {groups} router groups"
    chosen_groups = _attribute([*near, *configs], CHOSEN_GROUPS) or 1
    # Routers rank a group by its two best experts, and the chosen groups together must hold top_k experts.
    per_group = max(2, math.ceil((top_k or 1) / chosen_groups)) if groups > 1 else 1
    min_keep = min(size, max(top_k or 1, groups * per_group))
    return ExpertBlock(name or experts, router, experts, size, top_k, groups, min_keep)


def _upwards(path: str, top: str) -> Iterator[str]:
    """A module's path and those above it, up to `top`."""
    while path != top:
        yield path
        path = path.rpartition(".")[0]
    yield top


def _attribute(holders: Sequence[object], names: tuple[str, ...]) -> int | None:
    """The first whole number that one of the holders has under one of the names."""
    values = (getattr(holder, name, None) for holder in holders for name in names)
    return next((value for value in values if type(value) is int), None)
