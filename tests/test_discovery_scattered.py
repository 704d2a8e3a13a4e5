"""Rows that are scattered, places that are sampled, and parts that are written in place."""

from __future__ import annotations

import pytest
import torch
from checks import check_cut, some_units, with_lively_weights
from torch import Tensor, nn
from torch.nn import functional as F

import fairpruner as fp


class Graph(nn.Module):
    """Graph convolutions in plain torch: messages along edges are added up, or their maximum is taken."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.one, self.two, self.head = nn.Linear(5, 8), nn.Linear(8, 10), nn.Linear(10, 3)

    def gather(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        index = target[:, None].expand(-1, x.shape[1])
        if self.how == "scatter_add":
            return torch.zeros_like(x).scatter_add_(0, index, x[source])
        if self.how == "index_add":
            return x.new_zeros(x.shape).index_add_(0, target, x[source])
        return torch.zeros_like(x).scatter_reduce(0, index, x[source], "amax", include_self=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = torch.relu(self.gather(self.one(x), edges))
        return self.head(self.gather(self.two(x), edges).mean(0, keepdim=True))


@pytest.mark.parametrize("how", ["scatter_add", "index_add", "scatter_reduce"])
def test_messages_of_a_graph(how: str) -> None:
    nodes = torch.arange(6)
    example = (torch.randn(6, 5, dtype=torch.float64), torch.stack([nodes, (nodes + 1) % 6]))
    model = with_lively_weights(Graph(how))
    spaces = fp.discover(model, example)
    assert {space.name: space.size for space in spaces} == {"one": 8, "two": 10}
    check_cut(model, example, spaces, some_units(spaces, 0.5, 0))


class Sampler(nn.Module):
    """A spatial transformer: a small branch predicts where the image is read."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 1)
        self.hidden, self.place = nn.Linear(3, 7), nn.Linear(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        theta = self.place(torch.relu(self.hidden(x.mean((2, 3))))).view(-1, 2, 3)
        features = self.stem(x)
        grid = F.affine_grid(theta, list(features.shape), align_corners=False)
        return self.head(F.grid_sample(features, grid, align_corners=False))


def test_sampled_channels_can_go_and_places_stay() -> None:
    model, example = with_lively_weights(Sampler()), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    spaces = fp.discover(model, example)
    assert {space.name: space.size for space in spaces} == {"stem": 8, "hidden": 7}
    assert "place" in spaces.left_out
    check_cut(model, example, spaces, some_units(spaces, 0.5, 0))


class InPlace(nn.Module):
    """A concatenation written part by part into a tensor that was made before."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 6), nn.Linear(4, 5), nn.Linear(11, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.one(x), self.two(x)
        joined = x.new_empty(len(x), a.shape[1] + b.shape[1])
        joined[:, : a.shape[1]] = a
        joined[:, a.shape[1] :] = b
        return self.head(torch.relu(joined))


def test_parts_written_in_place_keep_their_units() -> None:
    model, example = with_lively_weights(InPlace()), torch.randn(2, 4, dtype=torch.float64)
    spaces = fp.discover(model, example)
    assert {space.name: space.size for space in spaces} == {"one": 6, "two": 5}
    check_cut(model, example, spaces, some_units(spaces, 0.5, 0))
