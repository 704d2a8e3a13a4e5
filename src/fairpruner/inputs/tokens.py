"""The tokens of a batch of texts: which of them are real, and which token each position has to predict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # stands for a token that is not to be predicted, as in the models of Hugging Face


def real_tokens(inputs: Any, reader: str = "") -> Tensor | None:
    """Which tokens are no padding, bool [N, T]; None if the inputs are no batch of texts.

    `reader` names the tensor that reads them: the decoder of an encoder-decoder has tokens of its own.

    >>> ids, mask = torch.tensor([[5, 6], [7, 0]]), torch.tensor([[1, 1], [1, 0]])
    >>> real_tokens({"input_ids": ids, "attention_mask": mask})
    tensor([[ True,  True],
            [ True, False]])
    """
    if not isinstance(inputs, Mapping):
        return None
    side = "decoder_" if "decoder_input_ids" in inputs and "decoder" in reader.split(".") else ""
    ids, mask = (inputs.get(side + name) for name in ("input_ids", "attention_mask"))
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        return None
    return (
        mask.bool()
        if isinstance(mask, Tensor) and mask.shape == ids.shape
        else torch.ones_like(ids, dtype=torch.bool)
    )


def counted_tokens(inputs: Any, labels: Tensor, reader: str = "") -> Tensor | None:
    """Which tokens statistics count, bool [N, T]: real ones, and if every token has a label, those to be
    predicted; None for no texts.
    """
    real = real_tokens(inputs, reader)
    return real if real is None or labels.shape != real.shape else real & (labels != IGNORED)


def counted_rows(total: int, inputs: Any, reader: str) -> Tensor:
    """Which of `total` rows that lie text by text count, [rows]: all of them, but none of the padding of
    a batch of texts.
    """
    real = real_tokens(inputs, reader)
    return (
        torch.arange(total)
        if real is None or real.numel() != total
        else real.flatten().nonzero().flatten().cpu()
    )


def own_labels(inputs: Any) -> Tensor | None:
    """The tokens themselves as labels, [N, T], padding ignored; None if the inputs are no batch of texts."""
    real = real_tokens(inputs)
    return None if real is None else inputs["input_ids"].masked_fill(~real, IGNORED)


def targets_of(inputs: Any, labels: Tensor) -> Tensor | None:
    """What each position has to predict, [N, T], IGNORED where nothing; None if neither inputs nor labels
    are tokens.

    Labels that repeat the tokens are predicted one ahead, others in place; classes of whole texts stand
    for no labels. A token that follows padding is not predicted: padding knows nothing, on whichever side
    it is.

    >>> targets_of({"input_ids": torch.tensor([[5, 6, 7]])}, torch.tensor([0])).tolist()
    [[6, 7, -100]]
    """
    own = own_labels(inputs)
    if labels.ndim != 2:
        labels = own if own is not None else labels
    if labels.ndim != 2 or own is None or labels.shape != own.shape:
        return labels if labels.ndim == 2 else None
    labels = labels.masked_fill(own == IGNORED, IGNORED)
    if not torch.equal(torch.where(labels == IGNORED, own, labels), own):
        return labels
    return torch.nn.functional.pad(
        labels[:, 1:].masked_fill(own[:, :-1] == IGNORED, IGNORED), (0, 1), value=IGNORED
    )
