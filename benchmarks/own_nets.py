"""The default of `fp.prune` on nets of other families, beside the best combination picked with hindsight.

    python benchmarks/own_nets.py --shared ../shared          # what the results do not hold yet
    python benchmarks/own_nets.py --table                     # only the table of docs/search.md

A MobileNet-like net (inverted residuals, depthwise convolutions) and a DeiT-like one (patches, attention,
MLPs) are trained here on 10,000 images of CIFAR-10 and kept in --cache, outside the repository. 2,000 of
these images calibrate. `by hand` repairs the plan of every signal and rule, with and without the residual
stream, sequentially, and takes the one that is best on the **test** images: more than a user could know.
One thread.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pages
import torch
import torchvision_shim  # noqa: F401
from cifar_models import cifar10, some, top1
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.nn import functional as F

import fairpruner as fp
from fairpruner.pipeline.search import make_candidates, useful_removals

EPOCHS, CALIBRATION = 8, 2000
Row = dict[str, Any]


class InvertedResidual(nn.Module):
    """Widen, filter each channel, narrow; added to the input where the shapes allow."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inputs
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.added = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return x + out if self.added else out


def mobilenet() -> nn.Module:
    """A MobileNetV2 for 32x32 images: 7 inverted residuals of 16 to 64 channels."""
    shapes = [(16, 24, 1), (24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 40, 1), (40, 64, 2), (64, 64, 1)]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU6(),
        *(InvertedResidual(*shape) for shape in shapes),
        nn.Conv2d(64, 160, 1, bias=False),
        nn.BatchNorm2d(160),
        nn.ReLU6(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(160, 10),
    )


def deit() -> nn.Module:
    """A DeiT for 32x32 images: 64 patches, 4 blocks of 4 heads and 96 features."""
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(img_size=32, patch_size=4, embed_dim=96, depth=4, num_heads=4, num_classes=10)


NETS: dict[str, Callable[[], nn.Module]] = {"MobileNet-like": mobilenet, "DeiT-like": deit}
BUDGETS = (0.5, 0.7)


def trained(name: str, images: tuple[Tensor, Tensor], cache: Path) -> nn.Module:
    """A net after EPOCHS epochs, from the cache if it is there."""
    torch.manual_seed(0)
    net, path = NETS[name](), cache / f"{name.lower()}.safetensors"
    if path.exists():
        load_model(net, path)
        return net.eval()
    steps = EPOCHS * -(-len(images[1]) // 100)
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(images[1])).split(100):
            x, y = images[0][chosen], images[1][chosen]
            mirrored = torch.rand(len(x), 1, 1, 1) < 0.5
            loss = F.cross_entropy(net.train()(torch.where(mirrored, x.flip(3), x)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    cache.mkdir(parents=True, exist_ok=True)
    save_model(net, path)
    return net.eval()


def row(name: str, keep: float, shared: Path, cache: Path) -> Row:
    """The default, and the best of all combinations on the test images."""
    images, test = cifar10("train10k", shared), cifar10("test", shared)
    model, data, budget = trained(name, images, cache), some(images, CALIBRATION), fp.Budget("flops", keep)
    small, plan = fp.prune(model, data, keep=budget)
    spaces = fp.discover(model, data[0][0][:1])
    scores = fp.score(model, data, spaces=spaces, removal=useful_removals(spaces, classes=True))
    by_hand: dict[str, float] = {}
    for candidate in make_candidates(scores, budget, exact=True):
        repaired = fp.repair(fp.cut(model, candidate.plan), model, candidate.plan, data, method="sequential")
        by_hand[candidate.name] = round(top1(repaired, test), 2)
    best = max(by_hand, key=by_hand.__getitem__)
    return {
        "net": name,
        "keep": keep,
        "baseline": round(top1(model, test), 2),
        "default": round(top1(small, test), 2),
        "flops_kept": round(plan.share("flops"), 4),
        "by_hand": by_hand[best],
        "best": best,
        "all_by_hand": by_hand,
        "tried": [trial.to_json() for trial in plan.tried],
    }


def page() -> str:
    """The results as Markdown."""
    rows = [
        [f"{r['net']} ({r['baseline']})", f"{r['keep']:g}", f"{r['default']}", f"{r['by_hand']}", r["best"]]
        for r in _rows()
    ]
    return pages.table(["net (top-1 before)", "FLOPs kept", "default", "best by hand", "which"], rows)


def _rows() -> list[Row]:
    rows: list[Row] = pages.results("own_nets").get("rows", [])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--cache", type=Path, default=Path("../nets"), help="where trained weights are kept")
    parser.add_argument("--table", action="store_true", help="only put the table into docs/search.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch.jit
    rows = _rows()
    for name in () if options.table else NETS:
        for keep in BUDGETS:
            if any((r["net"], r["keep"]) == (name, keep) for r in rows):
                continue
            rows.append(row(name, keep, options.shared, options.cache))
            print({k: v for k, v in rows[-1].items() if k not in ("tried", "all_by_hand")}, flush=True)
            pages.store("own_nets", {"threads": 1, "rows": rows})
    pages.fill("own_nets", page())


if __name__ == "__main__":
    main()
