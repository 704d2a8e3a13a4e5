"""Which rows a tensor is the weighted sum of: the token and the weight of each row, from gradients.

A block of experts gives s_t = sum over the pairs p of token t of w_p y_p, where y_p [H] is one row of an
expert's output and w_p its router weight. A backward pass from s with a gradient matrix G [tokens, H]
therefore gives row p the gradient w_p G[t]. G is chosen so that its row t spells the number t: first a 1,
then the binary digits of t, then ones up to the last column.

Example: 4 tokens, H = 4. G[2] = [1, 0, 1, 1], since 2 has the digits 0, 1 (lowest first). An expert's row
that comes back as [0.3, 0, 0.3, 0.3] has the router weight 0.3 (column 0) and belongs to token 0*1 + 1*2 = 2.
The last column must repeat column 0; if it does not, the block does more than weigh and add. Numbers of more
than H - 2 digits take several backward passes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def trace_rows(mixed: Tensor, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """The router weight and the token of every row of the experts' outputs, [P] each.

    None if `mixed` [tokens, H] is not the weighted sum of these rows.

    >>> rows = torch.randn(3, 4, requires_grad=True)
    >>> weighted = rows * torch.tensor([[0.3], [0.5], [2.0]])
    >>> mixed = torch.zeros(5, 4).index_add(0, torch.tensor([4, 0, 4]), weighted)
    >>> weight, token = trace_rows(mixed, [rows])
    >>> token.tolist()
    [4, 0, 4]
    """
    tokens, width = mixed.shape
    if width < 3 or not mixed.requires_grad or any(output.shape[-1] != width for output in outputs):
        return None
    digits = max(tokens - 1, 1).bit_length()
    token = torch.zeros((), dtype=torch.int64, device=mixed.device)
    for first in range(0, digits, width - 2):
        places = torch.arange(first, min(first + width - 2, digits), device=mixed.device)
        rows = _row_gradients(mixed, outputs, _spelled(mixed, places))  # [P, H]
        weight = rows[:, 0]
        if not torch.allclose(weight, rows[:, -1]):
            return None
        ones = rows[:, 1 : 1 + len(places)].abs() > weight.abs()[:, None] / 2
        token = token + (ones.long() << places).sum(1)
    return weight, token


def _spelled(mixed: Tensor, places: Tensor) -> Tensor:
    """Rows that spell the binary digits of their numbers at these places, [tokens, H]."""
    gradient = torch.ones_like(mixed)
    numbers = torch.arange(len(mixed), device=mixed.device)[:, None]
    gradient[:, 1 : 1 + len(places)] = (numbers >> places & 1).to(gradient)
    return gradient


def _row_gradients(mixed: Tensor, outputs: Sequence[Tensor], gradient: Tensor) -> Tensor:
    """The gradient of every row of the outputs, [P, H]."""
    found = torch.autograd.grad(mixed, outputs, gradient, retain_graph=True, allow_unused=True)
    # NaN for an output that the sum does not depend on, so that the comparison of its columns fails.
    missing = gradient.new_full((1, gradient.shape[1]), torch.nan)
    return torch.cat([missing if one is None else one.reshape(-1, one.shape[-1]) for one in found])
