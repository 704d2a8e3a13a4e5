"""One layer of a stack: what it is called with, and the layer as a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor, nn

from fairpruner.errors import FairprunerError
from fairpruner.models.calling import describe

CALLS = "layer_calls"  # the argument of a `LayerModel`: role -> `LayerCall`

Rest = TypeVar("Rest")


@dataclass(frozen=True, eq=False)
class LayerCall:
    """What one layer is called with: the stream [N, T, H], and everything else."""

    stream: Tensor
    place: int | str  # of the stream among the arguments: a position or a name
    args: tuple[Any, ...] = ()  # with None at the stream's position
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # without the stream

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LayerCall:
        """The call with these arguments; its stream is the first tensor among them."""
        for position, value in enumerate(args):
            if isinstance(value, Tensor):
                rest = (*args[:position], None, *args[position + 1 :])
                return LayerCall(value, position, rest, dict(kwargs))
        for name, value in kwargs.items():
            if isinstance(value, Tensor):
                return LayerCall(value, name, args, {k: v for k, v in kwargs.items() if k != name})
        raise FairprunerError(
            f"A layer was called with {describe((args, dict(kwargs)))}, expected a tensor, the stream: load"
            " the model, and leave out --stream."
        )

    def mapped(self, change: Callable[[Tensor], Tensor]) -> LayerCall:
        """The call with every tensor changed that has a dimension for texts."""

        def changed(tensor: Tensor) -> Tensor:
            return change(tensor) if tensor.ndim > 1 else tensor

        return replace(self.with_rest(Tensor, changed), stream=change(self.stream))

    def with_rest(self, kind: type[Rest], change: Callable[[Rest], Any]) -> LayerCall:
        """The call with everything of one kind changed in its arguments beside the stream."""

        def changed(value: Any) -> Any:
            if isinstance(value, kind):
                return change(value)
            if isinstance(value, Mapping):
                return {key: changed(item) for key, item in value.items()}
            if isinstance(value, (tuple, list)):
                return type(value)(map(changed, value))
            return value

        return replace(self, args=changed(self.args), kwargs=changed(self.kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerCall:
        """A call whose stream a layer may overwrite."""
        stream = self.stream.detach().clone().requires_grad_(self.stream.requires_grad)
        return replace(self, stream=stream)

    def run(self, layer: nn.Module) -> Tensor:
        """The stream that the layer passes on."""
        if isinstance(self.place, int):
            args = (*self.args[: self.place], self.stream, *self.args[self.place + 1 :])
            return _stream_of(layer(*args, **self.kwargs))
        return _stream_of(layer(*self.args, **{**self.kwargs, self.place: self.stream}))


def _stream_of(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return found


class LayerModel(nn.Module):
    """One layer of a model as a model: its tensors have the names that they have in the whole model.

    It is called with `layer_calls`, of which it takes the one of its role, and with the whole model's inputs,
    which it ignores.
    """

    def __init__(self, path: str, layer: nn.Module, role: str) -> None:
        super().__init__()
        self.role = role
        self.entered: Tensor | None = None  # the stream that the last call read
        *above, name = path.split(".")
        holder: nn.Module = self
        for part in above:
            holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        holder.add_module(name, layer)
        self._path = path

    @property
    def layer(self) -> nn.Module:
        return self.get_submodule(self._path)

    def forward(self, layer_calls: Mapping[str, LayerCall], **inputs: Any) -> Tensor:
        given = layer_calls[self.role]
        self.entered = given.stream
        return given.run(self.layer)
