"""Code that treats channels by their share or place: whatever space is offered, mask equals cut."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fairpruner as fp


def _halves_activated(h: Tensor) -> Tensor:
    n = h.shape[1] // 2
    return torch.cat([h[:, :n].relu(), h[:, n:].tanh()], 1)


def _halves_pooled(h: Tensor) -> Tensor:
    n = h.shape[1] // 2
    return torch.cat([F.max_pool2d(h[:, :n], 3, 1, 1), F.avg_pool2d(h[:, n:], 3, 1, 1)], 1)


def _rotated(h: Tensor) -> Tensor:
    n = h.shape[1] // 2
    return h + torch.cat([-h[:, n:], h[:, :n]], 1)


def _some_in_place(h: Tensor, chosen: slice) -> Tensor:
    h = h.clone()
    h[:, chosen] = h[:, chosen].relu()
    return h


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "activation of halves": _halves_activated,
    "pooling of halves": _halves_pooled,
    "rotation": _rotated,
    "chunks": lambda h: torch.cat([h.chunk(2, 1)[0].relu(), h.chunk(2, 1)[1].tanh()], 1),
    "split": lambda h: torch.cat([part * n for n, part in enumerate(h.tensor_split(3, 1), 1)], 1),
    "first half": lambda h: _some_in_place(h, slice(h.shape[1] // 2)),
    "first third": lambda h: _some_in_place(h, slice(h.shape[1] // 3)),
    "first quarter": lambda h: _some_in_place(h, slice(h.shape[1] // 4)),
    "all but the last": lambda h: _some_in_place(h, slice(-1)),
    "all but the first": lambda h: _some_in_place(h, slice(1, None)),
    "every second": lambda h: _some_in_place(h, slice(None, None, 2)),
    "mask": lambda h: h * (torch.arange(h.shape[1]) < h.shape[1] // 2).view(-1, 1, 1).to(h),
}


class Between(nn.Module):
    def __init__(self, way: Callable[[Tensor], Tensor], channels: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 2, 1)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.way(self.one(x)))


@pytest.mark.parametrize("channels", [4, 5, 8, 9, 16, 32])
@pytest.mark.parametrize("way", list(WAYS))
def test_channels_that_code_treats_by_their_share_are_cut_right_or_not_at_all(
    way: str, channels: int
) -> None:
    torch.manual_seed(0)
    model = Between(WAYS[way], channels).double().eval()
    try:
        spaces = fp.discover(model, torch.randn(2, 3, 4, 4).double())
    except fp.FairprunerError:
        return  # nothing is offered
    rng, x = np.random.default_rng(1), torch.randn(3, 3, 4, 4).double()
    for _ in range(12):
        removed = {s.name: tuple(rng.permutation(s.size)[: rng.integers(1, s.size)].tolist()) for s in spaces}
        plan = fp.Plan.removing(spaces, removed)
        torch.testing.assert_close(fp.mask(model, plan)(x), fp.cut(model, plan)(x), rtol=0, atol=1e-10)
