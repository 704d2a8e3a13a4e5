"""Networks nobody designed: random chains of residuals, concatenations, groups, gates and reshapes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checks import check_cut, some_units, with_lively_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fairpruner as fp


class Residual(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, inner, 3, padding=1),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, width, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.body(x))


class Concat(nn.Module):
    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, growth, 1), nn.Conv2d(width, growth, 3, padding=1)
        self.join = nn.Conv2d(width + 2 * growth, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.elu(self.join(torch.cat([self.two(x), x, F.silu(self.one(x))], 1)))


class Gate(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3))))))[:, :, None, None]


class Halves(nn.Module):
    """Split, exchange, shift and join: every channel goes somewhere else."""

    def __init__(self, width: int, shift: int) -> None:
        super().__init__()
        self.shift, self.conv = shift, nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = x.tensor_split(2, 1)
        x = torch.cat([two.flip(1), one], 1)
        return F.relu(self.conv(torch.roll(x, self.shift, 3)))


class Gated(nn.Module):
    """A fused gate and value, as in GLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.inner, self.leave = nn.Conv2d(width, 2 * inner, 1), nn.Conv2d(inner, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.inner(x).chunk(2, 1)
        return x + self.leave(F.gelu(gate) * value)


def conv(width: int, size: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(width, size, 3, padding=1), nn.BatchNorm2d(size), nn.ReLU(), nn.Conv2d(size, width, 1)
    )


PARTS = {
    "residual": Residual,
    "concat": Concat,
    "gate": Gate,
    "halves": Halves,
    "gated": Gated,
    "conv": conv,
    "depthwise": lambda width, _: nn.Sequential(
        nn.Conv2d(width, width, 3, padding=1, groups=width), nn.PReLU(width)
    ),
    "wide_groups": lambda width, _: nn.Sequential(
        nn.Conv2d(width, width, 3, padding=1, groups=2), nn.LeakyReLU()
    ),
    "narrow_groups": lambda width, _: nn.Sequential(
        nn.Conv2d(width, width, 1, groups=width // 2), nn.BatchNorm2d(width)
    ),
    "group_norm": lambda width, _: nn.GroupNorm(width // 4, width),
    "instance_norm": lambda width, _: nn.InstanceNorm2d(width, affine=True),
    "pool": lambda *_: nn.AvgPool2d(3, 1, 1),
    "deconv": lambda width, size: nn.Sequential(
        nn.ConvTranspose2d(width, size, 3, padding=1), nn.ReLU(), nn.Conv2d(size, width, 1)
    ),
}


class Net(nn.Module):
    def __init__(self, width: int, parts: list[tuple[str, int]], flatten: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.parts = nn.ModuleList(PARTS[name](width, size) for name, size in parts)
        self.flatten, self.head = flatten, nn.Linear(width * 16 if flatten else width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        for part in self.parts:
            x = part(x)
        return self.head(F.adaptive_avg_pool2d(x, 4).flatten(1) if self.flatten else x.amax((2, 3)))


@pytest.mark.slow
@settings(max_examples=60)
@given(
    width=st.sampled_from([8, 12, 16]),
    parts=st.lists(st.tuples(st.sampled_from(sorted(PARTS)), st.integers(2, 7)), min_size=1, max_size=6),
    flatten=st.booleans(),
    share=st.sampled_from([0.2, 0.5, 0.9]),
)
def test_any_network_is_cut_right_or_refused(
    width: int, parts: list[tuple[str, int]], flatten: bool, share: float
) -> None:
    model, example = (
        with_lively_weights(Net(width, parts, flatten)),
        torch.randn(2, 3, 6, 6, dtype=torch.float64),
    )
    try:
        spaces = fp.discover(model, example)
    except fp.FairprunerError as error:
        assert "nothing to prune" in str(error)  # noqa: PT017
        return
    check_cut(model, example, spaces, some_units(spaces, share, 0))
