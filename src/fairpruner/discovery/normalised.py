"""Weights that torch normalises in every forward pass: a removed input changes the norm of all others."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

_PARAMETRIZATIONS = (parametrizations._WeightNorm, parametrizations._SpectralNorm)
_HOOKS = {WeightNorm: "remove_weight_norm", SpectralNorm: "remove_spectral_norm"}


def normalised_weights(model: nn.Module) -> dict[str, str]:
    """Parameter name -> why it cannot be cut, with the line that makes it a plain weight."""
    return {
        name: f"it is normalised in every forward pass; first call {line}"
        for path, module in model.named_modules()
        for name, line in (*_parametrized(path, module), *_hooked(path, module))
    }


def _parametrized(path: str, module: nn.Module) -> Iterator[tuple[str, str]]:
    for name, parts in getattr(module, "parametrizations", {}).items():
        if any(isinstance(part, _PARAMETRIZATIONS) for part in parts):
            line = f"torch.nn.utils.parametrize.remove_parametrizations({_at(path)}, {name!r})"
            for original, _ in parts.named_parameters(recurse=False):
                yield f"{path}.parametrizations.{name}.{original}".lstrip("."), line


def _hooked(path: str, module: nn.Module) -> Iterator[tuple[str, str]]:
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, (WeightNorm, SpectralNorm)):
            line = f"torch.nn.utils.{_HOOKS[type(hook)]}({_at(path)}, {hook.name!r})"
            for original, _ in module.named_parameters(recurse=False):
                if original.startswith(f"{hook.name}_"):
                    yield f"{path}.{original}".lstrip("."), line


def _at(path: str) -> str:
    return f"model.get_submodule({path!r})" if path else "model"
