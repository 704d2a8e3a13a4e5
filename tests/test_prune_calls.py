"""What a caller of `prune` can get wrong, and what it must leave as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fairpruner as fp
from fairpruner.pipeline.learning import _of_round


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def some_data(labels: int = 3) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(16, 8), torch.arange(16) % labels) for _ in range(4)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 0.5}, r"keep is 0.5, expected a budget"),
        ({"keep": fp.Budget("experts", 0.5)}, "hold no space of routed experts"),
        ({"keep": fp.Budget("experts", 0.5), "preset": "paper"}, "hold no space of routed experts"),
        ({"keep": fp.Budget("cache_bytes", 0.5), "rounds": 2}, "no cache of keys and values"),
        ({"keep": fp.Budget("units", 0.5), "options": {"score": None}}, "options of score are None"),
        (
            {"keep": fp.Budget("units", 0.3), "rounds": 2, "options": {"allocate": {"min_keep": 0.5}}},
            "each of the 2 rounds would take it of what is left",
        ),
        (
            {"keep": fp.Budget("units", 0.5), "options": {"recover": {"recipe": {"learning_rate": -1.0}}}},
            "learning_rate=-1.0, expected",
        ),
        ({"alpha": 0.1, "recover_epochs": 1, "train": iter([])}, "The training data is a"),
        ({"alpha": 0.1, "train": []}, "Found train without recover_epochs, so nothing is trained"),
        (
            {"alpha": 0.1, "options": {"recover": {"recipe": {"seed": 1}}}},
            r"Found options\['recover'\] without recover_epochs",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_sentence(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(fp.FairprunerError, match=message):
        fp.prune(mlp(), some_data(), **arguments)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (fp.Budget("latency", 0.5), "needs a latency table: give options={'allocate': .* plan --latency and"),
        (fp.Budget("latency_ms", 3), "needs a latency table"),
        (fp.Budget("cache_bytes", 0.5), "no cache of keys and values"),
        (fp.Budget("experts", 0.5), "hold no space of routed experts"),
    ],
)
@pytest.mark.parametrize("preset", ["best", "paper"])
def test_a_budget_that_cannot_be_met_is_refused_before_scoring(
    keep: fp.Budget, message: str, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("fairpruner.pipeline.score")
    with pytest.raises(fp.FairprunerError, match=message):
        fp.prune(mlp(), some_data(), keep=keep, preset=preset)


def test_a_search_warns_if_no_sample_is_left_to_judge() -> None:
    data = [(inputs[:3], labels[:3]) for inputs, labels in some_data()[:1]]
    with pytest.warns(fp.FairprunerWarning, match="holds 3 samples, so repairs are judged on .* at least 5"):
        fp.prune(mlp(), data, keep=fp.Budget("flops", 0.5), effort=5)


def test_pruning_leaves_the_random_state_as_it_was() -> None:
    inputs, labels = torch.randn(64, 8), torch.arange(64) % 3
    loader = DataLoader(TensorDataset(inputs, labels), 16, shuffle=True)
    model, before = mlp(), torch.get_rng_state()
    fp.prune(model, loader, keep=fp.Budget("flops", 0.5), effort=10, recover_epochs=1)
    fp.prune(model, loader, alpha=0.2)
    assert torch.equal(torch.get_rng_state(), before)


def test_labels_of_one_class_choose_no_signal_that_needs_several() -> None:
    _, plan = fp.prune(mlp(), some_data(labels=1), keep=fp.Budget("flops", 0.5), effort=10)
    assert {trial.removal for trial in plan.tried} <= {"reconstruction", "surgeon", "l1"}


def test_whole_numbers_that_are_named_regression_are_no_classes() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))
    options = {"score": {"loss": "regression"}}
    small, _ = fp.prune(model, some_data(), keep=fp.Budget("flops", 0.5), effort=10, options=options)
    assert small[0].out_features < 16


def test_a_loss_for_scores_serves_repair_and_recovery_too() -> None:
    """These labels fit no default loss."""
    data = [(inputs, torch.stack([labels, labels], 1)) for inputs, labels in some_data()]
    seen: list[int] = []

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        seen.append(len(labels))
        return nn.functional.cross_entropy(output, labels[:, 0])

    def calls(**arguments: Any) -> int:
        before = len(seen)
        fp.prune(mlp(), data, alpha=0.3, options={"score": {"loss": loss, "removal": "l1"}}, **arguments)
        return len(seen) - before

    assert calls() < min(calls(repair="mean"), calls(recover_epochs=1))


def test_a_changed_share_of_the_teachers_logits_leaves_the_rest_to_its_blocks() -> None:
    settings = {"distillation": 0.25}
    learning = {"recipe": fp.Recipe(distillation=0.0, matching=1.0)}
    recipe = _of_round(1, learning, {"recipe": settings})["recipe"]
    assert (recipe.distillation, recipe.matching) == (0.25, 0.75)


def test_data_without_labels_is_learned_from_the_teacher_alone() -> None:
    inputs = [batch for batch, _ in some_data()]
    small, _ = fp.prune(mlp(), inputs, keep=fp.Budget("flops", 0.5), effort=10, recover_epochs=1)
    assert small[0].out_features < 16


def test_what_is_no_plan_is_refused_by_every_stage(tmp_path: Path) -> None:
    model, data = mlp(), some_data()
    scores = fp.score(model, data)
    units: Any = {"0": (1,)}
    for call in (
        lambda: fp.cut(model, units),
        lambda: fp.mask(model, units),
        lambda: fp.repair(model, model, units, data),
        lambda: fp.save(model, units, tmp_path / "folder"),
        lambda: fp.diagnose(scores, units),
    ):
        with pytest.raises(fp.FairprunerError, match="The plan is a dict, expected a Plan"):
            call()


def test_other_values_of_a_wrong_type_are_refused_in_one_sentence(tmp_path: Path) -> None:
    model, data = mlp(), some_data()
    scores = fp.score(model, data)
    plan = fp.allocate(scores, alpha=0.1)
    fp.save(fp.cut(model, plan), plan, tmp_path / "folder")
    wrong: Any = model
    with pytest.raises(fp.FairprunerError, match="build is a Sequential, expected a function"):
        fp.load(tmp_path / "folder", build=wrong)
    with pytest.raises(fp.FairprunerError, match="did not build a model: ZeroDivisionError: division"):
        fp.load(tmp_path / "folder", build=lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(fp.FairprunerError, match="A model to measure is a str, expected"):
        fp.measure(model, data[0][0], against="x")  # type: ignore[arg-type]
    learning: dict[str, dict[str, Any]] = {
        "recipe is {'seed': 1}, expected a Recipe": {"recipe": {"seed": 1}},
        "on_epoch is 3, expected a function": {"on_epoch": 3},
        "Adam'> made no optimizer, it raised .*: give a function of parameters and recipe": {
            "recipe": fp.Recipe(optimizer=torch.optim.Adam)  # type: ignore[arg-type]
        },
        "gave None for 0, expected a finite number": {
            "recipe": fp.Recipe(schedule=lambda done: None)  # type: ignore[arg-type, return-value]
        },
    }
    for message, arguments in learning.items():
        with pytest.raises(fp.FairprunerError, match=message):
            fp.recover(model, data, epochs=1, **arguments)
    number: Any = 0.5
    with pytest.raises(fp.FairprunerError, match=r"amounts is 0.5, expected several"):
        fp.sweep(scores, "flops", number)
    for seed in (-1, number):
        with pytest.raises(fp.FairprunerError, match="seed="):
            fp.score(model, data, seed=seed)
