"""Outputs that are sorted by a score: rows whose scores tie may come in any order, others may not."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import fairpruner as fp
from fairpruner.discovery.ties import in_one_order


def image(seed: int, levels: list[int]) -> tuple[list[Tensor], Tensor]:
    """Boxes, labels, masks and scores of an image, and the scores' levels, the highest first."""
    torch.manual_seed(seed)
    level = torch.tensor(sorted(levels))
    scores = 1 / (1 + level.double())
    n = len(levels)
    return [torch.rand(n, 4), torch.randint(0, 3, (n,)), torch.rand(n, 9, 9), scores], level


def shuffled_in_ties(outputs: list[Tensor], level: Tensor) -> list[Tensor]:
    order = torch.randperm(len(level))
    order = order[level[order].argsort(stable=True)]
    scores = outputs[-1] * (1 + 1e-14 * torch.randn(len(level), dtype=torch.float64))  # rounding
    return [*(tensor[order] for tensor in outputs[:-1]), scores]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 4), min_size=2, max_size=12), st.integers(1, 3))
def test_rows_of_tied_scores_get_one_order(seed: int, levels: list[int], images: int) -> None:
    found = [image(seed + number, levels) for number in range(images)]
    outputs = [tensor for one, _ in found for tensor in one]
    others = [tensor for one, level in found for tensor in shuffled_in_ties(one, level)]
    for a, b in zip(in_one_order(outputs, 1e-9), in_one_order(others, 1e-9), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_rows_of_other_scores_keep_their_order() -> None:
    boxes, scores = torch.rand(3, 4), torch.tensor([0.9, 0.5, 0.4])
    assert torch.equal(in_one_order([boxes, scores], 1e-9)[0], boxes)


def test_outputs_without_scores_stay_as_they_are() -> None:
    outputs = [torch.rand(3, 4), torch.tensor([0.1, 0.5, 0.4])]
    assert all(a is b for a, b in zip(in_one_order(outputs, 1e-9), outputs, strict=True))


class Ranked(nn.Module):
    """Returns boxes in the order of their scores; pairs of scores differ only by rounding."""

    def __init__(self, *, wrong: bool = False) -> None:
        super().__init__()
        # So wide that sums over the channels are rounded differently with and without zeros among them.
        self.wide, self.narrow = nn.Linear(3, 1200), nn.Linear(1200, 9)
        self.wrong = wrong

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.wide(x).relu()  # [positions, channels]
        maps = self.narrow(features).T  # [9, positions]
        again = F.linear(features.flip(1), self.narrow.weight.flip(1), self.narrow.bias).T
        scores, order = torch.cat([maps.mean(1), again.mean(1)]).sort(descending=True)
        shift = features.shape[1] if self.wrong else 0  # code that counts channels makes every cut wrong
        boxes = torch.cat([maps[:, :4], maps[:, 4:8]]) + shift
        return boxes[order], scores


def test_a_cut_is_right_whatever_the_order_of_tied_scores() -> None:
    torch.manual_seed(0)
    spaces = fp.discover(Ranked(), torch.randn(36, 3))
    assert [(space.name, space.size) for space in spaces] == [("wide", 1200)]


def test_a_wrong_cut_is_found_beside_tied_scores() -> None:
    torch.manual_seed(0)
    try:
        left_out = fp.discover(Ranked(wrong=True), torch.randn(36, 3)).left_out
    except fp.FairprunerError as error:  # nothing else is there to prune
        left_out = {"wide": str(error)}
    assert "mask and cut differ" in left_out["wide"]
