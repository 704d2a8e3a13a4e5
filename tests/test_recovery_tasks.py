"""Fine-tuning of models for other tasks than the classes of samples, of other inputs and of other dtypes."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fairpruner as fp
from fairpruner.inputs.activations import BlockOutputs
from fairpruner.inputs.batches import Batch
from fairpruner.inputs.losses import loss_or_distance
from fairpruner.recovery import recover
from fairpruner.recovery.loss import training_loss
from fairpruner.recovery.recipe import Recipe


def mlp(outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs))


class Answer(nn.Module):
    """A teacher that always gives the same output."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> Any:
        return self.output


def distilled(student: Any, teacher: Any, labels: Any, **settings: Any) -> float:
    """The distillation loss alone, at a temperature of 2."""
    recipe = Recipe(distillation=1.0, temperature=2.0, **settings)
    return float(training_loss(recipe, student, Batch(torch.zeros(2, 4), labels, 0), Answer(teacher)))


def divergence(student: Tensor, teacher: Tensor, dim: int) -> float:
    """T²·KL(teacher ‖ student) at T = 2, averaged over all predictions, written out."""
    p, q = (teacher.double() / 2).softmax(dim), (student.double() / 2).softmax(dim)
    return 4 * float((p * (p / q).log()).sum(dim).mean())


def relative(student: Tensor, teacher: Tensor) -> float:
    return float((student - teacher).square().sum() / teacher.square().sum())


# ── the form of the distillation ────────────────────────────────────────────────────────────────

CLASSES, TOKENS = torch.tensor([0, 2]), torch.tensor([[0, 2, 1, 0, 1], [1, 0, 2, 2, 0]])
PIXELS = torch.zeros(2, 4, 5).long()


@pytest.mark.parametrize(
    ("shape", "labels", "dim"),
    [
        ((2, 3), CLASSES, 1),
        ((2, 5, 3), TOKENS, 2),
        ((2, 3, 4, 5), PIXELS, 1),
        ((2, 3, 2, 2), PIXELS, 1),  # of a lower resolution than the labels
        ((2, 3), None, 1),
    ],
)
def test_logits_are_distilled_over_their_classes(
    shape: tuple[int, ...], labels: Tensor | None, dim: int
) -> None:
    student, teacher = torch.randn(shape), torch.randn(shape)
    expected = divergence(student, teacher, dim)
    assert distilled(student, teacher, labels) == pytest.approx(expected, rel=1e-5)
    if labels is not None:  # labels show the classes, also for a loss of the caller
        assert distilled(student, teacher, labels, loss=F.cross_entropy) == pytest.approx(expected, rel=1e-5)


def test_a_segmentation_that_differs_in_every_pixel_has_a_loss() -> None:
    """Logits that are constant along the width have the same softmax over the width."""
    teacher = torch.zeros(2, 3, 4, 5)
    teacher[:, 0] = 8
    student = teacher.roll(1, dims=1)
    assert distilled({"out": student}, {"out": teacher}, PIXELS) > 4
    assert distilled({"out": student}, {"out": teacher}, None) > 4


@pytest.mark.parametrize(
    ("shape", "labels", "settings"),
    [
        ((2, 2), torch.randn(2, 2), {}),  # regression
        ((2,), torch.randn(2), {}),
        ((2, 1), torch.randn(2), {}),
        ((2,), None, {}),
        ((2, 3), torch.tensor([[0, 1, 1], [1, 0, 0]]), {}),  # several classes of each sample
        ((2, 3, 4, 5), torch.randn(2, 3, 4, 5), {}),
        ((2, 3, 4, 5), None, {}),  # images
        ((2, 3), None, {"loss": F.l1_loss}),  # of unknown meaning
        ((2, 3), torch.randn(2), {"loss": F.l1_loss}),
        ((2, 3, 5), TOKENS, {"loss": F.cross_entropy}),  # classes not last
        ((2, 1), torch.tensor([0, 1]), {"loss": F.l1_loss}),
        ((2, 1, 4, 5), PIXELS, {"loss": F.l1_loss}),
    ],
)
def test_other_outputs_are_distilled_as_numbers(
    shape: tuple[int, ...], labels: Tensor | None, settings: dict[str, Any]
) -> None:
    teacher = torch.randn(shape)
    for student in (torch.randn(shape), teacher + 7):
        expected = relative(student, teacher)
        assert distilled(student, teacher, labels, **settings) == pytest.approx(expected, rel=1e-5)


def test_all_outputs_of_unknown_meaning_are_distilled() -> None:
    student, teacher = ([torch.randn(2, 3), torch.randn(2, 3, 4)] for _ in range(2))
    flat = [torch.cat([t.flatten() for t in tensors]) for tensors in (student, teacher)]
    assert distilled(student, teacher, None, loss=F.l1_loss) == pytest.approx(relative(*flat), rel=1e-5)
    with pytest.raises(fp.FairprunerError, match=r"teacher gives \(float32\[2, 3\]\), the model"):
        distilled(student, teacher[:1], None, loss=F.l1_loss)


def test_a_regression_is_led_to_its_teacher() -> None:
    class Flat(nn.Module):
        """Gives one number for each sample, [N]."""

        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).flatten()

    net, teacher, x = Flat(), Flat(), torch.randn(32, 4)
    recipe = Recipe(optimizer="adamw", learning_rate=0.01, distillation=1.0)
    found = recover(net, [(x, torch.randn(32))] * 10, epochs=20, teacher=teacher, recipe=recipe)
    with torch.no_grad():
        assert relative(found(x), teacher(x)) < 0.02 * relative(net(x), teacher(x))


# ── label smoothing ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("shape", "labels", "dim"),
    [((2, 5, 3), torch.where(TOKENS == 1, -100, TOKENS), 2), ((2, 3, 4, 5), PIXELS, 1)],
)
def test_label_smoothing_is_torchs_for_every_task(shape: tuple[int, ...], labels: Tensor, dim: int) -> None:
    logits = torch.randn(shape)
    expected = F.cross_entropy(logits.movedim(dim, 1), labels, label_smoothing=0.2)
    batch = Batch(torch.zeros(2, 4), labels, 0)
    torch.testing.assert_close(training_loss(Recipe(label_smoothing=0.2), logits, batch, None), expected)


def test_label_smoothing_of_numbers_is_refused() -> None:
    batch = Batch(torch.zeros(2, 4), torch.randn(2, 3), 0)
    with pytest.raises(fp.FairprunerError, match=r"smoothing of 0.2 .* batch 0 show the task regression"):
        training_loss(Recipe(label_smoothing=0.2), torch.randn(2, 3), batch, None)


# ── inputs ──────────────────────────────────────────────────────────────────────────────────────


class Sum(nn.Module):
    """Takes two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(x + y)


@pytest.mark.parametrize(
    ("net", "item"),
    [
        (mlp(), {"image": torch.randn(8, 4), "label": torch.arange(8) % 3}),
        (Sum(), (torch.randn(8, 4), torch.randn(8, 4))),
        (mlp().double(), (np.random.default_rng(0).normal(size=(8, 4)), np.arange(8) % 3)),
        (mlp().bfloat16(), (np.random.default_rng(0).normal(size=(8, 4)), np.arange(8) % 3)),
    ],
    ids=["dict", "two inputs", "float64", "bfloat16"],
)
def test_batches_are_read_as_by_score(net: nn.Module, item: Any) -> None:
    data = [item] * 3
    assert fp.score(net, data).samples == 24
    recipe = Recipe(distillation=1.0)  # needs no labels
    validation = data if not isinstance(net, Sum) else None
    found = recover(net, data, epochs=1, teacher=net, validation=validation, recipe=recipe)
    assert {p.dtype for p in found.parameters()} == {p.dtype for p in net.parameters()}


def test_prune_recovers_from_dicts() -> None:
    data = [{"image": torch.randn(8, 4), "label": torch.arange(8) % 3} for _ in range(2)]
    small, plan = fp.prune(mlp(), data, keep=fp.Budget("units", 0.5), recover_epochs=1)
    assert small[0].out_features == plan.predicted["units"] == 3


# ── weights of float16 and bfloat16 ─────────────────────────────────────────────────────────────


def narrow_data(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8, 4).to(dtype), torch.randint(0, 3, (8,))) for _ in range(4)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("settings", [{}, {"ema": 0.5}, {"precision": "bfloat16"}])
def test_narrow_weights_are_trained_in_float32(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    net = nn.Sequential(nn.BatchNorm1d(4), *mlp()).to(dtype)
    data = narrow_data(dtype)
    wide = [(x.float(), y) for x, y in data]
    recipe = Recipe(**settings)
    expected = recover(copy.deepcopy(net).float(), wide, epochs=2, validation=wide, recipe=recipe).to(dtype)
    found = recover(net, data, epochs=2, validation=data, recipe=recipe)
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name]), name
        assert tensor.dtype == net.state_dict()[name].dtype
    assert found(data[0][0]).dtype == dtype


def test_updates_of_narrow_weights_add_up() -> None:
    """Each update of 2e-4 is below the distance of 2e-3 between numbers of bfloat16 near 0.3."""
    net = mlp().bfloat16()
    nn.init.constant_(net[2].bias, 0.3)
    recipe = Recipe(
        optimizer=lambda parameters, recipe: torch.optim.SGD(parameters, 2e-4),
        schedule="constant",
        loss=lambda output, labels: output.sum() / len(output),
    )
    found = recover(net, narrow_data(torch.bfloat16), epochs=20, recipe=recipe)  # 80 updates
    torch.testing.assert_close(found[2].bias, net[2].bias - 80 * 2e-4, atol=1e-3, rtol=0)


@pytest.mark.parametrize("matching", [0.0, 0.5])
def test_a_narrow_run_with_a_narrow_teacher_resumes(matching: float, tmp_path: Path) -> None:
    class StopHere(Exception): ...

    def stop(epoch: fp.Epoch) -> None:
        if epoch.number == 2:
            raise StopHere

    net, teacher, data = mlp().bfloat16(), mlp().bfloat16(), narrow_data(torch.bfloat16)
    recipe = Recipe(optimizer="adamw", matching=matching)
    arguments: dict[str, Any] = {"epochs": 3, "teacher": teacher, "recipe": recipe}
    with pytest.raises(StopHere):
        recover(net, data, folder=tmp_path, on_epoch=stop, **arguments)
    found, expected = recover(net, data, folder=tmp_path, **arguments), recover(net, data, **arguments)
    for mine, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(fp.FairprunerError, match="its starting weights is"):
        recover(mlp().bfloat16(), data, folder=tmp_path, **arguments)


# ── numbers that are not finite ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["distillation", "matching"])
@pytest.mark.parametrize(
    ("student", "teacher", "cause"),
    [
        (1.0, math.nan, "the teacher's outputs are not finite.*the teacher's weights"),
        (math.nan, 1.0, "the model's outputs are not finite, the teacher's are.*the model's weights"),
        (3e38, 1e-30, "both models are finite, but too far apart. Lower the learning rate"),
    ],
)
def test_a_loss_that_is_not_finite_names_its_cause(
    name: str, student: float, teacher: float, cause: str
) -> None:
    net, original = (nn.Sequential(nn.Linear(4, 3, bias=False)) for _ in range(2))
    for model, weight in ((net, student), (original, teacher)):
        nn.init.constant_(model[0].weight, weight / 4)
    batch = Batch(torch.ones(2, 4), torch.randn(2, 3), 0)
    with BlockOutputs(net, [""]) as outputs:
        output = net(batch.inputs)
    recipe = Recipe(**{"distillation": 0.0, "matching": 0.0, name: 1.0})
    with pytest.raises(fp.FairprunerError, match=f"The {name} loss of batch 0 is .*{cause}"):
        training_loss(recipe, output, batch, original, outputs.taken())


# ── boxes ───────────────────────────────────────────────────────────────────────────────────────


def test_another_number_of_boxes_is_infinitely_far() -> None:
    def found(boxes: int) -> list[dict[str, Tensor]]:
        return [{"boxes": torch.full((boxes, 4), 2.0), "labels": torch.ones(boxes).long()}]

    batch = Batch([[torch.zeros(3, 8, 8)]], [{"boxes": torch.zeros(1, 4)}], 0)
    assert loss_or_distance(None, found(0), batch, lambda: found(2)) == math.inf
    assert loss_or_distance(None, found(2), batch, lambda: found(2)) == 0
    moved = [{**found(2)[0], "boxes": torch.zeros(2, 4)}]
    assert loss_or_distance(None, moved, batch, lambda: found(2)) == 32
