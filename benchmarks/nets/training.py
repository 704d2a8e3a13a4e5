"""Nets for CIFAR-10: with the shared weights, or trained here and kept in the cache of the user."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import harness.torchvision_shim  # noqa: F401 (timm imports torchvision)
import torch
from nets.cifar_models import CifarResNet
from nets.images import CACHE, cifar10
from safetensors.torch import load_file, load_model, save_model
from torch import Tensor, nn
from torch.nn import functional as F

VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)  # 0 is a pooling
RESNET_EPOCHS = 30  # without shared weights


def vgg16_bn() -> nn.Module:
    """VGG-16 with batch norm and one linear layer, as is usual for 32x32 images."""
    layers: list[nn.Module] = []
    channels = 3
    for width in VGG16:
        if width:
            convolution = nn.Conv2d(channels, width, 3, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def alexnet() -> nn.Module:
    """AlexNet for 32x32 images: five convolutions and three linear layers, without norms."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 192, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


class DenseLayer(nn.Module):
    """A convolution whose channels are joined to its input."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)


def densenet40() -> nn.Module:
    """DenseNet-40 with growth 12: three blocks of 12 layers."""
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 3, padding=1, bias=False)]
    width = 24
    for block in range(3):
        layers += [DenseLayer(width + 12 * number, 12) for number in range(12)]
        width += 144
        if block < 2:
            layers += [
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 1, bias=False),
                nn.AvgPool2d(2),
            ]
    end = [nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    return nn.Sequential(*layers, *end)


class InvertedResidual(nn.Module):
    """Widen, filter each channel, narrow; added to the input where the shapes allow."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inputs
        self.layers = nn.Sequential(
            *(nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()),
            *(nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()),
            *(nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.added = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return x + out if self.added else out


def mobilenet() -> nn.Module:
    """A MobileNetV2 for 32x32 images: 7 inverted residuals of 16 to 64 channels."""
    shapes = [(16, 24, 1), (24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 40, 1), (40, 64, 2), (64, 64, 1)]
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6()),
        *(InvertedResidual(*shape) for shape in shapes),
        *(nn.Conv2d(64, 160, 1, bias=False), nn.BatchNorm2d(160), nn.ReLU6()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(160, 10)),
    )


def convnext() -> nn.Module:
    """A ConvNeXt for 32x32 images: blocks of 40 to 160 channels."""
    from timm.models.convnext import ConvNeXt

    return ConvNeXt(num_classes=10, depths=(2, 2, 4, 2), dims=(40, 80, 120, 160), patch_size=2)


def deit() -> nn.Module:
    """A DeiT for 32x32 images: 64 patches, 6 blocks of 4 heads and 128 features."""
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(img_size=32, patch_size=4, embed_dim=128, depth=6, num_heads=4, num_classes=10)


NETS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-20": partial(CifarResNet, 20),
    "ResNet-56": partial(CifarResNet, 56),
    "VGG-16-BN": vgg16_bn,
    "AlexNet": alexnet,
    "DenseNet-40": densenet40,
    "MobileNet": mobilenet,
    "ConvNeXt": convnext,
    "DeiT": deit,
}


def train(
    net: nn.Module, images: tuple[Tensor, Tensor], epochs: int, *, rate: float = 2e-3, seed: int = 0
) -> None:
    """Train in place: AdamW, one cycle, crops and mirror images, batches of 100, products in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    steps = epochs * -(-len(images[1]) // 100)
    optimizer = torch.optim.AdamW(net.parameters(), rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    net.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(images[1]), generator=generator).split(100):
            x, y = images[0][chosen], images[1][chosen]
            mirrored = torch.rand(len(x), 1, 1, 1, generator=generator) < 0.5
            left, top = torch.randint(0, 9, (2,), generator=generator).tolist()
            x = F.pad(torch.where(mirrored, x.flip(3), x), (4, 4, 4, 4))[
                ..., top : top + 32, left : left + 32
            ]
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    net.eval()


def trained(name: str, split: str, count: int, epochs: int, shared: Path) -> nn.Module:
    """A net after so many epochs on the first images of a split, from the cache if it is there."""
    torch.manual_seed(0)
    net, path = NETS[name](), CACHE / f"{name.lower()}-{split}-{count}-{epochs}.safetensors"
    if path.exists():
        load_model(net, path)
        return net.eval()
    images, labels = cifar10(split, shared)
    train(net, (images[:count], labels[:count]), epochs)
    CACHE.mkdir(parents=True, exist_ok=True)
    save_model(net, path)
    return net


def resnet(depth: int, shared: Path) -> nn.Module:
    """ResNet-20 or ResNet-56 with the shared weights, or trained here where there are none."""
    path = shared / "weights" / f"cifar10_resnet{depth}.safetensors"
    if not path.exists():
        return trained(f"ResNet-{depth}", "train", 50_000, RESNET_EPOCHS, shared)
    model = CifarResNet(depth)
    model.load_state_dict(load_file(path))
    return model.eval()
