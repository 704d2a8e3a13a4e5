"""Latency of a language model: reading the prompt (prefill), and generating one token (decode)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fairpruner.core.arrays import Floats
from fairpruner.measuring.timing import WARM_UP, Clock
from fairpruner.models.devices import wait_for_model

TOKENS = 8  # generated in each repeat


def generates(model: nn.Module, example: Any) -> bool:
    """Whether a model takes `input_ids` and generates tokens one at a time with a key-value cache."""
    config = getattr(model, "config", None)
    cached = getattr(config, "is_decoder", False) or getattr(config, "use_cache", False)
    return (
        hasattr(model, "generate") and bool(cached) and hasattr(example, "items") and "input_ids" in example
    )


def prefill_and_decode(
    models: Sequence[nn.Module], prompt: Any, repeats: int, *, clock: Clock = time.perf_counter
) -> tuple[Floats, Floats]:
    """Milliseconds to read the prompt and per generated token, [M, repeats] each; models run in turn."""
    tokens = {name: value for name, value in prompt.items() if name in ("input_ids", "attention_mask")}
    times = np.zeros((2, len(models), repeats + WARM_UP))
    for number in range(repeats + WARM_UP):
        order = range(len(models)) if number % 2 == 0 else reversed(range(len(models)))
        for position in order:
            times[:, position, number] = _once(models[position], tokens, clock)
    prefill, decode = times[:, :, WARM_UP:]
    return prefill, decode


def _once(model: Any, tokens: dict[str, torch.Tensor], clock: Clock) -> tuple[float, float]:
    start = clock()
    output = model(**tokens, use_cache=True)
    wait_for_model(model)
    read = clock()
    mask = tokens.get("attention_mask")
    for _ in range(TOKENS):
        chosen = output.logits[:, -1:].argmax(-1).to(tokens["input_ids"].device)  # [N, 1]
        mask = None if mask is None else torch.cat([mask, torch.ones_like(chosen)], dim=1)
        output = model(
            input_ids=chosen,
            past_key_values=output.past_key_values,
            use_cache=True,
            **({} if mask is None else {"attention_mask": mask}),
        )
    wait_for_model(model)
    return 1000 * (read - start), 1000 * (clock() - read) / TOKENS
