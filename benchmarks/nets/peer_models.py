"""Small and common models with random weights, by name: what `peers.py` cuts with each library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from harness.torchvision_shim import torchvision
from nets.cifar_models import CifarResNet
from torch import Tensor, nn

Case = tuple[nn.Module, Any]  # a model, and an example of its input


def _vision(name: str, pixels: int = 64) -> Callable[[], Case]:
    def build() -> Case:
        model = torchvision.models.get_model(name, weights=None)
        return model, torch.randn(2, 3, pixels, pixels)

    return build


def _net(build: Callable[[], nn.Module]) -> Callable[[], Case]:
    return lambda: (build(), torch.randn(2, 3, 16, 16))


class SplitJoin(nn.Module):
    """Half of the channels go through a convolution, then both halves are joined (YOLO's C2f)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Conv2d(3, 16, 3, 1, 1), nn.Conv2d(8, 8, 3, 1, 1)
        self.last, self.head = nn.Conv2d(24, 16, 1), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        left, right = F.silu(self.first(x)).chunk(2, 1)
        x = F.silu(self.last(torch.cat([left, right, F.silu(self.inner(right))], 1)))
        return self.head(x.mean((2, 3)))


class ChannelShuffle(nn.Module):
    """A grouped convolution, its channels shuffled between the groups, and another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixed = nn.Conv2d(3, 16, 3, 1, 1), nn.Conv2d(16, 16, 1, groups=2)
        self.last, self.head = nn.Conv2d(16, 16, 3, 1, 1), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.mixed(F.relu(self.first(x))))
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        return self.head(F.relu(self.last(x)).mean((2, 3)))


class Upscaling(nn.Module):
    """A convolution whose channels become pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.last = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 32, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(F.pixel_shuffle(self.wide(F.relu(self.first(x))), 2)))


class Functional(nn.Module):
    """A convolution that is called as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Conv2d(3, 16, 3, 1, 1), nn.Parameter(torch.randn(8, 16, 3, 3) / 12)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(F.conv2d(F.relu(self.first(x)), self.weight, padding=1)).mean((2, 3)))


class Recurrent(nn.Module):
    """Convolutions whose columns are read by an LSTM, as in text recognition."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.memory = nn.Conv2d(3, 8, 3, 1, 1), nn.LSTM(8, 12, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        columns = F.relu(self.first(x)).mean(2).transpose(1, 2)
        return self.head(self.memory(columns)[0][:, -1])


def _language(kind: str) -> Callable[[], Case]:
    def build() -> Case:
        import transformers

        shared = {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        own = {
            "Llama": {},
            "Qwen2Moe": {
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 16,
            },
        }[kind]
        config = getattr(transformers, f"{kind}Config")(**shared, **own)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        model.set_experts_implementation("eager")  # the fused product of experts has no float64
        return model, torch.arange(24).reshape(2, 12)

    return build


MODELS: dict[str, Callable[[], Case]] = {
    "VGG16-BN": _vision("vgg16_bn"),
    "ResNet-50": _vision("resnet50"),
    "DenseNet-121": _vision("densenet121"),
    "MobileNetV2": _vision("mobilenet_v2"),
    "EfficientNet-B0": _vision("efficientnet_b0"),
    "ResNeXt-50": _vision("resnext50_32x4d"),
    "RegNetY-400MF": _vision("regnet_y_400mf"),
    "ShuffleNetV2": _vision("shufflenet_v2_x0_5"),
    "ConvNeXt-T": _vision("convnext_tiny"),
    "ViT-B/16": _vision("vit_b_16", 224),
    "CIFAR ResNet-56, option A": lambda: (CifarResNet(56), torch.randn(2, 3, 32, 32)),
    "chunk and concatenation (C2f)": _net(SplitJoin),
    "channel shuffle": _net(ChannelShuffle),
    "PixelShuffle": _net(Upscaling),
    "functional convolution": _net(Functional),
    "convolution and LSTM": _net(Recurrent),
    "Llama": _language("Llama"),
    "Qwen2-MoE": _language("Qwen2Moe"),
}


def build(name: str) -> Case:
    """A model in eval mode and float64, with its example; the weights depend on nothing but the name.

    Norms get weights and statistics as a trained model has them: with fresh ones, zero and removed channels
    can look alike.
    """
    torch.manual_seed(0)
    model, example = MODELS[name]()
    model = model.double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model, example.double() if example.is_floating_point() else example
