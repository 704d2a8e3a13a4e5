"""Benchmarks without a shared folder: what torchvision downloads has the same form, and nets are trained."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from documents import ROOT
from PIL import Image

sys.path.insert(0, str(ROOT / "benchmarks"))
from harness.torchvision_shim import torchvision
from nets import imagenet_models, images, training
from nets.cifar_models import CifarResNet

WORDNET = (  # the folders of Imagenette
    *("n01440764", "n02102040", "n02979186", "n03000684", "n03028079"),
    *("n03394916", "n03417042", "n03425413", "n03445777", "n03888257"),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(images, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(training, "CACHE", tmp_path / "cache")
    images.cifar10.cache_clear()
    return tmp_path / "cache"


@pytest.mark.parametrize(("split", "count"), [("test", 30), ("train", 15_000), ("train10k", 10_000)])
def test_cifar10_is_downloaded_where_there_is_no_shared_folder(
    split: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Downloaded:
        def __init__(self, root: Path, *, train: bool, download: bool) -> None:
            assert download
            size = 15_000 if train else 30
            self.targets = [place % 10 for place in range(size)]
            self.data = np.arange(size, dtype=np.uint32).astype(np.uint8)[:, None, None, None]
            self.data = np.broadcast_to(self.data, (size, 32, 32, 3))

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Downloaded)
    x, y = images.cifar10(split, tmp_path / "nothing")
    assert x.shape == (count, 3, 32, 32)
    assert y.bincount().tolist() == [count // 10] * 10
    pixels = x[17] * images.STD + images.MEAN
    torch.testing.assert_close(pixels, torch.full_like(pixels, 17 / 255), atol=1e-6, rtol=0)


def test_imagenette_stands_in_for_imagenet(tmp_path: Path, cache: Path) -> None:
    for place, name in enumerate(WORDNET):
        folder = cache / "torchvision" / "imagenette2-320" / "train" / name
        folder.mkdir(parents=True)
        for number in range(101 if place == 3 else 2):
            size = (320 + number, 330) if place % 2 else (330, 320)
            Image.new("RGB", size, (10 * place, 0, 0)).save(folder / f"{number:03}.jpeg")
    x, y = images.imagenet_sample(tmp_path / "nothing")
    assert x.shape == (118, 3, 256, 256)  # at most 100 of a class
    assert y.unique().tolist() == list(images.IMAGENETTE)
    assert y.diff().ge(0).all()
    assert abs(float(x[-1, 0].float().mean()) - 90) < 3  # values from 0 to 255, red first


def test_downloaded_weights_read_pixels_as_the_shared_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build: Any = torchvision.models.resnet50
    torch.manual_seed(0)
    original = build().eval()

    def downloaded(*, weights: str) -> Any:
        assert weights == "IMAGENET1K_V1"
        model = build()
        model.load_state_dict(original.state_dict())
        return model

    monkeypatch.setattr(torchvision.models, "resnet50", downloaded)
    model = imagenet_models.resnet50(tmp_path / "nothing").double()
    original.double()
    pixels = torch.randint(0, 256, (1, 3, 64, 64)).double()
    with torch.no_grad():
        found = model(imagenet_models.pixels_of(pixels).double())
        expected = original((pixels - imagenet_models.MEAN) / 255 / images.STD)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # the weights were divided in float32


def test_a_resnet_without_shared_weights_is_trained_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some_images = torch.randn(100, 3, 32, 32), torch.arange(100) % 10
    monkeypatch.setattr(training, "cifar10", lambda split, shared: some_images)
    monkeypatch.setattr(training, "RESNET_EPOCHS", 1)
    model = training.resnet(20, tmp_path / "nothing")
    assert isinstance(model, CifarResNet)
    assert not model.training
    assert [path.name for path in cache.iterdir()] == ["resnet-20-train-50000-1.safetensors"]
    monkeypatch.setattr(training, "train", None)
    again = training.resnet(20, tmp_path / "nothing")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
