"""Gradients that leave no trace in the model: no `.grad` and no changed `requires_grad`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fairpruner.errors import FairprunerError
from fairpruner.inputs.batches import Batch
from fairpruner.models.precision import in_float32
from fairpruner.models.torch_private import without_reentrant_checkpoints


@contextmanager
def only_gradients_of(model: nn.Module, weights: Collection[nn.Parameter]) -> Iterator[None]:
    """Inside, only these weights require gradients, which saves the memory for the others."""
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise FairprunerError(
            f"The {type(model).__name__} was made under torch.inference_mode, so it cannot have gradients:"
            " make it outside, or give copy.deepcopy(model)."
        )
    wanted = {id(weight) for weight in weights}
    changed = [
        parameter for parameter in model.parameters() if parameter.requires_grad != (id(parameter) in wanted)
    ]
    try:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)
        # A reentrant checkpoint drops the gradients of its weights if its input has none, as behind weights
        # that are frozen here. Without it, activations need the memory of a model that has no checkpoints.
        with without_reentrant_checkpoints():
            yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)


def gradients_of(loss: Tensor, inputs: Sequence[Tensor], batch: Batch) -> Sequence[Tensor | None]:
    """The gradient of a batch's loss for each input; None for an input that the loss does not depend on.

    Those of a mean over many samples may be too small for float16. For such inputs the loss is multiplied
    by a power of two near the number of samples, and the gradients are divided by it in float32.
    """
    if not loss.requires_grad:
        raise FairprunerError(
            "The loss has no gradient: compute it from the model's output with torch functions, without"
            " detach or item."
        )
    scale = 1.0
    if any(tensor.dtype is torch.float16 for tensor in inputs):
        scale = 2.0 ** (batch.size.bit_length() - 1)
    try:
        found = torch.autograd.grad(loss * scale, inputs, allow_unused=True)
    except RuntimeError as error:
        raise FairprunerError(f"The backward pass failed on batch {batch.position}: {error}") from error
    if scale == 1:
        return found
    return [None if gradient is None else in_float32(gradient) / scale for gradient in found]
