"""A language model as a stack of layers: what runs before the first, each layer by itself, what runs after.

The layers are the modules of one list. They run one after the other, and each passes a stream on to the next.
Everything else that a layer is called with, such as masks and positions, must not depend on the stream.
To see whether a model has this form, it is run with stubs in place of its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from fairpruner.errors import FairprunerError
from fairpruner.models.calling import call, describe, tensors_of
from fairpruner.models.copying import deep_copy
from fairpruner.models.layer_calls import LayerCall
from fairpruner.models.torch_private import replaced_children

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def path_of_layers(model: nn.Module) -> str:
    """The path of the list whose modules hold the most parameters, of the lists inside no other list."""
    sizes = {path: sum(p.numel() for p in found.parameters()) for path, found in _outermost_lists("", model)}
    if not sizes:
        raise refused(model, "it has no list of layers")
    return max(sizes, key=lambda path: sizes[path])


def _outermost_lists(path: str, module: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in module.named_children():
        inside = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList):
            yield inside, child
        else:
            yield from _outermost_lists(inside, child)


def refused(model: nn.Module, reason: str) -> FairprunerError:
    """The error for a model that is no stack of layers."""
    return FairprunerError(
        f"{type(model).__name__} cannot be run layer by layer: {reason}. Load the model, and leave out"
        " --stream."
    )


class _Reached(BaseException):
    """Ends a forward pass at the last layer. It is no Exception, so that the model does not catch it."""


class _Stub(nn.Module):
    """Takes the place of a layer, and hands over what it is called with."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # Models read such attributes of their layers, for example the kind of attention.
        facts = {k: v for k, v in vars(layer).items() if isinstance(v, PLAIN) and k not in vars(self)}
        self.__dict__.update(facts)
        self.hand_over: Callable[[LayerCall], Any] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.hand_over is not None  # `Shell` sets it
        return self.hand_over(LayerCall.of(args, kwargs))


def with_stubs(model: nn.Module, path: str) -> nn.Module:
    """A copy of a model with stubs for the layers in the list at `path`."""
    with _replacing_layers(model, path, lambda number, layer: _Stub(layer)):
        copy = deep_copy(model, {})
    for module in copy.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False  # layers would share a cache of keys and values
    return copy


@contextmanager
def passing_on(model: nn.Module, path: str, number: int, *, tuples: bool) -> Iterator[None]:
    """Inside, all layers of a model except one return their stream unchanged."""

    def stub(position: int, layer: nn.Module) -> nn.Module:
        if position == number:
            return layer
        idle = _Stub(layer)
        idle.hand_over = _pass_on_in_tuple if tuples else _pass_on
        return idle

    with _replacing_layers(model, path, stub):
        yield


def _pass_on(given: LayerCall) -> Tensor:
    return given.stream


def _pass_on_in_tuple(given: LayerCall) -> tuple[Tensor]:
    return (given.stream,)


@contextmanager
def _replacing_layers(
    model: nn.Module, path: str, replacement: Callable[[int, nn.Module], nn.Module]
) -> Iterator[None]:
    """Inside, the list at `path` holds replacements; the layers themselves are not changed."""
    layers: Any = model.get_submodule(path)
    replacements = {str(number): replacement(number, layer) for number, layer in enumerate(layers)}
    with replaced_children(layers, replacements):
        yield


class Shell:
    """A model with stubs for layers: what comes before the first layer, and after the last."""

    def __init__(self, model: nn.Module, *, tuples: bool = False) -> None:
        """`tuples`: layers return their stream in a tuple."""
        stubs = [module for module in model.modules() if isinstance(module, _Stub)]
        for stub in stubs:
            stub.hand_over = self._hand_over
        self.model, self.count, self.tuples = model, len(stubs), tuples
        self._calls: list[LayerCall] = []
        self._scale = 1.0
        self._last: Tensor | None = None

    def calls(self, inputs: Mapping[str, Any]) -> list[LayerCall]:
        """What each layer is called with; the stream is right only for the first."""
        self._calls, self._last = [], None
        with suppress(_Reached):
            call(self.model, inputs)
        return self._calls

    def finish(self, inputs: Mapping[str, Any], stream: Tensor) -> Any:
        """The model's output if its last layer passes this stream on."""
        with self.ending_in(stream):
            return call(self.model, inputs)

    @contextmanager
    def ending_in(self, stream: Tensor) -> Iterator[None]:
        """Inside, the model can be called once, and its last layer passes this stream on."""
        self._calls, self._last = [], stream
        try:
            yield
        finally:
            self._last = None

    def check(self, inputs: Mapping[str, Any]) -> int:
        """The width of the stream. A model is refused if its layers exchange more than the stream."""
        for self.tuples in (False, True):
            with torch.no_grad():
                try:
                    calls = self.calls(inputs)
                    self._scale = 0.5
                    others = self.calls(inputs)
                except FairprunerError:
                    raise
                except Exception:  # a model that expects a tuple may do anything with a tensor
                    continue
                finally:
                    self._scale = 1.0
            if len(calls) == self.count and all(c.stream.shape == calls[0].stream.shape for c in calls):
                break
        else:
            raise refused(self.model, "its layers do not run one after the other, each once")
        for number, (one, other) in enumerate(zip(calls, others, strict=True)):
            expected = calls[0].stream * 0.5**number
            if one.stream is not calls[0].stream or not torch.equal(other.stream, expected):
                raise refused(self.model, f"what layer {number} reads is not what the one before it returns")
            rest, other_rest = ((c.args, c.kwargs) for c in (one, other))
            if not _same(rest, other_rest):
                raise refused(self.model, f"layer {number} is called with more that depends on the stream")
            if not _is_plain(rest):
                raise refused(self.model, f"layer {number} is called with {describe(rest)}")
        return calls[0].stream.shape[-1]

    def _hand_over(self, given: LayerCall) -> Any:
        self._calls.append(given)
        stream = given.stream if self._scale == 1 else given.stream * self._scale
        if len(self._calls) == self.count:
            if self._last is None:
                raise _Reached
            stream = self._last
        return (stream,) if self.tuples else stream


def _same(one: Any, other: Any) -> bool:
    pairs = zip(tensors_of(one), tensors_of(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def _is_plain(value: Any) -> bool:
    """Whether a value holds only tensors, numbers and text, in containers."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, (Tensor, *PLAIN))
