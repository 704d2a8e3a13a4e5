"""An accelerator that is not there: tensors say `pretend:0` or `pretend:1` and are computed on the CPU.

What a GPU refuses is refused: an operation over tensors of two devices, or of a device and the CPU (numbers
without dimensions aside), and `numpy()` without `cpu()`. So code for several devices runs on a machine that
has none. `float64=False` also refuses float64 on the device, as MPS does.

    with devices():
        spread(model, {"": "pretend:0", "head": "pretend:1"})
        model(inputs.to("pretend:0"))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "pretend"
COUNT = 2
# Operations that may meet tensors of several devices; the result lies where the first of them does.
CROSSING = frozenset(["_to_copy", "copy_", "index", "index_put", "index_put_", "_local_scalar_dense"])


class _Backend(backend_registration._DummyBackendModule):
    """What `torch.pretend` is: `torch.cuda` in small, its random numbers those of the CPU.

    It is available only inside `devices`, so that other tests of the process find no accelerator.
    """

    there = False

    def is_available(self) -> bool:
        return _Backend.there

    def device_count(self) -> int:
        return COUNT

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: Any = NAME) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = NAME) -> None:
        torch.set_rng_state(state)

    def synchronize(self, device: Any = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass


backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())


class Pretend(Tensor):
    """A tensor of a device; its numbers are those of a CPU tensor inside."""

    @staticmethod
    def __new__(cls, numbers: Tensor, device: torch.device) -> Pretend:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=device,
            requires_grad=numbers.requires_grad,
        )

    def __init__(self, numbers: Tensor, device: torch.device) -> None:
        self.numbers = numbers

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pretend({self.numbers!r}, {self.device})"

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if not self.is_leaf:
            raise RuntimeError("Only tensors without a history can be copied deeply.")
        fresh = self.detach().clone()
        if isinstance(self, nn.Parameter):
            fresh = nn.Parameter(fresh, requires_grad=self.requires_grad)
        memo[id(self)] = fresh
        return fresh

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


class _Devices(TorchDispatchMode):
    """Makes tensors on a pretended device where one is asked for, as `.to` and factories do."""

    def __init__(self, float64: bool) -> None:
        super().__init__()
        self.float64 = float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        here = device is not None and torch.device(device).type == NAME
        out = _compute(func, args, kwargs) if here else func(*args, **kwargs)
        if not self.float64:
            for tensor in tree_leaves(out):
                if isinstance(tensor, Pretend) and tensor.dtype == torch.float64:
                    raise TypeError(f"{func} gives float64, which {tensor.device} does not have")
        return out


@contextmanager
def devices(*, float64: bool = True) -> Iterator[None]:
    """Inside, `pretend:0` and `pretend:1` are devices."""
    with _Devices(float64):
        _Backend.there = True
        try:
            yield
        finally:
            _Backend.there = False


def spread(model: nn.Module, places: Mapping[str, str]) -> nn.Module:
    """Move the modules of some paths to devices, outer ones first; inputs then follow the weights.

    The hooks move what a module is given to the device of its weights, as `device_map="auto"` does it.
    """
    for path, device in places.items():
        model.get_submodule(path).to(device)
    for module in model.modules():
        held = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if held and len({tensor.device for tensor in model.parameters()}) > 1:
            module.register_forward_pre_hook(_moving_to(held[0].device), with_kwargs=True)
    return model


def _moving_to(device: torch.device) -> Callable[..., Any]:
    def move(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, (tuple(args), dict(kwargs)))

    return move


def _compute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """One operation on the numbers inside, after the check that its tensors lie together."""
    name = func.overloadpacket.__name__
    asked, target = kwargs.get("device"), None
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if asked is not None:
        target = torch.device(asked)
        target = torch.device(NAME, target.index or 0) if target.type == NAME else target
        kwargs = {**kwargs, "device": torch.device("cpu")}
    elif name in CROSSING and tensors:
        target = tensors[0].device
    else:
        places = {t.device for t in tensors if isinstance(t, Pretend) or t.ndim}
        if len(places) > 1:
            raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {places}.")
        target = next(iter({t.device for t in tensors if isinstance(t, Pretend)}), torch.device("cpu"))
    out = func(*tree_map(_numbers, tuple(args)), **tree_map(_numbers, dict(kwargs)))
    if name.endswith("_") and isinstance(args[0], Pretend):
        return args[0]
    on_device = target.type == NAME
    return tree_map(
        lambda x: (
            Pretend(x, target) if on_device and isinstance(x, Tensor) and not isinstance(x, Pretend) else x
        ),
        out,
    )


def _numbers(value: Any) -> Any:
    return value.numbers if isinstance(value, Pretend) else value
