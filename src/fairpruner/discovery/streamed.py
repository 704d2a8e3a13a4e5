"""Discovery in a model that is larger than memory: random numbers from small pools stand for its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fairpruner.core.units import UnitSpace
from fairpruner.discovery.verify import verify
from fairpruner.errors import FairprunerError
from fairpruner.inputs.streamed import Streamed
from fairpruner.models.caching import CachedLayer
from fairpruner.models.experts import plain_experts

WHOLE = ("block", "stream")  # kinds whose units lie in all layers


def check_kinds(kinds: Sequence[str] | None) -> None:
    """Refuse kinds that cannot be found and verified with one layer at a time."""
    for kind in kinds or ():
        if kind in WHOLE:
            raise FairprunerError(
                f"Spaces of kind {kind} lie in all layers, and --stream has one in memory: leave out {kind}."
            )


def verify_by_layer(
    streamed: Streamed, examples: Sequence[Any], spaces: Sequence[UnitSpace]
) -> tuple[list[UnitSpace], dict[str, str]]:
    """`verify`, layer by layer: the others pass their stream on."""
    sound: list[UnitSpace] = []
    failed: dict[str, str] = {}
    by_layer: dict[int, list[UnitSpace]] = {}
    for space in spaces:
        layers = {streamed.layer_of(part.tensor) for part in space.slices}
        layer = layers.pop()
        if layer is None or layers:
            failed[space.name] = "it lies in several layers, of which --stream has one in memory"
        else:
            by_layer.setdefault(layer, []).append(space)
    for layer, own in by_layer.items():
        with streamed.only(layer) as model, plain_experts(model):
            right, wrong = verify(model, examples, own)
        sound += right
        failed |= wrong
    places = {space.name: place for place, space in enumerate(spaces)}
    return sorted(sound, key=lambda space: places[space.name]), failed


def as_in_files(cached: Sequence[CachedLayer], streamed: Streamed) -> tuple[CachedLayer, ...]:
    """What layers cache in the precision of the files, from what they cache in float32."""
    size = next(streamed.model.parameters()).element_size()
    return tuple(layer._replace(bytes=layer.bytes * size // torch.float32.itemsize) for layer in cached)
