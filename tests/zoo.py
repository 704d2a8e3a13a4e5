"""Small networks, one for each topology that pruning has to get right. Random weights, no downloads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def conv_bn(inputs: int, outputs: int, kernel: int = 3, **options: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False, **options),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


# ── CIFAR residual networks ─────────────────────────────────────────────────────────────────────


class CifarBlock(nn.Module):
    """Two 3x3 convolutions; where the width changes, a shortcut that pads (option A) or projects (option
    B).
    """

    def __init__(self, inputs: int, width: int, stride: int, option: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.pad = (width - inputs) // 2 if stride != 1 and option == "A" else 0
        self.project = (
            nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))
            if stride != 1 and option == "B"
            else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad)) if self.pad else self.project(x)
        return F.relu(out + shortcut)


class CifarResNet(nn.Module):
    """He et al.'s network for 32x32 images: depth 6n + 2."""

    def __init__(
        self, blocks: int = 9, option: str = "A", widths: tuple[int, int, int] = (16, 32, 64)
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        inputs = widths[0]
        for stage, width in enumerate(widths, start=1):
            layers = []
            for block in range(blocks):
                layers.append(CifarBlock(inputs, width, 2 if stage > 1 and block == 0 else 1, option))
                inputs = width
            setattr(self, f"layer{stage}", nn.Sequential(*layers))
        self.linear = nn.Linear(widths[2], 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))


# ── CIFAR dense networks ────────────────────────────────────────────────────────────────────────


class DenseLayer(nn.Module):
    def __init__(self, inputs: int, growth: int, bottleneck: bool) -> None:
        super().__init__()
        middle = 4 * growth if bottleneck else inputs
        self.squeeze = (
            nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, middle, 1, bias=False))
            if bottleneck
            else nn.Identity()
        )
        self.grow = nn.Sequential(
            nn.BatchNorm2d(middle), nn.ReLU(), nn.Conv2d(middle, growth, 3, padding=1, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.grow(self.squeeze(x))], 1)


class CifarDenseNet(nn.Module):
    """DenseNet-40 with growth 12: three dense blocks with transitions between them, plain or BC."""

    def __init__(self, growth: int = 12, per_block: int = 12, bottleneck: bool = False) -> None:
        super().__init__()
        width = 2 * growth
        parts: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False)]
        for block in range(3):
            for _ in range(per_block // 2 if bottleneck else per_block):
                parts.append(DenseLayer(width, growth, bottleneck))
                width += growth
            if block < 2:
                after = width // 2 if bottleneck else width
                parts += [
                    nn.BatchNorm2d(width),
                    nn.ReLU(),
                    nn.Conv2d(width, after, 1, bias=False),
                    nn.AvgPool2d(2),
                ]
                width = after
        self.features = nn.Sequential(
            *parts, nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.classifier = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))


# ── the rest, small ─────────────────────────────────────────────────────────────────────────────


class UNet(nn.Module):
    """Skip concatenation, transposed convolutions, GroupNorm."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, padding=1),
                nn.GroupNorm(4, outputs),
                nn.SiLU(),
                nn.Conv2d(outputs, outputs, 3, padding=1),
                nn.ReLU(),
            )

        self.down1, self.down2, self.bottom = (
            block(3, width),
            block(width, 2 * width),
            block(2 * width, 4 * width),
        )
        self.up2, self.up1 = (
            nn.ConvTranspose2d(4 * width, 2 * width, 2, 2),
            nn.ConvTranspose2d(2 * width, width, 2, 2),
        )
        self.join2, self.join1 = block(4 * width, 2 * width), block(2 * width, width)
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.bottom(F.max_pool2d(second, 2))
        x = self.join2(torch.cat([second, self.up2(x)], 1))
        return self.out(self.join1(torch.cat([first, self.up1(x)], 1)))


class SqueezeExcite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.expand(F.relu(self.reduce(x.mean((2, 3), keepdim=True)))))


class Functional(nn.Module):
    """Weights held as bare parameters and used through functional calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bias = nn.Parameter(torch.randn(12, 3, 3, 3)), nn.Parameter(torch.randn(12))
        self.second = nn.Parameter(torch.randn(8, 12, 3, 3))
        self.head = nn.Parameter(torch.randn(8, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.leaky_relu(F.conv2d(x, self.first, self.bias, padding=1))
        x = F.elu(F.conv2d(x, self.second, padding=1))
        return x.amax((2, 3)) @ self.head


class Shared(nn.Module):
    """One convolution called three times on its own output, and a norm used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.norm = (
            nn.Conv2d(3, 10, 3, padding=1),
            nn.Conv2d(10, 10, 3, padding=1),
            nn.BatchNorm2d(10),
        )
        self.head = nn.Linear(10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x))
        for _ in range(3):
            x = x + torch.relu(self.norm(self.body(x)))
        return self.head(x.mean((2, 3)))


class SplitConcat(nn.Module):
    """A C2f-like block: chunk, work on one half, concatenate all; then flatten into a linear map."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.enter, self.inner, self.leave = (
            conv_bn(3, width, 1),
            conv_bn(width // 2, width // 2),
            conv_bn(3 * width // 2, width, 1),
        )
        self.head = nn.Linear(width * 16, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.enter(x).tensor_split(2, 1)
        x = self.leave(torch.cat([one, two, self.inner(two)], 1))
        return self.head(F.adaptive_avg_pool2d(x, 4).flatten(1))


class Shuffle(nn.Module):
    """Grouped convolutions with a channel shuffle between them."""

    def __init__(self, width: int = 16, groups: int = 4) -> None:
        super().__init__()
        self.groups = groups
        self.one, self.two = (
            nn.Conv2d(3, width, 3, padding=1),
            nn.Conv2d(width, width, 3, padding=1, groups=groups),
        )
        self.three, self.head = nn.Conv2d(width, 8, 1), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.one(x))
        n, c, h, w = x.shape
        x = x.view(n, self.groups, c // self.groups, h, w).transpose(1, 2).reshape(n, c, h, w)
        return self.head(F.relu(self.three(F.relu(self.two(x)))).mean((2, 3)))


class TwoInputs(nn.Module):
    """Two inputs, optional keyword, control flow on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(6, 9), nn.Linear(4, 9), nn.Linear(9, 3)

    def forward(self, left: torch.Tensor, right: torch.Tensor, flip: bool = False) -> dict[str, torch.Tensor]:
        x = self.left(left) + self.right(right) if float(left.sum()) > -1e9 else self.left(left)
        return {"logits": self.head(torch.relu(-x if flip else x))}


class FixedSize(nn.Module):
    """Its code holds the width as a number: it can be traced, but not cut."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(5, 12), nn.Linear(12, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.one(x)).view(-1, 12)
        return self.three(torch.relu(self.two(x)))


class PixelShuffler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (
            nn.Conv2d(3, 16, 3, padding=1),
            nn.Conv2d(4, 6, 3, padding=1),
            nn.Conv2d(6, 3, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(F.relu(self.two(F.pixel_shuffle(F.relu(self.one(x)), 2))))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3))


def conv_flatten() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 10),
        nn.ReLU(),
        nn.Linear(10, 4),
    )


def conv1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 8, 5),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(8, 10, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(10, 2),
    )


def conv3d() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 8, 3),
        nn.BatchNorm3d(8),
        nn.ReLU(),
        nn.MaxPool3d(2),
        nn.Conv3d(8, 6, 2),
        nn.ReLU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(6, 2),
    )


def prelu_instance_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.InstanceNorm2d(8, affine=True),
        nn.PReLU(8),
        nn.Conv2d(8, 6, 3, padding=1),
        nn.InstanceNorm2d(6),
        nn.PReLU(),
        nn.Conv2d(6, 2, 1),
    )


def grouped() -> nn.Module:
    """Few wide groups, many narrow groups, depthwise with a multiplier, grouped transposed."""
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 20, 3, padding=1, groups=2), nn.ReLU(), nn.Conv2d(20, 24, 1), nn.ReLU(),
        nn.Conv2d(24, 48, 3, padding=1, groups=12), nn.BatchNorm2d(48), nn.ReLU(), nn.Conv2d(48, 8, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1, groups=8), nn.ReLU(),
        nn.ConvTranspose2d(16, 32, 2, 2, groups=8), nn.ReLU(), nn.ConvTranspose2d(32, 12, 2, 2, groups=2), nn.ReLU(), nn.Conv2d(12, 2, 1),
    )  # fmt: skip


class Unetr(nn.Module):
    """A transformer over patches whose layers feed a decoder of transposed convolutions, as in UNETR."""

    def __init__(self, width: int = 16, patch: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, patch)
        layer = nn.TransformerEncoderLayer
        self.layers = nn.ModuleList(
            layer(width, 4, 24, batch_first=True, norm_first=True, dropout=0) for _ in range(2)
        )
        self.skip = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.middle = nn.Sequential(nn.ConvTranspose2d(width, 8, 2, 2), nn.BatchNorm2d(8), nn.ReLU())
        self.deep = nn.ConvTranspose2d(width, 8, 2, 2)
        self.join = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(8, 6, 2, 2))
        self.head = nn.Sequential(nn.Conv2d(12, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patch(x)
        side, seen = tokens.shape[2], []
        tokens = tokens.flatten(2).mT
        for layer in self.layers:
            tokens = layer(tokens)
            seen.append(tokens.mT.unflatten(2, (side, side)))
        joined = self.join(torch.cat([self.middle(seen[0]), self.deep(seen[1])], 1))
        return self.head(torch.cat([self.skip(x), joined], 1))


def squeeze_excite() -> nn.Module:
    return nn.Sequential(
        conv_bn(3, 16),
        SqueezeExcite(16),
        conv_bn(16, 8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


IMAGE = (2, 3, 16, 16)
# name -> (builder, shape of the example)
SMALL = {
    "mlp": (mlp, (4, 8)),
    "conv_flatten": (conv_flatten, (2, 3, 8, 8)),
    "conv1d": (conv1d, (2, 3, 20)),
    "conv3d": (conv3d, (2, 2, 8, 8, 8)),
    "prelu_instance_norm": (prelu_instance_norm, IMAGE),
    "grouped": (grouped, IMAGE),
    "squeeze_excite": (squeeze_excite, IMAGE),
    "unet": (UNet, IMAGE),
    "unetr": (Unetr, IMAGE),
    "functional": (Functional, IMAGE),
    "shared": (Shared, IMAGE),
    "split_concat": (SplitConcat, IMAGE),
    "shuffle": (Shuffle, IMAGE),
    "pixel_shuffle": (PixelShuffler, IMAGE),
    "resnet8_a": (lambda: CifarResNet(1, "A"), (2, 3, 32, 32)),
    "resnet8_b": (lambda: CifarResNet(1, "B"), (2, 3, 32, 32)),
    "resnet56_a": (lambda: CifarResNet(9, "A"), (1, 3, 32, 32)),
    "resnet56_b": (lambda: CifarResNet(9, "B"), (1, 3, 32, 32)),
    "densenet40": (CifarDenseNet, (1, 3, 32, 32)),
    "densenet40_bc": (lambda: CifarDenseNet(bottleneck=True), (1, 3, 32, 32)),
}
