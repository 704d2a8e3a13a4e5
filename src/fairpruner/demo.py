"""The demo: a small residual CNN, trained in seconds on scikit-learn's handwritten digits, then pruned."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fairpruner.allocation import allocate, sweep
from fairpruner.allocation.diagnostics import Diagnosis, diagnose
from fairpruner.core import marks
from fairpruner.core.budget import Budget
from fairpruner.core.marks import mark
from fairpruner.core.plan import Plan
from fairpruner.core.sealed import write_tensors
from fairpruner.core.writing import written_whole
from fairpruner.discovery import discover
from fairpruner.errors import FairprunerError
from fairpruner.files.folders import save
from fairpruner.recovery import recover
from fairpruner.repair import repair
from fairpruner.scoring.score import score
from fairpruner.surgery import cut

BUDGETS = (0.75, 0.25)  # other shares of the FLOPs, to show that more plans take milliseconds
# The names of what the demo writes to its folder.
DATA, WEIGHTS, SCORES, PRUNED = "digits.npz", "net.safetensors", "scores.safetensors", "pruned"
EPOCHS = 6
REPAIR = "sequential"


class Block(nn.Module):
    """Two 3×3 convolutions with a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [N, width, H, W] -> the same
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class DigitsNet(nn.Module):
    """Two residual blocks, the second at half the resolution: [N, 1, 8, 8] -> logits [N, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 24, 3, padding=1, bias=False)
        self.stem_bn = nn.BatchNorm2d(24)
        self.block1 = Block(24)
        self.down = nn.Conv2d(24, 48, 3, stride=2, padding=1, bias=False)
        self.down_bn = nn.BatchNorm2d(48)
        self.block2 = Block(48)
        self.head = nn.Linear(48, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block1(F.relu(self.stem_bn(self.stem(x))))  # [N, 24, 8, 8]
        x = self.block2(F.relu(self.down_bn(self.down(x))))  # [N, 48, 4, 4]
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


def build() -> nn.Module:
    """The demo's network, untrained; on the command line it is `fairpruner.demo:build`.

    >>> build()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    return DigitsNet()


@dataclass(frozen=True)
class Digits:
    """Handwritten digits of 8×8 pixels in [0, 1]."""

    x: torch.Tensor  # [N, 1, 8, 8]
    y: torch.Tensor  # [N]

    @staticmethod
    def load() -> tuple[Digits, Digits]:
        """Training and test digits: 1,257 and 540, always shuffled in the same way."""
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise FairprunerError(
                "The demo needs scikit-learn for its digits: pip install 'fairpruner[demo]'."
            ) from error
        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(labels))
        x = torch.from_numpy(images[order].reshape(-1, 1, 8, 8) / 16).float()
        y = torch.from_numpy(labels[order]).long()
        return Digits(x[:-540], y[:-540]), Digits(x[-540:], y[-540:])

    def batches(self, size: int = 64) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Batches of images [size, 1, 8, 8] and labels [size], in random order."""
        for chosen in torch.randperm(len(self.y)).split(size):
            yield self.x[chosen], self.y[chosen]


def train(model: nn.Module, digits: Digits, epochs: int) -> None:
    """Train with cross-entropy, AdamW and one learning-rate cycle."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=epochs * -(-len(digits.y) // 64)
    )
    for _ in range(epochs):
        for x, y in digits.batches():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
    model.eval()


def accuracy(model: nn.Module, digits: Digits) -> float:
    """The share of digits that are classified correctly."""
    with torch.no_grad():
        return float((model(digits.x).argmax(1) == digits.y).double().mean())


@dataclass(frozen=True)
class DemoResult:
    """Accuracies on the test digits, the plan for half the FLOPs, and plans for other budgets."""

    original: float
    cut: float
    repaired: float  # without training
    recovered: float  # after one epoch of training
    plan: Plan
    diagnosis: Diagnosis
    others: list[Plan]  # one for each of BUDGETS
    seconds: float  # to make all other plans


def run(folder: Path, *, force: bool = False) -> DemoResult:
    """Train, score once, prune to half the FLOPs, and write all files to `folder`.

    `force` replaces the pruned model of an earlier run.
    """
    torch.manual_seed(0)
    digits, test = Digits.load()
    model = build()
    _print_step(f"Training a small CNN on {len(digits.y):,} handwritten digits …")
    train(model, digits, EPOCHS)
    with written_whole(folder / DATA) as temporary, temporary.open("wb") as file:
        np.savez(file, x=digits.x.numpy(), y=digits.y.numpy(), fairpruner=np.array(mark(marks.DATA)))
    with written_whole(folder / WEIGHTS) as temporary:
        write_tensors(temporary, marks.WEIGHTS, {}, model.state_dict())

    _print_step("Scoring it once …")
    batches = list(digits.batches())
    scores = score(model, batches, spaces=discover(model, digits.x[:1]))
    scores.save(folder / SCORES)
    _print_step("Pruning it to half its FLOPs …")
    plan = allocate(scores, keep=Budget("flops", 0.5))
    small = cut(model, plan)
    _print_step("Repairing the cut without training, then training it for one epoch …")
    repaired = repair(small, model, plan, batches, method=REPAIR)
    recovered = recover(repaired, batches, epochs=1)
    save(recovered, plan, folder / PRUNED, build=f"{__name__}:build", force=force)

    start = perf_counter()
    others = sweep(scores, "flops", BUDGETS)
    seconds = perf_counter() - start
    return DemoResult(
        original=accuracy(model, test),
        cut=accuracy(small, test),
        repaired=accuracy(repaired, test),
        recovered=accuracy(recovered, test),
        plan=plan,
        diagnosis=diagnose(scores, plan),
        others=others,
        seconds=seconds,
    )


def _print_step(step: str) -> None:
    print(step, file=sys.stderr, flush=True)
