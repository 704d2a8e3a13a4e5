"""Networks nobody designed: random graphs of everything that the rules of discovery know.

`random_network(seed)` is one network with its example; `check_network(seed)` holds it to all that is
promised of a cut.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from checks import check_cut, outputs, some_units, with_lively_weights
from torch import Tensor, nn

import fairpruner as fp

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


class Attention(nn.Module):
    """Heads of width `size` over the pixels, by the fused kernel or by hand."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.query, self.keyvalue = nn.Linear(width, 3 * size), nn.Linear(width, 6 * size)
        self.leave = nn.Linear(3 * size, width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        batch, length, _ = tokens.shape
        query = self.query(tokens).view(batch, length, -1, self.size).transpose(1, 2)
        key, value = self.keyvalue(tokens).view(batch, length, 2, -1, self.size).permute(2, 0, 3, 1, 4)
        if self.size % 2:
            mixed = F.scaled_dot_product_attention(query, key, value)
        else:
            mixed = (query @ key.transpose(2, 3) / self.size**0.5).softmax(-1) @ value
        mixed = self.leave(mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + mixed.transpose(1, 2).reshape(x.shape)


class NamedHeads(nn.Module):
    """The count of heads stands in an attribute with a name of its own."""

    def __init__(self, width: int, _: int) -> None:
        super().__init__()
        self.how_many, self.per = 4, width // 4
        self.qkv, self.leave = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        batch, length, _ = tokens.shape
        q, k, v = (
            part.view(batch, length, self.how_many, self.per).transpose(1, 2)
            for part in self.qkv(tokens).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        mixed = self.leave(mixed.reshape(batch, length, self.how_many * self.per))
        return x + mixed.transpose(1, 2).reshape(x.shape)


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


def _line(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules)


PARTS: dict[str, Callable[[int, int], nn.Module]] = {
    "residual": Residual,
    "concat": Concat,
    "gate": Gate,
    "halves": Halves,
    "split_transform": SplitTransform,
    "cross_stage": CrossStage,
    "gated": Gated,
    "attention": Attention,
    "named_heads": NamedHeads,
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
JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "last": lambda new, _: new,
    "sum": torch.add,
    "product": lambda new, old: new * torch.sigmoid(old),
    "difference": lambda new, old: new - 0.5 * old,
}
ENDS = ("pool", "flatten", "both", "pair")


class Net(nn.Module):
    """A graph of parts: each takes the last map, and its result is joined with some earlier map.

    Inputs are one or two images [batch, 3, SIZE, SIZE]; outputs are logits, or a dict that holds more.
    """

    def __init__(self, width: int, parts: list[tuple[str, int, str, int]], end: str, inputs: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.side = nn.Conv2d(3, width, 1) if inputs == 2 else None
        self.parts = nn.ModuleList(PARTS[name](width, size) for name, size, *_ in parts)
        self.joins = [(join, back) for _, _, join, back in parts]
        self.end = end
        self.head = nn.Linear(width * 16 if end == "flatten" else width, 3)
        self.extra = nn.Conv2d(width, 2, 1) if end in ("both", "pair") else None

    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        maps = [F.relu(self.stem(x))]
        if self.side is not None:
            maps.append(maps[0] + self.side(other))
        for part, (join, back) in zip(self.parts, self.joins, strict=True):
            maps.append(JOINS[join](part(maps[-1]), maps[-1 - back % len(maps)]))
        last = maps[-1]
        if self.end == "flatten":
            return self.head(F.adaptive_avg_pool2d(last, 4).flatten(1))
        logits = self.head(last.amax((2, 3)))
        if self.extra is None:
            return logits
        dense = self.extra(maps[len(maps) // 2])
        return {"logits": logits, "dense": dense} if self.end == "both" else (logits, dense)


def random_network(seed: int) -> tuple[Callable[[], nn.Module], Any]:
    """A network drawn by the seed, as a factory that always builds the same one, and its example."""
    rng = random.Random(seed)
    width, inputs, end = rng.choice([8, 12, 16]), rng.choice([1, 1, 1, 2]), rng.choice(ENDS)
    parts = [
        (rng.choice(sorted(PARTS)), rng.randint(2, 7), rng.choice(sorted(JOINS)), rng.randint(0, 3))
        for _ in range(rng.randint(1, 6))
    ]

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return with_lively_weights(Net(width, parts, end, inputs))

    generator = torch.Generator().manual_seed(seed)
    images = [torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64, generator=generator) for _ in range(inputs)]
    return build, tuple(images) if inputs == 2 else images[0]


def check_network(seed: int) -> str:
    """Discover, cut, save, load and repair one network; 'cut' or 'nothing to prune' if all is right."""
    build, example = random_network(seed)
    model = build()
    before = copy.deepcopy(model.state_dict())
    try:
        spaces = fp.discover(model, example)
    except fp.FairprunerError as error:
        if "nothing to prune" not in str(error):
            raise
        return "nothing to prune"
    removed = some_units(spaces, (0.2, 0.5, 0.9)[seed % 3], seed)
    small = check_cut(model, example, spaces, removed)
    plan = fp.Plan.removing(spaces, removed)
    check_reload(small, plan, build, example)
    check_repair(small, model, plan, example)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    return "cut"


def check_reload(small: nn.Module, plan: fp.Plan, build: Callable[[], nn.Module], example: Any) -> None:
    """A saved and loaded model computes the very same numbers."""
    with TemporaryDirectory() as folder:
        fp.save(small, plan, Path(folder) / "small")
        loaded = fp.load(Path(folder) / "small", build=build)
    for a, b in zip(outputs(small, example), outputs(loaded, example), strict=True):
        assert torch.equal(a, b), "a loaded model differs from the saved one"


def check_repair(small: nn.Module, model: nn.Module, plan: fp.Plan, example: Any) -> None:
    """Repair changes no shape, keeps the numbers finite and does not move away from the original."""
    images = list(example) if isinstance(example, tuple) else [example]
    data = [({"x": images[0], "other": images[1]} if len(images) == 2 else images[0], torch.tensor([0, 1]))]
    repaired = fp.repair(small, model, plan, data, loss=first_logits_loss, method="mean")
    assert [p.shape for p in repaired.parameters()] == [p.shape for p in small.parameters()]
    assert all(t.isfinite().all() for t in outputs(repaired, example)), "a repair is not finite"


def first_logits_loss(output: Any, labels: Tensor) -> Tensor:
    logits = (
        output
        if isinstance(output, Tensor)
        else next(iter(output.values() if isinstance(output, dict) else output))
    )
    return F.cross_entropy(logits, labels)
