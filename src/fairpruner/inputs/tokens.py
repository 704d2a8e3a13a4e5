"""The tokens of a batch of texts: which of them are padding, and which token each position predicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # the label of a token that is not predicted, as in Hugging Face models


def real_tokens(inputs: Any, reader: str = "") -> Tensor | None:
    """Which tokens are not padding, bool [N, T]; None if the inputs are not a batch of texts.

    `reader` is the path of the tensor or module that reads the tokens: those of an encoder and of its decoder
    differ.

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
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return mask.bool()
    return torch.ones_like(ids, dtype=torch.bool)


def counted_tokens(inputs: Any, labels: Any, reader: str = "") -> Tensor | None:
    """Which tokens enter statistics, bool [N, T]; None if the inputs are not a batch of texts.

    Padding does not. If every token has a label, tokens that are not predicted do not either.
    """
    real = real_tokens(inputs, reader)
    if real is None or not isinstance(labels, Tensor) or labels.shape != real.shape:
        return real
    return real & (labels != IGNORED)


def counted_rows(total: int, inputs: Any, reader: str) -> Tensor:
    """The indices of the rows that are not padding, of `total` rows in the order of the texts."""
    real = real_tokens(inputs, reader)
    if real is None or real.numel() != total:
        return torch.arange(total, device="cpu")
    return real.flatten().nonzero().flatten().cpu()


def own_labels(inputs: Any) -> Tensor | None:
    """The tokens themselves as labels, [N, T], padding ignored; None if the inputs are not texts."""
    real = real_tokens(inputs)
    return None if real is None else inputs["input_ids"].masked_fill(~real, IGNORED)


def targets_of(inputs: Any, labels: Any) -> Tensor | None:
    """The token that each position predicts, [N, T], or IGNORED; None if there are no tokens.

    Labels that repeat the tokens are shifted: each position predicts the next token. Other labels stay in
    place. Labels that are classes of whole texts are replaced by the tokens. A token after padding is not
    predicted, because its position has seen no text, on whichever side the padding is.

    >>> targets_of({"input_ids": torch.tensor([[5, 6, 7]])}, torch.tensor([0])).tolist()
    [[6, 7, -100]]
    """
    if not isinstance(labels, Tensor):
        return None
    own = own_labels(inputs)
    found: Tensor = own if labels.ndim != 2 and own is not None else labels
    if found.ndim != 2 or own is None or found.shape != own.shape:
        return found if found.ndim == 2 else None
    found = found.masked_fill(own == IGNORED, IGNORED)
    if not torch.equal(torch.where(found == IGNORED, own, found), own):
        return found
    after_text = own[:, :-1] != IGNORED
    return torch.nn.functional.pad(found[:, 1:].masked_fill(~after_text, IGNORED), (0, 1), value=IGNORED)
