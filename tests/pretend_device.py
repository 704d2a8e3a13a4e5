"""An accelerator that is not there: tensors say `pretend:0` or `pretend:1` and are computed on the CPU.

What a GPU refuses is refused: an operation over tensors of two devices, or of a device and the CPU (numbers
without dimensions aside), and `numpy()` without `cpu()`. So code for several devices runs on a machine that
has none. `float64=False` also refuses float64 on the device, as MPS does.

    with devices():
        spread(model, {"": "pretend:0", "head": "pretend:1"})
        model(inputs.to("pretend:0"))

To torch's engine all these tensors lie on `pretend:0`, since a backend in Python may have one device only;
which of the two it is, is kept in the tensor and is what `tensor.device` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "pretend"
# Operations that may meet tensors of several devices; the result lies where the first of them does.
CROSSING = frozenset(["_to_copy", "copy_", "index", "index_put", "index_put_", "_local_scalar_dense"])
OF_REALS = ("histc",)  # operations that GPUs also do on whole numbers, and the CPU does not

if not hasattr(backend_registration, "_DummyBackendModule"):
    pytest.skip(f"torch {torch.__version__} cannot pretend a device", allow_module_level=True)


class _Backend(backend_registration._DummyBackendModule):
    """What `torch.pretend` is: `torch.cuda` in small, its random numbers those of the CPU.

    It is available only inside `devices`, so that other tests of the process find no accelerator.
    """

    there = False

    def is_available(self) -> bool:
        return _Backend.there

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: Any = NAME) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = NAME) -> None:
        torch.set_rng_state(state)

    def synchronize(self, device: Any = None) -> None:
        pass


backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())


class Pretend(Tensor):
    """A tensor of a pretended device; its numbers are those of a CPU tensor inside."""

    numbers: Tensor
    place: torch.device

    @staticmethod
    def __new__(cls, numbers: Tensor, place: torch.device) -> Pretend:
        made: Pretend = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=torch.device(NAME, 0),
            requires_grad=numbers.requires_grad,
        )
        made.numbers, made.place = numbers, place
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, fresh: Tensor) -> None:
        if fresh.shape != self.shape or not isinstance(fresh, Pretend):
            raise NotImplementedError("Data of another shape or kind.")
        self.numbers, self.place = fresh.numbers, fresh.place

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pretend({self.numbers!r}, {self.place})"

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def to(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """The tensor on another device, of another type, or like another tensor."""
        first = args[0] if args else None
        device = first.device if isinstance(first, Tensor) else kwargs.get("device", first)
        dtype = first.dtype if isinstance(first, Tensor) else kwargs.get("dtype")
        for given in args:
            dtype = given if isinstance(given, torch.dtype) else dtype
        moved: Tensor = self
        place = None if device is None or isinstance(device, torch.dtype) else _place(device)
        if place is not None and place != self.place:
            moved = _Move.apply(self, place)
        elif kwargs.get("copy"):
            moved = self.clone()
        return moved if dtype is None or dtype == moved.dtype else moved.type(dtype)

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return self.to("cpu")

    def new_tensor(self, data: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype).to(self.place)

    def as_subclass(self, kind: type[Any]) -> Any:
        """The same numbers as a tensor of another class that still lies on its device."""
        return self if isinstance(self, kind) else Pretend.__new__(_joint(kind), self.numbers, self.place)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if not self.is_leaf:
            raise RuntimeError("Only tensors without a history can be copied deeply.")
        fresh = self.detach().clone()
        if isinstance(self, nn.Parameter):
            fresh = nn.Parameter(fresh, requires_grad=self.requires_grad)
        memo[id(self)] = fresh
        return fresh

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to and isinstance(args[-1], Pretend):  # a tensor of the CPU like one of a device
            return args[0].to(args[-1].place, args[-1].dtype)
        places = [x.place for x in tree_leaves((args, kwargs)) if isinstance(x, Pretend)]
        _callers.extend(places[:1])
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        finally:
            del _callers[len(_callers) - len(places[:1]) :]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


@cache
def _joint(kind: type[Any]) -> type[Any]:
    return type(kind.__name__, (kind, Pretend), {})


_moves: list[torch.device] = []  # where to, of the move that is being made
_callers: list[torch.device] = []  # where the tensors of the functions lie that are being computed


class _Move(torch.autograd.Function):
    """From a pretended device to another or to the CPU, and the gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, place: torch.device) -> Tensor:  # type: ignore[override]
        ctx.origin = tensor.device
        _moves.append(place)
        try:  # as an operation that tracers see
            moved: Tensor = torch.ops.aten._to_copy.default(tensor, device=place)
        finally:
            _moves.pop()
        return moved

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient.to(ctx.origin), None


class _Devices(TorchDispatchMode):
    """Makes tensors on a pretended device where one is asked for, as `.to` and factories do."""

    def __init__(self, float64: bool) -> None:
        super().__init__()
        self.float64 = float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked = kwargs.get("device")
        here = asked is not None and torch.device(asked).type == NAME
        out = _compute(func, args, kwargs) if here else func(*args, **kwargs)
        if not self.float64:
            for tensor in tree_leaves(out):
                if isinstance(tensor, Pretend) and tensor.dtype == torch.float64:
                    raise TypeError(f"{func} gives float64, which {tensor.device} does not have")
        return out


@contextmanager
def devices(*, float64: bool = True) -> Iterator[None]:
    """Inside, `pretend:0` and `pretend:1` are devices."""
    # Backward runs in this thread: in one of a device, an error that Python raises would end the process.
    with _Devices(float64), torch.autograd.set_multithreading_enabled(False):
        _Backend.there = True
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # a tensor cannot change its place
        try:
            yield
        finally:
            _Backend.there = False
            torch.__future__.set_overwrite_module_params_on_conversion(False)


def spread(model: nn.Module, places: Mapping[str, str]) -> nn.Module:
    """Move the modules of some paths to devices, outer ones first.

    Hooks move what each of them is given to its device, as those of `device_map="auto"` do.
    """
    for path, device in places.items():
        module = model.get_submodule(path).to(device)
        if len(places) > 1:
            module.register_forward_pre_hook(_moving_to(torch.device(device)), with_kwargs=True)
    return model


def _moving_to(device: torch.device) -> Callable[..., Any]:
    def move(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, (tuple(args), dict(kwargs)))

    return move


def _compute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """One operation on the numbers inside, after the check that its tensors lie together."""
    name = func.overloadpacket.__name__
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    pretended = [tensor.place for tensor in tensors if isinstance(tensor, Pretend)]
    target = _target(name, tensors, pretended, kwargs.get("device"))
    if name not in CROSSING:
        places = {tensor.device for tensor in tensors if isinstance(tensor, Pretend) or tensor.ndim}
        if len(places) > 1:
            raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {places}.")
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    numbers, options = tree_map(_numbers, tuple(args)), tree_map(_numbers, dict(kwargs))
    if name in OF_REALS and not numbers[0].is_floating_point():
        out = func(numbers[0].double(), *numbers[1:], **options).to(numbers[0].dtype)
    else:
        out = func(*numbers, **options)
    if name.endswith("_") and isinstance(args[0], Pretend):
        return args[0]
    if target.type != NAME:
        return out
    return tree_map(
        lambda x: Pretend(x, target) if isinstance(x, Tensor) and not isinstance(x, Pretend) else x, out
    )


def _target(
    name: str, tensors: Sequence[Tensor], pretended: Sequence[torch.device], asked: Any
) -> torch.device:
    """Where the result of an operation lies."""
    if _moves and name == "_to_copy":
        return _moves[-1]
    # What torch asks of itself, in a backward or for a tensor like another, names the one device it knows.
    if asked is not None and _place(asked).type == NAME:
        return next(iter((*pretended, *_callers[-1:], _place(asked))))
    if asked is not None:
        return torch.device(asked)
    if name in CROSSING and tensors:
        return tensors[0].device
    return pretended[0] if pretended else torch.device("cpu")


def _place(device: Any) -> torch.device:
    device = torch.device(device)
    return torch.device(NAME, device.index or 0) if device.type == NAME else device


def _numbers(value: Any) -> Any:
    return value.numbers if isinstance(value, Pretend) else value


# What torch asks for in C++, past the mode above: `torch.tensor(data, device="pretend:0")`.
_library = torch.library.Library("aten", "IMPL")


def _empty(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    return Pretend(torch.empty_strided(size, stride, dtype=dtype), _place(device))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _numbers(target).copy_(_numbers(source))
    return target


_library.impl("empty_strided", _empty, "PrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")
