"""The whole job in one call, in one round and in several."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fairpruner as fp
import fairpruner.pipeline
from fairpruner.demo import Digits, DigitsNet, accuracy, train
from fairpruner.pipeline import prune
from fairpruner.recovery.history import Epoch
from fairpruner.recovery.recipe import Recipe


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3))


def some_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(16, 4), torch.arange(16) % 3) for _ in range(3)]


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(
        torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


@pytest.fixture(scope="module")
def digits() -> tuple[nn.Module, DataLoader[Any], Digits]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    known, test = Digits.load()
    model = DigitsNet()
    train(model, known, epochs=4)
    return model, DataLoader(TensorDataset(known.x, known.y), 64, shuffle=True), test


@pytest.mark.slow
def test_three_rounds_with_training_are_saved_and_loaded_from_the_original(
    digits: tuple[nn.Module, DataLoader[Any], Digits], tmp_path: Path
) -> None:
    model, data, test = digits
    before, history = copy.deepcopy(model), list[Epoch]()
    recipe = Recipe(learning_rate=0.05)
    small, plan = prune(
        model,
        data,
        keep=fp.Budget("flops", 0.3),
        rounds=3,
        recover_epochs=1,
        options={"recover": {"recipe": recipe, "on_epoch": history.append}},
    )
    assert same(model, before)
    assert plan.rule == "iterative"
    assert plan.share("flops") == pytest.approx(0.3, abs=0.03)
    assert plan.predicted["params"] == fp.count_params(small)
    assert plan.predicted["flops"] == fp.count_flops(small, test.x[:1])
    assert shapes(fp.cut(model, plan)) == shapes(small)
    assert len(history) == 3
    assert accuracy(small.eval(), test) > 0.9
    fp.save(small, plan, tmp_path / "model")
    again = fp.load(tmp_path / "model", build=DigitsNet)
    assert same(again, small)
    assert torch.equal(again(test.x), small(test.x))


def test_a_budget_is_approached_geometrically(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets, allocate = list[fp.Budget](), fairpruner.pipeline.allocate

    def spy(scores: fp.Scores, **options: Any) -> fp.Plan:
        budgets.append(options["keep"])
        return allocate(scores, **options)

    monkeypatch.setattr(fairpruner.pipeline, "allocate", spy)
    model = mlp()
    _, plan = prune(
        model,
        some_data(),
        keep=fp.Budget("params", 0.25),
        rounds=2,
        options={"allocate": {"rule": "uniform"}},
    )
    total = fp.count_params(model)
    assert budgets == [fp.Budget("params", round(total / 2)), fp.Budget("params", round(total / 4))]
    assert plan.share("params") == pytest.approx(0.25, abs=0.05)


def test_a_tolerance_holds_in_every_round() -> None:
    model, data = mlp(), some_data()
    small, plan = prune(model, data, alpha=0.2, rounds=2)
    spaces = fp.discover(model, data[0][0][:1])
    first = fp.allocate(fp.score(model, data, spaces=spaces), 0.2)
    half = fp.cut(model, first)
    second = fp.allocate(fp.score(half, data), 0.2)
    assert shapes(fp.cut(half, second)) == shapes(small)
    assert same(fp.cut(half, second), small)
    assert same(fp.cut(model, plan), small)


def test_the_papers_preset_is_the_allocated_plan_itself() -> None:
    model, data = mlp(), some_data()
    small, plan = prune(model, data, keep=fp.Budget("units", 0.5), preset="paper")
    expected = fp.allocate(fp.score(model, data), keep=fp.Budget("units", 14))
    assert (plan.rule, plan.alpha, plan.removed) == ("tod", expected.alpha, expected.removed)
    assert same(fp.cut(model, expected), small)


def test_a_round_that_went_too_far_is_followed_by_one_that_removes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 3))
    # The first round aims at 29 units and can have 40 or 20; the second aims at 21.
    _, plan = prune(
        model, some_data(), keep=fp.Budget("units", 21), rounds=2, options={"allocate": {"multiple_of": 20}}
    )
    assert plan.predicted["units"] == 20


def test_options_reach_their_stages(tmp_path: Path) -> None:
    model, data = mlp(), some_data()
    history: list[Epoch] = []
    options = {
        "discover": {"skip": ["0"]},
        "score": {"removal": "l1"},
        "allocate": {"multiple_of": 4},
        "recover": {"folder": tmp_path, "on_epoch": history.append, "teacher": model},
    }
    small, plan = prune(
        model, data, keep=fp.Budget("units", 0.5), rounds=2, recover_epochs=2, options=options
    )
    assert plan.spaces.names == ("2",)
    assert plan.predicted["units"] % 4 == 0
    assert [epoch.number for epoch in history] == [1, 2, 1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-1", "round-2"]
    again, _ = prune(
        model, data, keep=fp.Budget("units", 0.5), rounds=2, recover_epochs=2, options=options
    )  # from the checkpoints
    assert same(again, small)


def test_every_cut_is_repaired() -> None:
    data = [(x, x[:, :3].argmax(1)) for x, _ in some_data()]
    model = fp.recover(mlp(), data, epochs=60, recipe=Recipe(learning_rate=0.2))  # it has something to lose
    small, plan = prune(model, data, keep=fp.Budget("units", 0.5), repair=("least_squares", "batchnorm"))
    assert not same(small, fp.cut(model, plan))
    assert same(
        small,
        fp.repair(fp.cut(model, plan), model, plan, data, method=("least_squares", "batchnorm")),
    )
    twice, whole = prune(model, data, keep=fp.Budget("units", 0.5), repair="mean", rounds=2)
    assert shapes(twice) == shapes(fp.cut(model, whole))


def test_recovery_trains_on_its_own_data() -> None:
    model, data = mlp(), some_data()
    other = some_data()
    small, plan = prune(model, data, alpha=0.1, recover_epochs=1, train=other)
    short = fp.Recipe.short_for(model)
    expected = fp.recover(fp.cut(model, plan), other, epochs=1, teacher=model, recipe=short)
    assert same(small, expected)
    seeded, _ = prune(
        model, data, alpha=0.1, recover_epochs=1, train=other, options={"recover": {"recipe": {"seed": 1}}}
    )
    expected = fp.recover(fp.cut(model, plan), other, epochs=1, teacher=model, recipe=replace(short, seed=1))
    assert same(seeded, expected)
    paper, _ = prune(model, data, alpha=0.1, recover_epochs=1, train=other, preset="paper")
    assert same(paper, fp.recover(fp.cut(model, plan), other, epochs=1))


class Residual(nn.Module):
    """Blocks whose outputs keep their shapes when hidden units go."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(4)
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize("residual", [True, False])
def test_a_searched_model_is_matched_if_its_blocks_kept_their_shapes(
    residual: bool,
) -> None:
    model = Residual() if residual else nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    data = [(torch.randn(32, 6), torch.arange(32) % 3) for _ in range(4)]
    options: dict[str, Any] = {"discover": {"kinds": ["hidden"]}} if residual else {}
    budget = fp.Budget("units", 0.5)
    small, _ = prune(model, data, keep=budget, options=options)
    found, _ = prune(model, data, keep=budget, options=options, recover_epochs=1)
    recipe = fp.Recipe.short_for(model, near=residual)
    assert same(found, fp.recover(small, data, epochs=1, teacher=model, recipe=recipe))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"alpha": 0.1, "recover_epochs": 1, "options": {"recover": {"recipe": {"sed": 1}}}},
            "Unknown setting of a recipe 'sed': did you mean 'seed'",
        ),
        ({}, "either a tolerance or a budget, found alpha=None and keep=None"),
        ({"alpha": 0.1, "keep": fp.Budget("flops", 0.5)}, "either a tolerance or a budget"),
        ({"alpha": 1.5}, "Alpha is 1.5"),
        ({"alpha": 0.1, "rounds": 0}, "rounds=0, expected a whole number of at least 1"),
        ({"alpha": 0.1, "rounds": 1.5}, "rounds=1.5"),
        ({"alpha": 0.1, "recover_epochs": -1}, "recover_epochs=-1, expected a whole number of at least 0"),
        ({"alpha": 0.1, "options": {"scores": {}}}, "Unknown stage 'scores': did you mean 'score'"),
        (
            {"alpha": 0.1, "options": {"score": {"removals": "l1"}}},
            "Unknown option of score 'removals': did you mean 'removal'",
        ),
        ({"alpha": 0.1, "options": {"recover": {"epochs": 3}}}, "Unknown option of recover 'epochs'"),
        (
            {"alpha": 0.1, "repair": "least_square"},
            "Unknown repair method 'least_square': did you mean 'least_squares'",
        ),
        ({"alpha": 0.1, "train": iter([])}, "The training data is a list_iterator, which can be read once"),
        ({"keep": fp.Budget("units", 0.01)}, "out of reach"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fp.FairprunerError, match=sentence):
        prune(mlp(), some_data(), **arguments)


def test_no_data() -> None:
    with pytest.raises(fp.FairprunerError, match="The data holds no samples"):
        prune(mlp(), [], alpha=0.1)


@pytest.mark.parametrize("way", [{}, {"rounds": 2}, {"preset": "paper"}], ids=str)
def test_a_budget_that_was_missed_is_reported_once_as_it_was_asked_for(way: dict[str, Any]) -> None:
    """A space of three units can keep a third or two thirds of the FLOPs."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    data = [(torch.randn(16, 4), torch.arange(16) % 2) for _ in range(2)]
    with pytest.warns(fp.FairprunerWarning) as caught:
        fp.prune(net, data, keep=fp.Budget("flops", 0.5), effort=5, **way)
    misses = [str(warning.message) for warning in caught if "Budget" in str(warning.message)]
    assert len(misses) == 1
    assert re.match(r"Budget flops keep=0\.5: .* keeps 0\.\d\d\. To come nearer, ", misses[0])
