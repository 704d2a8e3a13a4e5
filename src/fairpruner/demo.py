"""The demo's own job: a small residual CNN, trained in seconds on scikit-learn's handwritten digits."""

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

BUDGETS = (0.75, 0.25)  # other shares of the FLOPs, to show that they come for free
DATA, WEIGHTS, SCORES, PRUNED = (
    "digits.npz",
    "net.safetensors",
    "scores.safetensors",
    "pruned",
)  # what it leaves in its folder
EPOCHS = 6
REPAIR = "sequential"


class Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [N, width, H, W] -> the same
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class DigitsNet(nn.Module):
    """Two residual blocks, the second at half the resolution: [N, 1, 8, 8] → logits [N, 10]."""

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
    """The demo's network, untrained: `fairpruner.demo:build` names it.

    >>> build()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    return DigitsNet()


@dataclass(frozen=True)
class Digits:
    """1,797 handwritten digits of 8×8 pixels in [0, 1]: the last 540 are for testing."""

    x: torch.Tensor  # [N, 1, 8, 8]
    y: torch.Tensor  # [N]

    @staticmethod
    def load() -> tuple[Digits, Digits]:
        """Training and test digits, shuffled once and for all."""
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
        """In random order."""
        for chosen in torch.randperm(len(self.y)).split(size):
            yield self.x[chosen], self.y[chosen]


def train(model: nn.Module, digits: Digits, epochs: int) -> None:
    """Cross-entropy with AdamW and one learning-rate cycle."""
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
    """The share of digits read correctly."""
    with torch.no_grad():
        return float((model(digits.x).argmax(1) == digits.y).double().mean())


@dataclass(frozen=True)
class Outcome:
    """What the demo did: accuracies on the test digits, the plan for half the FLOPs, and other budgets of
    the same scores.
    """

    original: float
    cut: float
    repaired: float  # without training
    recovered: float  # after one epoch of it
    plan: Plan
    diagnosis: Diagnosis
    others: list[Plan]  # one for each of BUDGETS
    seconds: float  # that all the other budgets took together


def run(folder: Path, *, force: bool = False) -> Outcome:
    """Train, score once, prune to half the FLOPs, and leave every file in `folder`; `force` replaces the
    pruned model of an earlier run.
    """
    torch.manual_seed(0)
    digits, test = Digits.load()
    model = build()
    _say(f"Training a small CNN on {len(digits.y):,} handwritten digits …")
    train(model, digits, EPOCHS)
    with written_whole(folder / DATA) as temporary, temporary.open("wb") as file:
        np.savez(file, x=digits.x.numpy(), y=digits.y.numpy(), fairpruner=np.array(mark(marks.DATA)))
    with written_whole(folder / WEIGHTS) as temporary:
        write_tensors(temporary, marks.WEIGHTS, {}, model.state_dict())

    _say("Scoring it once …")
    batches = list(digits.batches())
    scores = score(model, batches, spaces=discover(model, digits.x[:1]))
    scores.save(folder / SCORES)
    _say("Pruning it to half its FLOPs …")
    plan = allocate(scores, keep=Budget("flops", 0.5))
    small = cut(model, plan)
    _say("Repairing the cut without training, then training it for one epoch …")
    repaired = repair(small, model, plan, batches, method=REPAIR)
    recovered = recover(repaired, batches, epochs=1)
    save(recovered, plan, folder / PRUNED, build=f"{__name__}:build", force=force)
    original, plain, mended, trained = (accuracy(net, test) for net in (model, small, repaired, recovered))

    start = perf_counter()
    others = sweep(scores, "flops", BUDGETS)
    seconds = perf_counter() - start
    return Outcome(original, plain, mended, trained, plan, diagnose(scores, plan), others, seconds)


def _say(step: str) -> None:
    print(step, file=sys.stderr, flush=True)
