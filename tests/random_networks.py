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
from random_parts import MAP_PARTS, SIZE
from random_sequences import SEQUENCE_PARTS
from torch import Tensor, nn

import fairpruner as fp

PARTS = MAP_PARTS | SEQUENCE_PARTS
JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "last": lambda new, _: new,
    "sum": torch.add,
    "product": lambda new, old: new * torch.sigmoid(old),
    "difference": lambda new, old: new - 0.5 * old,
}
LENGTHS = (1, 1, 2, 2, 2, 3, 3, 5)  # parts of a network; pairs show most of what can go wrong
METHODS = ("mean", "least_squares", "sequential")
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
        for _ in range(rng.choice(LENGTHS))
    ]

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return with_lively_weights(Net(width, parts, end, inputs))

    generator = torch.Generator().manual_seed(seed)
    images = [torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64, generator=generator) for _ in range(inputs)]
    return build, tuple(images) if inputs == 2 else images[0]


def check_network(seed: int) -> str:
    """Discover, cut, save, load and repair one network. If all is right, what happened: "nothing to prune",
    "cut", or "cut, repair better".
    """
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
    better = check_repair(small, model, plan, example, METHODS[seed // 3 % len(METHODS)])
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    return "cut, repair better" if better else "cut"


def check_reload(small: nn.Module, plan: fp.Plan, build: Callable[[], nn.Module], example: Any) -> None:
    """A saved and loaded model computes the very same numbers."""
    with TemporaryDirectory() as folder:
        fp.save(small, plan, Path(folder) / "small")
        loaded = fp.load(Path(folder) / "small", build=build)
    for a, b in zip(outputs(small, example), outputs(loaded, example), strict=True):
        assert torch.equal(a, b), "a loaded model differs from the saved one"


def check_repair(small: nn.Module, model: nn.Module, plan: fp.Plan, example: Any, method: str) -> bool:
    """Repair changes no shape, and its logits on the data are no farther from the original's than those of
    the cut; whether they are nearer.
    """
    images = [torch.cat([image, *(image.roll(k, 2) * 1.1**k for k in (1, 2, 3))]) for image in parts(example)]
    inputs = {"x": images[0], "other": images[1]} if len(images) == 2 else images[0]
    wanted = logits(outputs(model, inputs))
    data = [(inputs, wanted)]
    repaired = fp.repair(small, model, plan, data, loss=first_logits_loss, method=method)
    assert [p.shape for p in repaired.parameters()] == [p.shape for p in small.parameters()]
    assert all(t.isfinite().all() for t in outputs(repaired, example)), "a repair is not finite"
    before, after = (float(F.mse_loss(logits(outputs(net, inputs)), wanted)) for net in (small, repaired))
    assert after <= before * (1 + 1e-9), f"{method} moved the logits from {before:.3g} to {after:.3g}"
    return after < 0.99 * before


def parts(example: Any) -> list[Tensor]:
    return list(example) if isinstance(example, tuple) else [example]


def logits(found: list[Tensor]) -> Tensor:
    return found[0]


def first_logits_loss(output: Any, wanted: Tensor) -> Tensor:
    first = output if isinstance(output, Tensor) else next(iter(dict_or_tuple(output)))
    return F.mse_loss(first, wanted)


def dict_or_tuple(output: Any) -> Any:
    return output.values() if isinstance(output, dict) else output
