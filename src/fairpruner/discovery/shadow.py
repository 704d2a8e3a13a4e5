"""Shadows: beside every tensor, which units its elements belong to, and how they combine.

A shadow is a list of *layers*, integer tensors of the same shape as the real one. An activation has
one layer at most times; a weight has one per dimension (its rows belong to one family of units, its
columns to another).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fairpruner.core.arrays import Ints
from fairpruner.discovery.ids import NONE, Ids, Use, as_ids, squash

Layer = torch.Tensor


@dataclass(frozen=True)
class Shadow:
    """The layers of one tensor; `weight` is true when it was computed from parameters and constants
    alone.
    """

    layers: tuple[Layer, ...]
    weight: bool = False


EMPTY = Shadow(())


def extent(layer: Layer) -> tuple[bool, ...]:
    """Along which dimensions a layer lies: where its ids change, be they of one class or of several."""
    return _changes(squash(layer).numpy())


def _changes(ids: Ints) -> tuple[bool, ...]:
    return tuple(n > 1 and bool((ids != ids.take([0], axis=d)).any()) for d, n in enumerate(ids.shape))


class Algebra:
    """The few ways in which shadows meet."""

    def __init__(self, ids: Ids) -> None:
        self.ids = ids

    def roots(self, layer: Layer) -> Ints:
        """Representatives of a squashed layer, in its squashed shape; NONE stays NONE."""
        small = squash(layer)
        return self.ids.find(small.reshape(-1).numpy()).reshape(small.shape)

    def varying(self, layer: Layer) -> tuple[bool, ...]:
        """Along which dimensions the class of an element changes."""
        return _changes(self.roots(layer))

    def combine(self, a: Shadow, b: Shadow, shape: Sequence[int]) -> tuple[Layer, ...]:
        """Layers of an elementwise result: layers whose units lie along a common dimension are united,
        others stand side by side.
        """
        mixed = a.weight != b.weight  # a weight meets an activation
        merged = [layer.expand(shape) for layer in a.layers]
        for other in b.layers:
            other = other.expand(shape)
            related = [layer for layer in merged if self._related(layer, other, mixed)]
            merged = [layer for layer in merged if not any(layer is r for r in related)]
            for layer in related:
                other = self._unite(layer, other)
            merged.append(other)
        return tuple(merged)

    def combine_all(self, operands: Sequence[Shadow], shape: Sequence[int]) -> tuple[Layer, ...]:
        """Layers of many operands together, activations first so that weights meet them rather than each
        other.
        """
        total = Shadow((), weight=True)
        for operand in sorted((o for o in operands if o.layers), key=lambda o: o.weight):
            first = not total.layers
            total = Shadow(
                self.combine(Shadow((), operand.weight) if first else total, operand, shape),
                operand.weight and total.weight,
            )
        return total.layers

    def _related(self, a: Layer, b: Layer, mixed: bool) -> bool:
        """Whether two layers lie along the same dimension; a weight that is repeated for every unit of an
        activation does not count.
        """
        extent_a, extent_b = extent(a), extent(b)
        if not any(extent_a) and not any(extent_b):
            return True
        together = any(x and y for x, y in zip(extent_a, extent_b, strict=True))
        return together and not (mixed and (self._repeats(a, extent_b) or self._repeats(b, extent_a)))

    def _repeats(self, layer: Layer, other: Sequence[bool]) -> bool:
        """Whether the other layer stays the same along a dimension where the class of this one changes."""
        return any(varies and not lies for varies, lies in zip(self.varying(layer), other, strict=True))

    def _unite(self, a: Layer, b: Layer) -> Layer:
        if squash(a).numel() < squash(b).numel():
            a, b = b, a
        small_a, small_b = torch.broadcast_tensors(squash(a), squash(b))
        self.ids.unite(small_a.reshape(-1).numpy(), small_b.reshape(-1).numpy())
        return torch.where(small_a != NONE, small_a, small_b).expand(a.shape)

    def reduce(self, layer: Layer, dims: Sequence[int]) -> Layer:
        """The layer with `dims` reduced to length 1; ids that meet there become one class."""
        small = squash(layer)
        rest = [d for d in range(small.ndim) if d not in dims]
        length = [small.shape[d] for d in dims]
        if any(n > 1 for n in length):
            rows = small.permute(*rest, *dims).reshape(-1, int(np.prod(length))).numpy()
            self.ids.unite_all(rows)
            small = small.amax(dim=tuple(dims), keepdim=True)
        return small.expand([1 if d in dims else n for d, n in enumerate(layer.shape)])

    def reduce_all(self, layers: Sequence[Layer], dims: Sequence[int]) -> tuple[Layer, ...]:
        return tuple(self.reduce(layer, dims) for layer in layers)

    def single(self, layers: Sequence[Layer], dim: int, size: int) -> Ints:
        """One id per index of `dim`, [size]: the layer that lies along it, all else reduced; NONE where
        there is none.
        """
        for layer in layers:
            if extent(layer)[dim]:
                return (
                    self.reduce(layer, [d for d in range(layer.ndim) if d != dim]).reshape(-1).numpy().copy()
                )
        return np.full(size, NONE, dtype=np.int64)

    def settle(self, layers: Sequence[Layer], operands: Sequence[Shadow], what: str) -> Shadow:
        """What an elementwise result keeps of layers side by side: not those that all units share (a
        gate, a norm's weight in every head).
        """
        if all(s.weight or not s.layers for s in operands):
            return Shadow(tuple(layers), weight=True)
        if len(layers) > 1:
            active = np.concatenate(
                [self.roots(layer).ravel() for s in operands if not s.weight for layer in s.layers]
            )
            own = [layer for layer in layers if np.isin(self.roots(layer), active[active != NONE]).any()]
            own = [layer for layer in own if any(extent(layer))] or own
            for layer in layers:
                if not any(layer is kept for kept in own):
                    self.ids.lock(as_ids(layer), f"shared by all units that it meets in {what}")
            layers = own
        return Shadow(tuple(layers))

    def lock(self, shadow: Shadow, reason: str) -> None:
        for layer in shadow.layers:
            self.ids.lock(as_ids(layer), reason)

    def mark(self, layer: Layer, use: Use) -> None:
        self.ids.mark(as_ids(layer), use)
