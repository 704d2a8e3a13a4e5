"""Scoring for every task: what the labels are decides the loss and the signals, also where there are none."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance
from torch import Tensor, nn
from torch.nn import functional as F

import fairpruner as fp
from fairpruner.inputs.batches import read_batches
from fairpruner.inputs.losses import mean_loss

CPU = torch.device("cpu")


def mlp(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, outputs)).double()


def inputs(count: int = 12) -> Tensor:
    return torch.randn(count, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def same(first: fp.Scores, second: fp.Scores) -> None:
    assert first.active == second.active
    for name in first.spaces.names:
        np.testing.assert_array_equal(first.removal[name], second.removal[name])
        np.testing.assert_array_equal(first.protection[name], second.protection[name])


# Without labels


def test_inputs_without_labels_in_every_form() -> None:
    model, x = mlp(), inputs()
    scores = fp.score(model, [x])
    assert scores.active == ("activation", "taylor2")
    assert scores.settings["why"] == (
        "The data has no labels: removal by activation, protection by taylor2"
        " (cross_entropy of drawn labels)."
    )
    for form in ((x,), {"input": x}, {"image": x, "text": ["a"] * 12}, x.numpy(), [x]):
        same(fp.score(model, [form]), scores)


def test_labels_are_drawn_from_the_softmax_by_the_seed() -> None:
    model, batches = mlp(), list(inputs().split(6))
    scores = fp.score(model, batches, seed=3)
    drawn = torch.rand(256, 1, generator=torch.Generator().manual_seed(3))  # of the first 256 samples
    labels = [
        torch.searchsorted(model(x).softmax(1).cumsum(1), part).squeeze(1)
        for x, part in zip(batches, drawn[: sum(map(len, batches))].split(6), strict=True)
    ]
    labelled = list(zip(batches, labels, strict=True))
    same(scores, fp.score(model, labelled, removal="activation", protection="taylor2"))
    assert not np.array_equal(fp.score(model, batches, seed=4).protection["0"], scores.protection["0"])


def test_outputs_that_are_no_logits_count_by_their_squared_norm() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(6)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            out = self.body(x)
            return {"low": out[:, :2], "high": out[:, 2:]}

    model, x = Two(), inputs()
    scores = fp.score(model, [x])
    assert scores.active == ("activation", "taylor")
    assert scores.settings["loss"] == "squared norm of the output"

    def loss(output: dict[str, Tensor], labels: None) -> Tensor:
        return sum(part.square().sum() for part in output.values()) / (2 * len(output["low"]))

    same(scores, fp.score(model, [x], loss=loss, removal="activation", protection="taylor"))


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.body(left + right)


def test_what_forward_requires_is_an_input_and_what_is_left_the_label() -> None:
    model, left, right, labels = Sum(), inputs(), inputs().flip(0), torch.arange(12) % 3
    expected = fp.score(model, [((left, right), labels)])
    assert expected.active == ("wasserstein", "taylor")
    same(fp.score(model, [(left, right, labels)]), expected)
    same(fp.score(model, [[left.numpy(), right.numpy(), labels.numpy()]]), expected)
    same(fp.score(model, [{"left": left, "right": right, "target": labels}]), expected)
    unlabelled = fp.score(model, [(left, right)])
    assert unlabelled.active == ("activation", "taylor2")
    same(fp.score(model, [{"left": left, "right": right}]), unlabelled)


def test_numpy_batches_take_the_dtype_of_the_model() -> None:
    (batch,) = read_batches([(inputs().numpy(), np.arange(12) % 3)], CPU, mlp().float())
    assert batch.inputs.dtype == torch.float32
    assert batch.labels.dtype == torch.int64


def test_the_default_loss_needs_labels_outside_of_scoring() -> None:
    (batch,) = read_batches([inputs()], CPU)
    with pytest.raises(fp.FairprunerError, match="Batch 0 has no labels, and the loss needs some"):
        mean_loss(None, mlp()(inputs()), batch)


def test_the_whole_way_without_labels() -> None:
    model, data = mlp(), list(inputs(96).split(24))
    small, plan = fp.prune(model, data, keep=fp.Budget("units", 0.5))
    assert plan.predicted["units"] == 4
    repaired = fp.repair(fp.cut(model, plan), model, plan, data)
    with torch.no_grad():
        errors = [(net(data[0]) - model(data[0])).square().sum() for net in (fp.cut(model, plan), repaired)]
    assert errors[1] < errors[0]
    assert small(data[0]).shape == model(data[0]).shape


def test_heads_of_stock_attention_are_observed() -> None:
    """The stock function hides what the output projection reads, so it is computed in the open."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True).double().eval()
    model = nn.Sequential(layer, nn.Linear(16, 3).double())
    data = [torch.randn(6, 5, 16, dtype=torch.float64) for _ in range(2)]
    scores = fp.score(model, data, loss=lambda output, labels: output.square().mean())
    assert type(layer.self_attn) is nn.MultiheadAttention
    q, k, v = F.linear(torch.cat(data), layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias).chunk(
        3, -1
    )
    q, k, v = (t.unflatten(2, (4, 4)).transpose(1, 2) for t in (q, k, v))
    heads = F.scaled_dot_product_attention(q, k, v).abs().mean((0, 2, 3))
    np.testing.assert_allclose(scores.removal["0.self_attn"], heads.detach(), rtol=1e-9)


# Segmentation


def segmenter(size: int = 1) -> nn.Module:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(2, 6, 1), nn.ReLU(), nn.Conv2d(6, 3, size, stride=size))
    return body.double()


def maps(count: int = 4, side: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(count, 2, side, side, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 3, (count, side, side), generator=generator)
    labels[:, 0] = 255  # unlabelled
    labels[0, 1, 1] = -100
    return images, labels


def test_a_pixel_is_a_sample() -> None:
    model, (images, labels) = segmenter(), maps()
    scores = fp.score(model, [(images, labels)])
    assert scores.active == ("wasserstein", "taylor")
    assert "each pixel is a sample" in scores.settings["why"]
    hidden = model[1](model[0](images)).detach().movedim(1, -1)  # [N, H, W, J]
    counted = (labels >= 0) & (labels < 255)
    values, classes = hidden[counted].numpy(), labels[counted].numpy()
    expected = [
        max(wasserstein_distance(v[classes == a], v[classes == b]) for a, b in combinations(range(3), 2))
        for v in values.T
    ]
    np.testing.assert_allclose(scores.removal["0"], expected, rtol=1e-9)


def test_the_loss_is_the_mean_over_labelled_pixels() -> None:
    model, (images, labels) = segmenter(), maps()
    (batch,) = read_batches([(images, labels)], CPU)
    output = model(images)
    expected = F.cross_entropy(output, labels.masked_fill(labels == -100, 255), ignore_index=255)
    torch.testing.assert_close(mean_loss(None, output, batch), expected)
    torch.testing.assert_close(mean_loss(None, {"out": output, "aux": output}, batch), expected)
    labels[0, 3, 3] = 7
    with pytest.raises(
        fp.FairprunerError, match="has the label 7, expected class indices below the 3 logits"
    ):
        mean_loss(None, output, next(read_batches([(images, labels)], CPU)))


def test_coarse_logits_are_enlarged_and_tokens_are_pixels() -> None:
    class Tokens(nn.Module):
        """Patches as tokens, [N, T, C], and logits at half the size, as in Segformer."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = nn.Linear(2, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            tokens = x[:, :, ::2, ::2].flatten(2).transpose(1, 2)
            return self.down(self.up(tokens).relu()).transpose(1, 2).unflatten(2, (4, 4))

    model, (images, labels) = Tokens().double(), maps()
    scores = fp.score(model, [(images, labels)])
    hidden = model.up(images[:, :, ::2, ::2].movedim(1, -1)).relu().detach()
    own = labels[:, 1::2, 1::2]  # the nearest pixel to the centre of each patch
    counted = (own >= 0) & (own < 255)
    values, classes = hidden[counted].numpy(), own[counted].numpy()
    expected = [
        max(wasserstein_distance(v[classes == a], v[classes == b]) for a, b in combinations(range(3), 2))
        for v in values.T
    ]
    np.testing.assert_allclose(scores.removal["up"], expected, rtol=1e-9)


# Several labels, numbers, and the caller's word


@pytest.mark.parametrize(
    ("task", "labels", "loss"),
    [
        ("multilabel", lambda y: (y > 0).double(), F.binary_cross_entropy_with_logits),
        (
            "multilabel",
            lambda y: (y > 0).long(),
            lambda o, y: F.binary_cross_entropy_with_logits(o, y.double()),
        ),
        ("regression", lambda y: y, F.mse_loss),
        ("regression", lambda y: y.float(), lambda o, y: F.mse_loss(o, y.double())),
    ],
)
def test_several_labels_and_numbers(task: str, labels: Any, loss: Any) -> None:
    model, x = mlp(), inputs()
    data = [(x, labels(torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))))]
    scores = fp.score(model, data)
    assert scores.settings["task"] == task
    same(scores, fp.score(model, data, loss=loss, removal="activation", protection="taylor"))
    same(scores, fp.score(model, data, loss=task))


def test_one_number_for_each_sample() -> None:
    model, x, y = mlp(1), inputs(), torch.randn(12, dtype=torch.float64)
    same(fp.score(model, [(x, y)]), fp.score(model, [(x, y[:, None])], loss=F.mse_loss))


def test_a_named_task_overrides_what_labels_show() -> None:
    model, x, labels = mlp(), inputs(), torch.arange(12) % 3
    same(fp.score(model, [(x, labels)], loss="unlabelled"), fp.score(model, [x]))
    with pytest.raises(fp.FairprunerError, match=r"task 'regresion'.*regression"):
        fp.score(model, [x], loss="regresion")


@pytest.mark.parametrize("labels", [None, torch.randn(12, 3, dtype=torch.float64)])
def test_a_wrong_signal_is_named_with_an_example(labels: Tensor | None) -> None:
    with pytest.raises(
        fp.FairprunerError,
        match=r"Signal 'wasserstein' compares classes, and batch 0 has none.*removal='activation'",
    ):
        fp.score(mlp(), [inputs() if labels is None else (inputs(), labels)], removal="wasserstein")


# Detection


class Detector(nn.Module):
    """Images of several sizes in a list, losses in training mode and boxes otherwise, as in torchvision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(6, 4, 1)
        )
        self.box = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        features = self.body(
            torch.stack([F.adaptive_avg_pool2d(image, 8) for image in images])
        )  # [N, 4, 8, 8]
        if not self.training:
            return [{"boxes": box[None]} for box in self.box(features.mean((2, 3)))]
        assert targets is not None
        # So many proposals of each image, drawn at random, that their number is no multiple of the images.
        chosen = torch.randint(0, 64, (2 * len(images) + 1,))
        rows = features.flatten(2).movedim(1, -1).flatten(0, 1)[chosen]
        boxes = torch.stack([target["boxes"].mean(0) for target in targets])
        return {
            "box": (self.box(rows).mean(0) - boxes.mean(0)).square().mean(),
            "feature": features.square().mean(),
        }


def images(count: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(count)
    sizes = [(8 + i, 12) for i in range(count)]
    return (
        [torch.rand(3, *size, generator=generator) for size in sizes],
        [{"boxes": torch.rand(i + 1, 4, generator=generator)} for i in range(count)],
    )


def test_a_detector_is_scored_by_its_own_losses() -> None:
    model, data = Detector().train(), [images(3), images(2)]
    statistics = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    spaces = fp.discover(model, ([torch.rand(3, 8, 8)],))
    scores = fp.score(model, data, spaces=spaces)
    assert scores.active == ("activation", "taylor")
    assert scores.samples == 5
    assert scores.settings["loss"] == "the model's own losses"
    same(fp.score(model, data, spaces=spaces), scores)
    assert all(module.training for module in model.modules())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, statistics[name])


def test_the_loss_of_a_detector_is_the_sum_of_its_losses_with_norms_frozen() -> None:
    model, data = Detector().eval(), [images(4)]
    scores = fp.score(model, [data[0]] * 2, spaces=fp.discover(model, ([torch.rand(3, 8, 8)],)))
    for position in (0, 1):
        torch.manual_seed(position)
        model.eval()
        model.training = True
        sum(model(*data[0]).values()).backward()
    first, last = model.box[0], model.box[2]
    by_hand = (
        (first.weight * first.weight.grad).sum(1)
        + first.bias * first.bias.grad
        + (last.weight * last.weight.grad).sum(0)
    )
    np.testing.assert_allclose(scores.protection["box.0"], (by_hand / 2).abs().detach().numpy(), rtol=1e-4)


class UltralyticsDetector(nn.Module):
    """Called as the models of Ultralytics are: with images it predicts, with a dict it returns sums of losses
    over the images, and the same without gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: Any) -> Any:
        if not isinstance(x, dict):
            return self.head(self.body(x)).mean((2, 3))
        predicted = self.head(self.body(x["img"])).mean((2, 3))[x["batch_idx"].long()]  # a row for each box
        losses = torch.stack(
            [F.l1_loss(predicted[:, :4], x["bboxes"]), predicted[:, 4].sub(x["cls"][:, 0]).square().mean()]
        )
        return losses * len(x["img"]), losses.detach()


def ultralytics_batch() -> dict[str, Any]:
    return {
        "img": torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8),
        "batch_idx": torch.tensor([0.0, 0.0, 2.0, 2.0]),  # the second image has no box
        "cls": torch.tensor([[0.0], [1.0], [2.0], [1.0]]),
        "bboxes": torch.rand(4, 4),
        "im_file": ["a.jpg", "b.jpg", "c.jpg"],
    }


def test_a_detector_of_ultralytics_is_scored_by_its_own_losses() -> None:
    model, item = UltralyticsDetector().eval(), ultralytics_batch()
    (batch,) = read_batches([item], CPU, model)
    assert batch.size == 3
    assert [len(boxes["cls"]) for boxes in batch.labels] == [2, 0, 2]
    torch.testing.assert_close(batch.inputs, item["img"] / 255)
    scores = fp.score(model, [item, item], removal="activation", protection="taylor")
    assert scores.settings["task"] == "detection"
    losses, _ = model({**item, "img": item["img"] / 255})
    (losses.sum() / 3).backward()
    conv, norm = model.body[0], model.body[1]
    by_hand = (
        (conv.weight * conv.weight.grad).sum((1, 2, 3))
        + (model.head.weight * model.head.weight.grad).sum((0, 2, 3))
        + sum(p * p.grad for p in (conv.bias, norm.weight, norm.bias))
    )
    np.testing.assert_allclose(scores.protection["body.0"], by_hand.abs().detach().numpy(), rtol=1e-4)


def test_batches_of_datasets_and_of_webdataset_are_read() -> None:
    datasets = pytest.importorskip("datasets")
    model, x, y = mlp(), inputs(), torch.arange(12) % 3
    expected = fp.score(model, [(x, y)])
    columns = {"x": x.tolist(), "label": y.tolist(), "name": ["a"] * 12}
    table = datasets.Dataset.from_dict(columns).with_format("torch", dtype=torch.float64)
    rows = [{**batch, "label": batch["label"].long()} for batch in table.iter(12)]
    same(fp.score(model, rows), expected)
    same(fp.score(model, [[x, y]]), expected)  # webdataset's batches are lists
    named = {"__key__": ["a"] * 12, "npy": x, "cls": y}
    for form in ((x, y, ["a"] * 12), (["a"] * 12, x, y), named):
        same(fp.score(model, [form]), expected)


def test_a_tensor_is_one_batch_and_single_samples_are_told_what_to_do() -> None:
    model, x = mlp(), inputs()
    same(fp.score(model, x), fp.score(model, [x]))
    convolution = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    single = torch.utils.data.TensorDataset(torch.randn(4, 3, 8, 8))
    with pytest.raises(fp.FairprunerError, match=r"wrap a dataset of single samples in torch\.utils\.data"):
        fp.score(convolution, single, spaces=fp.discover(convolution, torch.randn(1, 3, 8, 8)))


@pytest.mark.parametrize("task", ["segmentation", "multilabel", "regression", "language"])
def test_a_task_that_does_not_fit_the_labels_is_one_sentence(task: str) -> None:
    data = [(inputs(), torch.arange(12) % 3)]  # class indices
    with pytest.raises(fp.FairprunerError, match=r"batch 0 has labels int64\[\d+\], expected .* as loss="):
        fp.score(mlp(), data, loss=task, removal="l1")
