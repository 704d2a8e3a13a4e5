"""The models people have: found, cut right in float64, and costed exactly."""

from __future__ import annotations

import warnings

import pytest
import torch
from checks import check_cut, some_units, with_lively_weights
from torch import nn

import fairpruner as fp

# torchvision name -> (image size, spaces found, names left out besides the classifier)
TORCHVISION = {
    "vgg16_bn": (32, 15, 0),
    "alexnet": (80, 7, 0),
    "resnet18": (64, 12, 0),
    "resnet50": (64, 37, 0),
    "densenet121": (64, 120, 0),
    "resnext50_32x4d": (64, 21, 0),
    "regnet_y_400mf": (64, 38, 0),
    "mobilenet_v2": (64, 25, 0),
    "mobilenet_v3_small": (64, 27, 0),
    "efficientnet_b0": (64, 40, 0),
    "convnext_tiny": (64, 18, 4),
    "googlenet": (64, 57, 0),
    "inception_v3": (96, 94, 0),
    "shufflenet_v2_x0_5": (32, 18, 0),
}


def build(name: str) -> nn.Module:
    models = pytest.importorskip("torchvision.models")
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return getattr(models, name)(**options)


@pytest.mark.slow
@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision(name: str) -> None:
    size, count, others = TORCHVISION[name]
    model, example = with_lively_weights(build(name)), torch.randn(1, 3, size, size, dtype=torch.float64)
    spaces = fp.discover(model, example)
    assert len(spaces) == count
    if not name.startswith("shufflenet"):
        unused = [name for name, reason in spaces.left_out.items() if "does not use it" in reason]
        assert len(spaces.left_out) == 1 + others + len(unused)
        assert all(name.lower().startswith("aux") for name in unused)  # heads for training alone
    assert all(spaces.left_out.values())
    check_cut(model, example, spaces, some_units(spaces, 0.4, 0))


@pytest.mark.slow
def test_shufflenet_names_what_cannot_be_cut() -> None:
    spaces = fp.discover(build("shufflenet_v2_x0_5"), torch.randn(1, 3, 32, 32))
    assert {s.name for s in spaces} >= {"conv1.0", "conv5.0", "stage2.0.branch2.0"}
    assert any("cannot run" in reason for reason in spaces.left_out.values())


def test_resnet56_has_125_million_flops() -> None:
    from zoo import CifarResNet

    model, example = CifarResNet(9, "A"), torch.randn(1, 3, 32, 32)
    assert fp.count_flops(model, example) == 125_485_696
    assert fp.count_params(model) == 853_018


def test_positions_that_mvit_adds_in_place_do_not_lock_its_heads() -> None:
    video = pytest.importorskip("torchvision.models.video.mvit")
    block = {"kernel_q": [3, 3, 3], "kernel_kv": [3, 3, 3], "stride_q": [1, 1, 1], "stride_kv": [1, 2, 2]}
    sizes = {"num_heads": 2, "input_channels": 16, "output_channels": 16}
    net = video.MViT(
        spatial_size=(32, 32),
        temporal_size=4,
        block_setting=[video.MSBlockConfig(**sizes, **block) for _ in range(2)],
        residual_pool=True,
        residual_with_cls_embed=False,
        rel_pos_embed=True,
        proj_after_attn=True,
        num_classes=5,
    )
    model, example = with_lively_weights(net), torch.randn(1, 3, 4, 32, 32, dtype=torch.float64)
    spaces = fp.discover(model, example)
    assert [(space.kind, space.size) for space in spaces] == [("head", 2), ("hidden", 64)] * 2
    check_cut(model, example, spaces, some_units(spaces, 0.5, 0))
