"""Parts of random networks: everything that the rules of discovery know about maps of channels.

A part is built from the width of its maps and a small number, which also chooses between its forms.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE = 6  # pixels of a side of every map; a part maps [batch, width, SIZE, SIZE] to the same shape


class Residual(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, inner, 3, padding=1),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class Concat(nn.Module):
    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, growth, 1), nn.Conv2d(width, growth, 3, padding=1)
        self.join = nn.Conv2d(width + 2 * growth, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.elu(self.join(torch.cat([self.two(x), x, F.silu(self.one(x))], 1)))


class Gate(nn.Module):
    """Squeeze and excite."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3))))))[:, :, None, None]


class Halves(nn.Module):
    """Split, exchange, shift and join: every channel moves to another place."""

    def __init__(self, width: int, shift: int) -> None:
        super().__init__()
        self.shift, self.conv = shift, nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        one, two = x.tensor_split(2, 1)
        x = torch.cat([two.flip(1), one], 1)
        return F.relu(self.conv(torch.roll(x, self.shift, 3)))


class SplitTransform(nn.Module):
    """Four parts of the channels, each added to the last one's result, as in Res2Net."""

    def __init__(self, width: int, _: int) -> None:
        super().__init__()
        self.width = width // 4
        self.enter = nn.Conv2d(width, width, 1)
        self.convs = nn.ModuleList(nn.Conv2d(self.width, self.width, 3, padding=1) for _ in range(3))
        self.leave = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.split(self.enter(x), self.width, 1)
        done = [parts[0]]
        for conv, part in zip(self.convs, parts[1:], strict=True):
            done.append(F.relu(conv(part + done[-1])))
        return x + self.leave(torch.cat(done, 1))


class CrossStage(nn.Module):
    """Half of the channels pass through blocks, all stages are concatenated, as in YOLO's C2f."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(width, 2 * inner, 1), nn.Conv2d(4 * inner, width, 1)
        self.blocks = nn.ModuleList(nn.Conv2d(inner, inner, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        parts = list(F.silu(self.enter(x)).chunk(2, 1))
        for block in self.blocks:
            parts.append(parts[-1] + F.silu(block(parts[-1])))
        return self.leave(torch.cat(parts, 1))


class Gated(nn.Module):
    """A fused gate and value; `F.glu` for odd sizes."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(width, 2 * inner, 1), nn.Conv2d(inner, width, 1)
        self.fused = inner % 2 == 1

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return x + self.leave(F.glu(self.enter(x), 1))
        gate, value = self.enter(x).chunk(2, 1)
        return x + self.leave(F.gelu(gate) * value)


class TokenMixer(nn.Module):
    """An MLP over the pixels and one over the channels, in the layout channels last."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.over, self.back = nn.Linear(SIZE * SIZE, inner), nn.Linear(inner, SIZE * SIZE)
        self.up, self.down = nn.Linear(width, 2 * inner), nn.Linear(2 * inner, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.back(F.gelu(self.over(x.flatten(2)))).view_as(x)
        return (x.permute(0, 2, 3, 1) + self.down(F.mish(self.up(x.permute(0, 2, 3, 1))))).permute(0, 3, 1, 2)


class Twice(nn.Module):
    """One weight, used twice."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.conv, self.up, self.down = (
            nn.Conv2d(width, width, 3, padding=1),
            nn.Conv2d(width, inner, 1),
            nn.Conv2d(inner, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(F.leaky_relu(self.conv(x))))
        return self.down(self.up(x)) + self.down(self.up(x.flip(3)).abs())


class Tied(nn.Module):
    """One weight in both directions, as of a tied autoencoder."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inner, width))

    def forward(self, x: Tensor) -> Tensor:
        # Not by einsum, which computes a sum over a single kept unit by a product that no counter counts.
        code = F.linear(x.permute(0, 2, 3, 1), self.weight).relu()
        return x + (code @ self.weight).permute(0, 3, 1, 2)


class Scaled(nn.Module):
    """Buffers and parameters of the channels, as in a frozen norm and in LayerScale."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 1)
        self.register_buffer("scale", torch.rand(width) + 0.5)
        self.register_buffer("shift", torch.rand(1, width, 1, 1))
        self.gamma = nn.Parameter(torch.rand(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.reshape(1, -1, 1, 1) * (self.shift + 1).rsqrt()
        return self.gamma * F.relu(self.conv(x) * scale + self.shift)


class InPlace(nn.Module):
    """Results written over others, whole and in part."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.one, self.two, self.part = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1), size % 3

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        y += self.two(x)
        y.mul_(0.5).clamp_(min=-1)
        if self.part == 0:
            y[:, :, 1:3] = x[:, :, 2:4]
        elif self.part == 1:
            y[:, :, :, 0].zero_()
        else:
            canvas = torch.zeros_like(y)
            canvas[:, :, ::2] = y[:, :, ::2]
            y = canvas + x
        return y


class Shuffled(nn.Module):
    """Channels shuffled in groups, or sent where an index says."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.conv, self.fixed = nn.Conv2d(width, width, 1), size % 2 == 0
        self.register_buffer("order", torch.randperm(width))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        if self.fixed:
            return x[:, self.order]
        batch, width = x.shape[:2]
        return x.view(batch, 2, width // 2, SIZE, SIZE).transpose(1, 2).reshape(batch, width, SIZE, SIZE)


class Rearranged(nn.Module):
    """Pixels to channels and back, with a convolution between."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4 * width, 4 * width, 1, groups=(1, 2, 4)[size % 3])

    def forward(self, x: Tensor) -> Tensor:
        return x + F.pixel_shuffle(F.relu(self.conv(F.pixel_unshuffle(x, 2))), 2)


class Standardised(nn.Module):
    """A convolution whose weight is standardised in every forward, as in NFNet."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.conv, self.leave = nn.Conv2d(width, inner, 3, padding=1), nn.Conv2d(inner, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.conv.weight
        centred = weight - weight.mean((1, 2, 3), keepdim=True)
        weight = centred / (centred.pow(2).mean((1, 2, 3), keepdim=True) + 1e-3).sqrt()
        return self.leave(F.relu(F.conv2d(x, weight, self.conv.bias, padding=1)))


class Branches(nn.Module):
    """The larger of two branches where a third is positive."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, (1, 3), padding=(0, 1))
        self.three, self.back = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        third = self.back(F.hardswish(self.three(x)))
        return torch.where(third > 0, torch.maximum(self.one(x), self.two(x)), third * 0.1)


class Pyramid(nn.Module):
    """Down and up again, with the shortcut of a U-Net."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(width, inner, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(inner, inner, 2, stride=2)
        self.join = nn.Conv2d(width + 2 * inner, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        low = F.relu(self.down(x))
        return self.join(torch.cat([x, self.up(low), F.interpolate(low, scale_factor=2, mode="bilinear")], 1))


class Stacked(nn.Module):
    """Stacked, reduced, padded and cropped."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.stack([self.one(x), self.two(x).tanh()], 1).amax(1)
        return F.pad(both, (1, 2, 0, 1))[:, :, 1:, 2:-1].cumsum(2)


class Resized(nn.Module):
    """Padded by reflection or copies, pooled, and made large again in one of several ways."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.conv, self.form = nn.Conv2d(width, width, 3), size % 4

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(F.pad(x, (1, 1, 1, 1), mode="reflect" if self.form % 2 else "replicate"))
        low = F.adaptive_max_pool2d(x, 3) if self.form < 2 else F.max_pool2d(x, 2)
        mode = ("nearest", "bicubic", "bilinear", "nearest")[self.form]
        return F.relu(x) + F.interpolate(low, size=(SIZE, SIZE), mode=mode)


class OtherDimensions(nn.Module):
    """Convolutions over one dimension of all pixels, or over three."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.flat = size % 2 == 0
        self.conv = (
            nn.Conv1d(width, size, 3, padding=1) if self.flat else nn.Conv3d(width, size, 3, padding=1)
        )
        self.norm = nn.BatchNorm1d(size) if self.flat else nn.BatchNorm3d(size)
        self.leave = nn.Conv2d(size, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.flat:
            y = F.avg_pool1d(F.gelu(self.norm(self.conv(x.flatten(2)))), 3, 1, 1)
        else:
            y = F.max_pool3d(self.norm(self.conv(x.unsqueeze(2))), (1, 3, 3), 1, (0, 1, 1))
        return self.leave(y.reshape(x.shape[0], -1, SIZE, SIZE))


class Softmaxed(nn.Module):
    """A softmax over the channels, or over the pixels of each."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.conv, self.channels = nn.Conv2d(width, width, 1), size % 2 == 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return x * y.softmax(1) if self.channels else x + y.flatten(2).softmax(2).view_as(x)


class Condensed(nn.Module):
    """Every channel by a statistic of its pixels: deviation, norm, logsumexp or the smallest."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.enter, self.leave, self.form = nn.Linear(width, size), nn.Linear(size, width), size % 4

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(2)
        found = (
            flat.var(2),
            torch.linalg.vector_norm(flat, dim=2),
            flat.logsumexp(2),
            flat.amin(2),
        )[self.form]
        return (
            x + self.leave(F.dropout(F.softsign(self.enter(found)), training=self.training))[..., None, None]
        )


class Dispatched(nn.Module):
    """Rows of pixels taken out, transformed and added back where they were."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, size), nn.Linear(size, width)
        self.gathers = size % 2 == 0
        self.register_buffer("rows", torch.randperm(2 * SIZE * SIZE)[: SIZE * SIZE])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
        chosen = rows[self.rows]
        if self.gathers:
            chosen = rows.gather(0, self.rows[:, None].expand(-1, rows.shape[1]))
        added = torch.zeros_like(rows).index_add_(0, self.rows, self.down(F.relu(self.up(chosen))))
        return x + added.reshape(x.shape[0], SIZE, SIZE, -1).permute(0, 3, 1, 2)


class Sampled(nn.Module):
    """Pixels read between pixels, at places that the channels themselves choose or that are fixed."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.conv, self.leave = nn.Conv2d(width, size, 1), nn.Conv2d(size, width, 1)
        self.offset = nn.Conv2d(width, 2, 1) if size % 2 else None
        steps = torch.linspace(-1, 1, SIZE)
        self.register_buffer("grid", torch.stack(torch.meshgrid(steps, steps, indexing="xy"), -1))

    def forward(self, x: Tensor) -> Tensor:
        grid = self.grid.to(x.dtype).expand(x.shape[0], -1, -1, -1)
        if self.offset is not None:
            grid = grid + 0.3 * self.offset(x).tanh().permute(0, 2, 3, 1)
        return x + self.leave(F.grid_sample(self.conv(x).relu(), 0.9 * grid, align_corners=False))


class Messages(nn.Module):
    """Pixels as nodes of a graph: each sums or maximises what its neighbours send."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.send, self.receive = nn.Linear(2 * width, size), nn.Linear(size, width)
        self.largest = size % 3 == 0
        self.register_buffer("edges", torch.randint(SIZE * SIZE, (2, 60)))

    def forward(self, x: Tensor) -> Tensor:
        nodes = x.flatten(2).transpose(1, 2)  # [batch, pixels, width]
        source, target = self.edges
        sent = F.relu(self.send(torch.cat([nodes[:, source], nodes[:, target]], 2)))
        where = target[None, :, None].expand_as(sent)
        zeros = sent.new_zeros(*nodes.shape[:2], sent.shape[2])
        if self.largest:
            found = zeros.scatter_reduce(1, where, sent, "amax")
        else:
            found = zeros.scatter_add(1, where, sent)
        return x + self.receive(found).transpose(1, 2).view_as(x)


class Assembled(nn.Module):
    """Results written into the slices of one tensor, instead of a concatenation."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, size, 1), nn.Conv2d(width, size + 1, 3, padding=1)
        self.leave = nn.Conv2d(2 * size + 1, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.one(x), self.two(x)
        split = one.shape[1]
        both = x.new_empty(x.shape[0], split + two.shape[1], SIZE, SIZE)
        both[:, :split], both[:, split:] = one, two.sigmoid()
        return self.leave(both)


def _line(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules)


MAP_PARTS: dict[str, Callable[[int, int], nn.Module]] = {
    "residual": Residual,
    "concat": Concat,
    "gate": Gate,
    "halves": Halves,
    "split_transform": SplitTransform,
    "cross_stage": CrossStage,
    "gated": Gated,
    "token_mixer": TokenMixer,
    "twice": Twice,
    "tied": Tied,
    "scaled": Scaled,
    "in_place": InPlace,
    "shuffled": Shuffled,
    "rearranged": Rearranged,
    "standardised": Standardised,
    "branches": Branches,
    "pyramid": Pyramid,
    "stacked": Stacked,
    "resized": Resized,
    "other_dimensions": OtherDimensions,
    "softmaxed": Softmaxed,
    "condensed": Condensed,
    "dispatched": Dispatched,
    "sampled": Sampled,
    "messages": Messages,
    "assembled": Assembled,
    "channel_shuffle": lambda width, _: _line(
        nn.Conv2d(width, width, 1), nn.ChannelShuffle(2), nn.Hardtanh()
    ),
    "conv": lambda width, size: _line(
        nn.Conv2d(width, size, 3, padding=1), nn.BatchNorm2d(size), nn.ReLU(), nn.Conv2d(size, width, 1)
    ),
    "depthwise": lambda width, _: _line(nn.Conv2d(width, width, 3, padding=1, groups=width), nn.PReLU(width)),
    "multiplier": lambda width, _: _line(
        nn.Conv2d(width, 2 * width, 3, padding=1, groups=width), nn.ReLU6(), nn.Conv2d(2 * width, width, 1)
    ),
    "wide_groups": lambda width, _: _line(nn.Conv2d(width, width, 3, padding=1, groups=2), nn.LeakyReLU()),
    "narrow_groups": lambda width, _: _line(
        nn.Conv2d(width, width, 1, groups=width // 2), nn.BatchNorm2d(width)
    ),
    "group_norm": lambda width, _: nn.GroupNorm(width // 4, width),
    "instance_norm": lambda width, _: nn.InstanceNorm2d(width, affine=True),
    "layer_norm": lambda width, _: nn.LayerNorm([width, SIZE, SIZE]),
    "pool": lambda *_: nn.AvgPool2d(3, 1, 1),
    "max_pool": lambda *_: nn.MaxPool2d(3, 1, 1),
    "deconv": lambda width, size: _line(
        nn.ConvTranspose2d(width, size, 3, padding=1), nn.ReLU(), nn.Conv2d(size, width, 1)
    ),
    "grouped_deconv": lambda width, _: _line(
        nn.ConvTranspose2d(width, width, 3, padding=1, groups=2), nn.Softplus()
    ),
}
