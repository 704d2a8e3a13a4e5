"""What kind of input a model takes, as JSON: structure, shapes, types and ranges, but no user data.

Plans carry the record of the example that their model was traced with. A plan that was read from a file is
verified on an input drawn from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fairpruner.core.fields import field, listed, mapped, real, text, whole
from fairpruner.core.sealed import Json
from fairpruner.errors import FairprunerError, unknown

MOST_NUMBERS = 2**24  # in a drawn input; a batch of 100 images of 224 × 224
MOST_SIDES = 16
PLAIN = (bool, int, float, str, type(None))
TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
}


def record(example: Any) -> Json | None:
    """The record of an example; None if it holds something that JSON cannot describe.

    >>> record({"x": torch.zeros(1, 3)})
    {'mapping': {'x': {'shape': [1, 3], 'type': 'float32', 'range': [0.0, 0.0]}}}
    """
    if isinstance(example, Tensor):
        return _record_tensor(example)
    if isinstance(example, Mapping):
        items = {name: record(value) for name, value in example.items() if isinstance(name, str)}
        return None if None in items.values() or len(items) != len(example) else {"mapping": items}
    if type(example) in (tuple, list):  # others, such as named tuples, would not be drawn as they were
        parts = [record(value) for value in example]
        return None if None in parts else {type(example).__name__: parts}
    if type(example) in PLAIN and (not isinstance(example, float) or math.isfinite(example)):
        return {"value": example}
    return None


def _record_tensor(tensor: Tensor) -> Json | None:
    kind = str(tensor.dtype).removeprefix("torch.")
    plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
    if kind not in TYPES or not plain:
        return None
    ends = [float(end) for end in tensor.detach().cpu().double().aminmax()] if tensor.numel() else [0.0, 0.0]
    if not all(map(math.isfinite, ends)):
        return None
    return {"shape": list(tensor.shape), "type": kind, "range": ends}


def draw_example(recorded: Any, device: torch.device) -> Any:
    """A random input of the recorded kind, the same for the same record."""
    if _numbers(recorded) > MOST_NUMBERS:
        raise FairprunerError(f"The recorded example has more than {MOST_NUMBERS:,} numbers.")
    return _draw(recorded, torch.Generator("cpu").manual_seed(0), device)


def _numbers(recorded: Any) -> int:
    parts = mapped(recorded, "the recorded example")
    if "shape" in parts:
        sides = listed(parts["shape"], "the shape of an example")
        if len(sides) > MOST_SIDES:
            raise FairprunerError(
                f"The recorded example has {len(sides)} sides, expected at most {MOST_SIDES}."
            )
        return math.prod(whole(side, "a side of an example", at_most=MOST_NUMBERS) for side in sides)
    inner = parts.get("tuple") or parts.get("list") or list((parts.get("mapping") or {}).values())
    return sum(_numbers(part) for part in inner)


def _draw(recorded: Json, generator: torch.Generator, device: torch.device) -> Any:
    if "mapping" in recorded:
        inner = mapped(recorded["mapping"], "the recorded example")
        return {name: _draw(part, generator, device) for name, part in inner.items()}
    for kind in (tuple, list):
        if kind.__name__ in recorded:
            parts = listed(recorded[kind.__name__], "the recorded example")
            return kind(_draw(part, generator, device) for part in parts)
    if "value" in recorded:
        return recorded["value"]
    return _draw_tensor(recorded, generator).to(device)


def _draw_tensor(recorded: Json, generator: torch.Generator) -> Tensor:
    name = text(field(recorded, "type"), "the type of the recorded example")
    if name not in TYPES:
        raise unknown("type of the recorded example", name, TYPES)
    dtype = TYPES[name]
    low, high = (
        real(end, "the range of the example") for end in listed(field(recorded, "range"), "the range")
    )
    noise = torch.rand(field(recorded, "shape"), generator=generator, dtype=torch.float64, device="cpu")
    if dtype.is_floating_point:  # an example of equal numbers, such as zeros, only gave a shape
        return (low + noise * ((high - low) or 1)).to(dtype)
    if low == 0 and high == 1:  # a mask: in each row some tokens are hidden, whichever value hides them
        places = torch.arange(noise.shape[-1] if noise.ndim else 1, device="cpu")
        return (places % 2 == 0).to(dtype).expand(noise.shape).clone()
    if low == high:
        return torch.full_like(noise, high).to(dtype)
    return (low + torch.floor(noise * (high - low + 1))).to(dtype)
