"""The residual stream of a transformer as a space: its channels, through all norms that share it.

A norm mixes all channels, so an ordinary trace finds that they can only be removed together. But under
RMSNorm their removal is exact. With J channels of which K are kept, x / sqrt(sum(x²) / J + e) * w equals
x / sqrt(sum(x²) / K + e J / K) * w sqrt(J / K) if the removed channels are zero. So the norms of the stream
are traced as plain scales, and `cut` rescales the weight and the epsilon of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fairpruner.core.units import Norm, UnitSpace
from fairpruner.models.calling import call_checked, evaluating
from fairpruner.models.copying import deep_copy
from fairpruner.models.devices import in_float64
from fairpruner.models.torch_private import hooked_modules

STREAM = "stream"  # the name of the space
EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
TOLERANCE = 1e-5  # of the comparison with the formula of RMSNorm
NONE = "no RMSNorm normalises it; the mean that a LayerNorm subtracts depends on all channels"
SEVERAL = "its norms belong to several streams, or a constant in the code fixes its width"


def rms_norms(model: nn.Module, example: Any) -> dict[str, Norm]:
    """Path -> norm, for every module that computes an RMSNorm of its input on the example."""
    paths = {id(module): path for path, module in model.named_modules()}
    found: dict[str, Norm] = {}

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        path = paths.get(id(module))
        if path is not None and path not in found and len(args) == 1 and isinstance(args[0], Tensor):
            norm = _as_norm(path, module, args[0], output)
            if norm is not None:
                found[path] = norm

    with evaluating(model), torch.no_grad(), hooked_modules(None, leave):
        call_checked(model, example)
    return found


def _as_norm(path: str, module: nn.Module, source: Tensor, output: Any) -> Norm | None:
    """The norm that a module computes, if its output is that of an RMSNorm over the last dimension."""
    own = dict(module.named_parameters(recurse=False))
    weight = own.get("weight")
    if len(own) != 1 or weight is None or weight.shape != source.shape[-1:] or not isinstance(output, Tensor):
        return None
    epsilon = next((name for name in EPSILONS if isinstance(vars(module).get(name), float)), None)
    if epsilon is None or output.shape != source.shape:
        return None
    if torch.finfo(output.dtype).eps > TOLERANCE:  # its own rounding would hide what it computes
        source = source.float()
        output = deep_copy(module).float()(source)
    wide = in_float64(source)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + getattr(module, epsilon))
    for offset in (0, 1):
        expected = scaled * (offset + in_float64(weight))
        error = (expected - in_float64(output)).abs().max()
        if error <= TOLERANCE * expected.abs().max().clamp_min(TOLERANCE):
            return Norm(path, epsilon, offset)
    return None


@contextmanager
def as_scales(model: nn.Module, norms: Iterable[Norm]) -> Iterator[None]:
    """Inside, these norms only scale their channels, which a trace can follow one by one."""
    modules = [(model.get_submodule(norm.module), norm.offset) for norm in norms]
    try:
        for module, offset in modules:
            vars(module)["forward"] = _scale(module, offset)
        yield
    finally:
        for module, _ in modules:
            vars(module).pop("forward", None)


def _scale(module: nn.Module, offset: int) -> Any:
    def forward(source: Tensor) -> Tensor:
        weight = module.weight
        assert isinstance(weight, Tensor)
        return source * (weight + offset if offset else weight)

    return forward


def with_stream(
    spaces: Sequence[UnitSpace], norms: Iterable[Norm]
) -> tuple[list[UnitSpace], UnitSpace | None, dict[str, str]]:
    """The spaces without the stream, and the stream as a space, or the reason why there is none."""
    by_weight = {f"{norm.module}.weight": norm for norm in norms}
    holding = [s for s in spaces if any(part.tensor in by_weight for part in s.slices)]
    others = [space for space in spaces if space not in holding]
    if not by_weight or len(holding) != 1:
        return others, None, {STREAM: SEVERAL if by_weight else NONE}
    space = holding[0]
    own = tuple(by_weight[part.tensor] for part in space.slices if part.tensor in by_weight)
    return others, replace(space, name=STREAM, kind="stream", norms=own), {}
