"""Residual blocks: found in any model, removed so that the cut model computes what the masked one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fairpruner as fp
from fairpruner.allocation.composition import compose, remaining
from fairpruner.core.costs import predict
from fairpruner.core.units import DEFAULT_KINDS, KINDS

EVERY_KIND = list(KINDS)


class PreNorm(nn.Module):
    """A transformer layer without attention over tokens: two branches, one of them with a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.mix = nn.LayerNorm(6), nn.Linear(6, 6)
        self.norm2, self.mlp = nn.LayerNorm(6), nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.mix(self.norm1(x)))
        return x + 0.5 * self.mlp(self.norm2(x))


class PostNorm(nn.Module):
    """A layer that normalises its sum, as BERT does: its branch can go, the layer cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 9), nn.Linear(9, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.tanh(self.up(x))))


class Basic(nn.Module):
    """A ResNet block; with a projection there is no identity to fall back on."""

    def __init__(self, width: int = 6, wider: int | None = None) -> None:
        super().__init__()
        out = wider or width
        self.conv1, self.bn1 = nn.Conv2d(width, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.project = nn.Conv2d(width, out, 1) if wider else None

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.project is None else self.project(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += shortcut
        return self.relu(out)


class Scaled(nn.Module):
    """ConvNeXt's block: a scale that belongs to the block itself, and channels last inside."""

    def __init__(self) -> None:
        super().__init__()
        self.deep, self.norm = nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.LayerNorm(6)
        self.mlp = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        out = self.mlp(self.norm(self.deep(x).permute(0, 2, 3, 1)))
        return x + (self.scale * out).permute(0, 3, 1, 2)


class Gated(nn.Module):
    """A branch that multiplies in the forward of the layer itself, outside of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.value, self.out = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.other = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        value = self.value(self.norm(x))
        weights = F.softmax(value @ value.mT, -1)
        x = x + self.out(weights @ value)
        return x + self.other(x)


class Twice(nn.Module):
    """One layer that runs twice, as in ALBERT, between two plain ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = PreNorm(), PreNorm(), PreNorm()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.shared(self.shared(self.first(x))))


def vectors(*layers: nn.Module) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(4, 6), *layers, nn.Linear(6, 3)), torch.randn(2, 5, 4)


def images(*layers: nn.Module) -> tuple[nn.Module, Tensor]:
    first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU())
    return nn.Sequential(first, *layers, nn.Flatten(), nn.LazyLinear(3)), torch.randn(2, 3, 4, 4)


NETS: dict[str, tuple[Any, int]] = {
    "pre-norm": (lambda: vectors(PreNorm(), PreNorm(), PreNorm()), 6),
    "post-norm": (lambda: vectors(PostNorm(), PostNorm()), 2),
    "resnet": (lambda: images(Basic(), Basic(), Basic(6, 8), Basic(8)), 3),
    "convnext": (lambda: images(Scaled(), Scaled(), Scaled()), 3),
    "mixed": (lambda: vectors(PreNorm(), PostNorm()), 3),
}


def built(name: str) -> tuple[nn.Module, Tensor, int]:
    make, blocks = NETS[name]
    model, example = make()
    model.eval()(example)  # lazy modules get their sizes
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            module.running_mean.uniform_(-0.5, 0.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return model.double(), example.double(), blocks


@pytest.mark.parametrize("name", NETS)
def test_a_cut_equals_a_mask_and_costs_what_was_predicted(name: str) -> None:
    model, example, blocks = built(name)
    spaces = fp.discover(model, example, kinds=EVERY_KIND)
    assert spaces["blocks"].size == blocks
    rng = np.random.default_rng(0)
    for count in range(1, blocks):
        removed = {"blocks": rng.permutation(blocks)[:count].tolist()}
        removed |= {s.name: [0] for s in spaces if s.kind != "block" and s.size > 1}
        plan = fp.Plan.removing(spaces, removed)
        small, masked = fp.cut(model, plan), fp.mask(model, plan)
        assert torch.allclose(small(example), masked(example), rtol=0, atol=1e-10)
        assert not torch.allclose(small(example), model(example))
        assert fp.count_params(small) == plan.predicted["params"]
        assert fp.count_flops(small, example) == plan.predicted["flops"]


def test_a_removed_block_adds_zero() -> None:
    model, example, _ = built("resnet")
    spaces = fp.discover(model, example, kinds=["block"])
    small = fp.cut(model, fp.Plan.removing(spaces, {"blocks": [0]}))
    assert isinstance(model, nn.Sequential)
    assert torch.equal(small(example), nn.Sequential(model[0], *list(model)[2:])(example))


def test_blocks_are_looked_for_only_on_request() -> None:
    model, example, _ = built("pre-norm")
    assert "blocks" not in fp.discover(model, example).names
    assert "block" not in DEFAULT_KINDS
    assert fp.discover(model, example, kinds=["block"]).names == ("blocks",)


def test_units_inside_of_a_removed_block_are_gone_too() -> None:
    model, example, _ = built("pre-norm")
    spaces = fp.discover(model, example, kinds=EVERY_KIND)
    inner = {name: unit for name, (_, unit) in spaces.enclosing.items()}
    assert inner == {"1.mlp.0": 1, "2.mlp.0": 3, "3.mlp.0": 5}
    plan = fp.Plan.removing(spaces, {"blocks": [1], "1.mlp.0": [0, 1], "2.mlp.0": [0]})
    assert plan.kept == {"1.mlp.0": 0, "2.mlp.0": 9, "3.mlp.0": 10, "blocks": 5}
    assert plan.predicted["units"] == 9 + 10 + 5


def test_obstacles_are_named() -> None:
    model, example = vectors(Gated(), PreNorm())
    spaces = fp.discover(model.eval(), example, kinds=["block"])
    assert spaces.left_out["1.out"] == "it multiplies outside of the modules that can be replaced"
    assert spaces["blocks"].size == 3
    shared = nn.Sequential(nn.Linear(4, 6), Twice(), nn.Linear(6, 3)).eval()
    spaces = fp.discover(shared, example, kinds=["block"])
    assert spaces.left_out["1.shared.mlp"] == "its modules are called several times in one forward pass"
    assert spaces["blocks"].size == 4
    spaces = fp.discover(model, example, kinds=["block"], skip=["1"])
    assert spaces.left_out["1.other"] == "skipped by the caller"


def test_a_latency_table_of_blocks_is_refused() -> None:
    model, example, _ = built("pre-norm")
    spaces = fp.discover(model, example, kinds=EVERY_KIND)
    with pytest.raises(fp.FairprunerError, match=r"only\(kinds=\['hidden'\]\)"):
        fp.latency_table(model, example, spaces, repeats=1)


def test_plans_of_blocks_compose_and_survive_files(tmp_path: Path) -> None:
    model, example, _ = built("pre-norm")
    spaces = fp.discover(model, example, kinds=EVERY_KIND)
    first = fp.Plan.removing(spaces, {"blocks": [1, 2], "2.mlp.0": [3]})
    small = fp.cut(model, first)
    left = remaining(first, small)
    assert "1.mlp.0" not in left.names
    assert predict(left, {}) == first.predicted
    second = fp.Plan.removing(left, {"blocks": [0, 3], "2.mlp.0": [0]})  # of the original 0 and 5
    both = compose(first, second)
    assert both.removed["blocks"] == (1, 2, 0, 5)
    both.save(tmp_path / "plan.json")
    again = fp.Plan.load(tmp_path / "plan.json")
    assert again.predicted == both.predicted == second.predicted
    twice = fp.cut(small, second)
    assert torch.equal(fp.cut(model, again)(example), twice(example))
    fp.save(twice, both, tmp_path / "small")
    loaded = fp.load(tmp_path / "small", build=lambda: built("pre-norm")[0])
    assert torch.equal(loaded(example), twice(example))


def test_signals_of_blocks() -> None:
    model, example, blocks = built("mixed")
    data = [(torch.randn(4, 5, 4).double(), torch.randn(4, 5, 3).double()) for _ in range(2)]
    spaces = fp.discover(model, example, kinds=["block"])
    scores = fp.score(
        model,
        data,
        spaces=spaces,
        loss=F.mse_loss,
        removal=["influence", "deletion", "l2"],
        protection="taylor",
    )
    full = np.mean([F.mse_loss(model(x), y).item() for x, y in data])
    for unit in range(blocks - 1):
        small = fp.cut(model, fp.Plan.removing(spaces, {"blocks": [unit]}))
        change = np.mean([F.mse_loss(small(x), y).item() for x, y in data]) - full
        assert scores.removals["deletion"]["blocks"][unit] == pytest.approx(change)
    # The first block by hand: its stream, and its stream with what it adds.
    assert isinstance(model, nn.Sequential)
    layer = model[1]
    assert isinstance(layer, PreNorm)
    turned = []
    for x, _ in data:
        before = model[0](x)
        after = before + layer.mix(layer.norm1(before))
        turned.append(1 - F.cosine_similarity(before, after, dim=-1).mean().item())
    assert scores.removals["influence"]["blocks"][0] == pytest.approx(np.mean(turned))
    # To first order the loss without a block is the loss minus <gradient, what ends the block>.
    loss = torch.stack([F.mse_loss(model(x), y) for x, y in data]).mean()
    ending = [layer.mix.weight, layer.mix.bias]
    slopes = torch.autograd.grad(loss, ending)
    term = sum(float((p.detach() * g).sum()) for p, g in zip(ending, slopes, strict=True))
    assert scores.protection["blocks"][0] == pytest.approx(abs(term))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_blocks_and_units_share_one_budget() -> None:
    model, example, _ = built("pre-norm")
    data = [(torch.randn(8, 5, 4).double(), torch.randn(8, 5, 3).double())]
    spaces = fp.discover(model, example, kinds=EVERY_KIND)
    removal = {"hidden": "activation", "block": "influence"}
    scores = fp.score(model, data, spaces=spaces, loss=F.mse_loss, removal=removal, protection="taylor")
    for rule in ("tod", "uniform", "global"):
        plan = fp.allocate(scores, keep=fp.Budget("params", 0.6), rule=rule)
        small = fp.cut(model, plan)
        assert fp.count_params(small) == plan.predicted["params"]
        assert plan.share("params") == pytest.approx(0.6, abs=0.1)
        repaired = fp.repair(
            small, model, plan, data, loss=F.mse_loss, method=["least_squares", "sequential"]
        )
        assert fp.count_params(repaired) == plan.predicted["params"]
        report = fp.report(scores, plan)
        assert sum(row.params[1] for row in report.spaces) == pytest.approx(plan.predicted["params"])


class Linears(nn.Module):
    """A residual block without any nonlinearity."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 7), nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x))
        return x + out


@pytest.mark.parametrize("gone", [[1], [1, 2], [0], [3]])
def test_sequential_lets_the_block_before_a_removed_one_take_over(gone: list[int]) -> None:
    """All blocks are linear, so that one of them can do what several did."""
    model = nn.Sequential(nn.Linear(4, 4), *(Linears() for _ in range(4)), nn.Linear(4, 3)).double()
    data = [(inputs := torch.randn(64, 4).double(), model(inputs).detach()) for _ in range(2)]
    plan = fp.Plan.removing(fp.discover(model, data[0][0], kinds=["block"]), {"blocks": gone})
    small = fp.cut(model, plan)
    repaired = fp.repair_with_notes(small, model, plan, data, method="sequential", loss=F.mse_loss)
    torch.testing.assert_close(repaired.model(inputs), model(inputs), rtol=1e-6, atol=1e-6)
    if gone[0]:  # the weight before the first removed block is fitted to the stream behind the last
        assert f"{gone[0]}.down.weight" in [n.subject for n in repaired.notes if n.outcome == "repaired"]


@pytest.mark.parametrize("name", ["pre-norm", "resnet", "convnext"])
def test_sequential_repairs_plans_with_blocks(name: str) -> None:
    model, example, blocks = built(name)
    inputs = torch.randn(128, *example.shape[1:]).double()
    data = [(inputs, model(inputs).detach())]
    spaces = fp.discover(model, example, kinds=EVERY_KIND)
    plan = fp.Plan.removing(spaces, {"blocks": [blocks // 2]})
    small = fp.cut(model, plan)
    repaired = fp.repair(small, model, plan, data, method="sequential", loss=F.mse_loss)
    unseen = torch.randn(128, *example.shape[1:]).double()
    before, after = (F.mse_loss(one(unseen), model(unseen)) for one in (small, repaired))
    assert after < 0.7 * before
