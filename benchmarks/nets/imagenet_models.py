"""ResNet-50 with ImageNet weights: the shared ones, or torchvision's where there are none."""

from __future__ import annotations

from pathlib import Path

import torch
from harness.torchvision_shim import torchvision
from nets.images import STD
from safetensors.torch import load_file
from torch import Tensor, nn

MEAN = torch.tensor((123.68, 116.779, 103.939)).view(3, 1, 1)  # of pixels from 0 to 255


def resnet50(shared: Path) -> nn.Module:
    """A trained ResNet-50, which reads pixels from 0 to 255 less their mean."""
    path = shared / "weights" / "imagenet_resnet50_fp16.safetensors"
    return _shared(path) if path.exists() else _downloaded()


def pixels_of(images: Tensor) -> Tensor:
    """What the model reads of images [N, 3, H, W] with values from 0 to 255."""
    return images.float() - MEAN


def _shared(path: Path) -> nn.Module:
    """These weights have strides on the first convolution of a block, and an epsilon of their own."""
    model = torchvision.models.resnet50()
    for stage in (model.layer2, model.layer3, model.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(path).items()}, strict=False)
    return model.eval()


def _downloaded() -> nn.Module:
    """The first convolution divides the pixels by their deviation."""
    model = torchvision.models.resnet50(weights="IMAGENET1K_V1").eval()
    with torch.no_grad():
        model.conv1.weight /= 255 * STD
    return model
