"""Writes docs/prunable.md: what can be removed from the models that the tests verify, and what is left out.

python docs/prunable.py
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import conftest  # noqa: E402, F401 (makes torchvision importable)
import timm  # noqa: E402
import torchvision.models  # noqa: E402
from moe_zoo import FAMILIES, FURTHER, moe, plain_example, plain_moe, tokens  # noqa: E402
from test_real_models import TORCHVISION  # noqa: E402
from transformers_zoo import HUGGING_FACE, TIMM, hugging_face  # noqa: E402
from zoo import SMALL  # noqa: E402

import fairpruner as fp  # noqa: E402
from fairpruner.models.calling import describe  # noqa: E402

INTRODUCTION = """# What can be pruned

The tests cut every model below. In float64, the cut model and the masked model give the same output to 1e-8 (with routed experts to 1e-6, because some of their routers compute in float32). Params and FLOPs equal the predicted ones exactly. The Hugging Face and timm models are small versions, built from their configurations. Full-size models have other widths, but the same parts can be removed. `python docs/prunable.py` writes this page.

- A *channel* is one output of a convolution, with everything that reads it.
- A *hidden* unit is one neuron between two linear maps; in a gated MLP, the same unit of gate, up and down together.
- A *head* is one attention head, with its rows of q, k and v and its columns of the output projection; with grouped keys, one key-value group with its query heads.
- An *expert* is one routed expert, with its row of the router.
- A *block* is what one residual block adds to its stream. Blocks are looked for on request, see [language_models.md](language_models.md#residual-blocks), and are not in the tables.

The embedding width of a transformer with LayerNorm cannot be pruned: its norms mix all channels, so they can only be removed together. With RMSNorm it can, on request: kind `stream`. A part that cannot be removed on the example input is left out with the reason, and is never cut wrongly. `spaces.left_out` has the reasons for your model.
"""


def models() -> Iterator[tuple[str, str, nn.Module, object]]:
    """(family, name, model, example) of everything the tests verify."""
    for name, (build, shape) in SMALL.items():
        yield "Topologies", name, build(), torch.randn(shape)
    for name, (size, *_) in TORCHVISION.items():
        options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        yield "torchvision", name, getattr(torchvision.models, name)(**options), torch.randn(1, 3, size, size)
    for name, (options, size) in TIMM.items():
        yield "timm", name, timm.create_model(name, **options), torch.randn(1, 3, size, size)
    for name, (*_, example) in HUGGING_FACE.items():
        yield "Hugging Face", name, hugging_face(name).double(), example()
    for name in (*FAMILIES, *FURTHER):
        yield "Mixture of experts", name, moe(name), tokens()
    yield "Mixture of experts", "a block of one's own with an nn.ModuleList", plain_moe(), plain_example()


def row(name: str, model: nn.Module, example: object) -> str:
    """One line of a table: units by kind, and the reasons of what was left out."""
    try:
        spaces = fp.discover(model, example)
    except fp.FairprunerError as error:
        return f"| {name} | {describe(example)} | nothing | {str(error).split(': ', 1)[1].split(';')[0]} |"
    found = Counter(s.kind for s in spaces)
    units = Counter({kind: sum(s.size for s in spaces if s.kind == kind) for kind in found})
    kinds = ", ".join(f"{units[k]} {k}{'s' if k != 'hidden' else ' units'} in {found[k]}" for k in found)
    reasons = Counter(
        reason.split(" where the output")[0]
        for reason in spaces.left_out.values()
        if reason != "reaches the model's output"
    )
    return (
        f"| {name} | {describe(example)} | {kinds} |"
        f" {'; '.join(f'{n}x {_short(r)}' for r, n in _merged(reasons).items()) or '–'} |"
    )


def _short(reason: str) -> str:
    return reason.split(": ")[0] if reason.startswith("a cut model cannot run") else reason


def _merged(reasons: Counter[str]) -> Counter[str]:
    total: Counter[str] = Counter()
    for reason, count in reasons.items():
        total[_short(reason)] += count
    return total


def main() -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    lines, family = [INTRODUCTION], ""
    for group, name, model, example in models():
        if group != family:
            family = group
            lines.append(
                f"\n## {group}\n\n| model | example | what can be removed | left out, besides what reaches"
                " the output |\n|---|---|---|---|"
            )
        lines.append(row(name, model.eval(), example))
        print(lines[-1])
    (ROOT / "docs" / "prunable.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
