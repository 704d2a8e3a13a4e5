"""What a signal is, and the registry that gives signals their names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from torch import Tensor, nn

from fairpruner.core.arrays import Floats
from fairpruner.core.scores import check_scores
from fairpruner.core.spaces import Spaces
from fairpruner.core.units import KINDS, Kind, UnitSpace
from fairpruner.errors import FairprunerError, unknown
from fairpruner.scoring.processes import Processes

Side = Literal["removal", "protection"]
Observation = Literal[
    "activations",
    "gradients",
    "slopes",
    "gates",
    "deletions",
    "routing",
    "routed_gradients",
    "routed_losses",
    "blocks",
]

# Kinds whose units all samples use.
DENSE: frozenset[Kind] = frozenset({"channel", "hidden", "head", "stream"})
ROUTED: frozenset[Kind] = frozenset({"expert"})
RESIDUAL: frozenset[Kind] = frozenset({"block"})


@dataclass(frozen=True, eq=False)
class Context:
    """What a signal knows before the first sample."""

    model: nn.Module
    spaces: Spaces
    side: Side
    classes: int  # how many classes to expect
    seed: int
    rereadable: bool = False  # whether the data can be shown again
    whole: Spaces | None = None  # all spaces that the signal scores, if `spaces` are those of one layer only

    @property
    def all_spaces(self) -> Spaces:
        """The spaces that the signal scores, in this layer and in others."""
        return self.spaces if self.whole is None else self.whole


@dataclass(frozen=True)
class BatchInfo:
    """The size of one batch, and the half of the data that it belongs to."""

    samples: int  # for a language model, predicted tokens; for segmentation, labelled pixels
    half: int  # 0 or 1


@dataclass(frozen=True, eq=False)
class Result:
    """A signal's scores for each space, and how they were made."""

    scores: Mapping[str, Floats]  # [J]
    halves: Mapping[str, Floats] = field(default_factory=dict)  # [2, J], of two disjoint halves of the data
    settings: Mapping[str, Any] = field(default_factory=dict)


class Accumulator:
    """What one signal accumulates during one calibration pass.

    A subclass overrides the `see_` methods for the observations that its signal needs.
    """

    # Whether a text is one sample, the mean over its real tokens; otherwise every real token is a sample.
    pools_tokens: ClassVar[bool] = False

    def see_activation(self, space: UnitSpace, activation: Tensor, labels: Tensor | None) -> None:
        """What the space's consumer reads, [N, J, F], and the labels of the samples, [N, …], if any."""

    def see_gradients(self, gradients: Mapping[str, Tensor], info: BatchInfo) -> None:
        """Parameter -> gradient of the mean loss, for every parameter that units own slices of."""

    def see_slope(self, space: UnitSpace, slope: Tensor, info: BatchInfo) -> None:
        """The gradient of the summed loss for what the space's consumer reads, [rows, J, F]."""

    def see_block_slope(
        self, space: UnitSpace, unit: int, pair: tuple[Tensor, Tensor], info: BatchInfo
    ) -> None:
        """What a residual block adds to its stream, and the gradient of the summed loss for it: [rows, C]."""

    def see_gates(self, terms: Mapping[str, Tensor], info: BatchInfo) -> None:
        """Space -> [N, J], minus the first-order change of each sample's loss when a unit is set to zero."""

    def see_deletions(self, loss_change: Callable[[UnitSpace, int], float], info: BatchInfo) -> None:
        """A function (space, unit) -> the change of the mean loss when the unit is removed."""

    def see_routing(self, tallies: Mapping[str, Mapping[str, Tensor]], info: BatchInfo) -> None:
        """Space of experts -> quantity -> its sum over the batch's tokens for each expert, [E].

        `RouterOutput.tally` lists the quantities, such as the number of tokens that selected an expert.
        """

    def see_block(self, space: UnitSpace, unit: int, streams: tuple[Tensor, Tensor], info: BatchInfo) -> None:
        """The stream before a residual block and after it, [rows, C] each: tokens or positions in rows."""

    def join(self, processes: Processes) -> None:
        """Add what this signal accumulated in the other processes of a job, so that all hold the same."""

    def asks_again(self) -> bool:
        """Whether all activations and slopes are to be shown once more.

        It is asked after each pass over data that can be read again.
        """
        return False

    def result(self) -> Result:
        """The scores; called once, after the last batch."""
        raise NotImplementedError


class Signal(ABC):
    """A way to give each unit one number; one signal can serve many calibration passes."""

    name: str
    kinds: ClassVar[frozenset[Kind]] = DENSE  # of spaces that it can score
    needs: ClassVar[frozenset[Observation]] = frozenset()  # empty: the weights are enough
    compares_classes: ClassVar[bool] = False  # labels must be class indices

    @abstractmethod
    def start(self, context: Context) -> Accumulator:
        """A new accumulator, for one calibration pass."""


Values = Floats | Tensor | Sequence[float]
WeightFunction = Callable[[UnitSpace, nn.Module], Values]


def as_scores(values: Values, space: UnitSpace, signal: str) -> Floats:
    """J numbers as float64 [J], checked for their length and to be finite."""
    scores = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values, dtype=np.float64)
    check_scores(scores, space, signal)
    return scores


@dataclass(frozen=True)
class WeightSignal(Signal):
    """A signal of the weights alone: a function (space, model) -> J numbers."""

    name: str
    function: WeightFunction
    kinds: ClassVar[frozenset[Kind]] = frozenset(KINDS)

    def start(self, context: Context) -> Accumulator:
        return _WeightAccumulator(self, context)


class _WeightAccumulator(Accumulator):
    def __init__(self, signal: WeightSignal, context: Context) -> None:
        self._signal, self._context = signal, context

    def result(self) -> Result:
        signal, context = self._signal, self._context
        return Result(
            {
                space.name: as_scores(signal.function(space, context.model), space, signal.name)
                for space in context.spaces
            }
        )


@dataclass(frozen=True)
class ActivationSignal(Signal):
    """A signal of the activations: `kind(space)` makes an object that accumulates one space.

    The object has `update(activation, labels)` and `compute()`. It may also have `join(processes)`, and
    `halves()`, which returns the scores of two disjoint halves of the samples, [2, J].
    """

    name: str
    kind: Callable[[UnitSpace], Any]
    needs: ClassVar[frozenset[Observation]] = frozenset({"activations"})

    def start(self, context: Context) -> Accumulator:
        return _ActivationAccumulator(self, context)


class _ActivationAccumulator(Accumulator):
    def __init__(self, signal: ActivationSignal, context: Context) -> None:
        self._name, self._spaces = signal.name, context.spaces
        self._by_space = {space.name: signal.kind(space) for space in context.spaces}

    def see_activation(self, space: UnitSpace, activation: Tensor, labels: Tensor | None) -> None:
        self._by_space[space.name].update(activation, labels)

    def join(self, processes: Processes) -> None:
        for own in self._by_space.values():
            if not hasattr(own, "join"):
                raise FairprunerError(
                    f"Signal {self._name!r} saw a part of the data in each of {processes.size} processes:"
                    " give its class a method join(processes), or score in one process."
                )
            own.join(processes)

    def result(self) -> Result:
        scores = {
            space.name: as_scores(self._by_space[space.name].compute(), space, self._name)
            for space in self._spaces
        }
        halves = {
            name: np.asarray(own.halves(), dtype=np.float64)
            for name, own in self._by_space.items()
            if hasattr(own, "halves")
        }
        return Result(scores, halves)


_registry: dict[Side, dict[str, Signal]] = {"removal": {}, "protection": {}}
_built_in: set[tuple[Side, str]] = set()
Definition = TypeVar("Definition", bound=Callable[..., Any])  # a user's function or class


def built_in(side: Side, *signals: Signal) -> None:
    """Register the package's own signals; users cannot register others under their names."""
    for signal in signals:
        _registry[side][signal.name] = signal
        _built_in.add((side, signal.name))


def names(side: Side) -> tuple[str, ...]:
    """The names of the registered removal or protection signals."""
    return tuple(_registry[side])


def removal_signal(name: str) -> Callable[[Definition], Definition]:
    """Register your own removal signal (small = remove first).

    It is a function (space, model) -> J numbers, or a class with `update` and `compute`.

    >>> @removal_signal("bias_size")
    ... def bias_size(space, model):
    ...     return dict(model.named_parameters())[f"{space.name}.bias"].abs()
    >>> "bias_size" in names("removal")
    True
    """
    return _decorator("removal", name)


def protection_signal(name: str) -> Callable[[Definition], Definition]:
    """Register your own protection signal (large = protect), written like a removal signal.

    >>> @protection_signal("largest")
    ... class Largest:
    ...     def __init__(self, space):
    ...         self.value = None
    ...     def update(self, activation, labels):  # [N, J, F], [N]
    ...         value = activation.abs().amax((0, 2))
    ...         self.value = value if self.value is None else self.value.maximum(value)
    ...     def compute(self):  # [J]
    ...         return self.value
    >>> "largest" in names("protection")
    True
    """
    return _decorator("protection", name)


def _decorator(side: Side, name: str) -> Callable[[Definition], Definition]:
    if (side, name) in _built_in:
        raise FairprunerError(f"The {side} signal {name!r} is built in: register yours under another name.")

    def register(definition: Definition) -> Definition:
        kind = ActivationSignal if isinstance(definition, type) else WeightSignal
        _registry[side][name] = kind(name, definition)
        return definition

    return register


def named(side: Side, name: str) -> Signal:
    """The signal registered under a name."""
    if name not in _registry[side]:
        raise unknown(f"{side} signal", name, _registry[side])
    return _registry[side][name]
