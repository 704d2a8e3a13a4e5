"""How well a pruned language model still predicts text, beside the methods of others, without training.

    python ../shared/data/language_models.py smollm2 FOLDER         # once; needs gguf
    python benchmarks/llm.py FOLDER --shared ../shared              # what the results do not hold yet
    python benchmarks/llm.py FOLDER --shared ../shared --share 0.2  # only this share
    python benchmarks/llm.py --table                                # only docs/language_models.md

A share of the parameters of SmolLM2-135M-Instruct outside of its embedding is removed. Perplexity, and the
agreement of the most likely next token with the original's, are taken on 6,144 tokens of validation text, in
windows of 512. The calibration text is packed into full windows of 512, 4,096 tokens in each draw.

Methods of others, written here as their papers describe them; all remove hidden units of MLPs and groups of
heads that share a key (or whole layers), and are measured on the same text:

- *magnitude*: the squared weights of a unit, the same share in every layer.
- *Taylor, global*: LLM-Pruner's sum over a unit's weights of |weight x gradient|, one ranking of all units.
- *FLAP*: the fluctuation of what a consumer reads times its squared weights, standardised in every layer, one
  ranking; the mean of what is removed becomes a bias.
- *ShortGPT*: whole layers with the least block influence.

Rows of this package name signals and rule; `+ least_squares` is its repair, with the calibration text.
"""

from __future__ import annotations

import argparse
import json
import lzma
import resource
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pages
import torch
import torchvision_shim  # noqa: F401  # so that transformers imports
from torch import Tensor, nn
from torch.nn import functional as F

import fairpruner as fp
from fairpruner.core.units import UnitSpace
from fairpruner.inputs.hugging_face import pretrained, tokenizer_of
from fairpruner.scoring.signals.base import Accumulator, BatchInfo, Context, Observation, Result, Signal

NAME = "llm"
SHARES, DRAWS = (0.2, 0.1, 0.3, 0.5), 3
WINDOW, TESTED, CALIBRATED = 512, 12, 8  # tokens of a window, and windows
WIDTH = ("hidden", "head")
Row = dict[str, Any]
Windows = list[dict[str, Tensor]]


def text(shared: Path, split: str) -> str:
    """Mixed English text, decoded from its tokens."""
    from tokenizers import Tokenizer

    folder = shared / "data" / "text"
    tokens = np.frombuffer(lzma.decompress((folder / f"moe_tokens_{split}.bin.xz").read_bytes()), np.uint16)
    return str(Tokenizer.from_file(str(folder / "moe_tokenizer.json")).decode(tokens[:400_000].tolist()))


def windows(tokenizer: Any, passage: str, count: int, start: int = 0) -> Windows:
    """Consecutive windows of one long text, each full."""
    ids = tokenizer(passage, add_special_tokens=False)["input_ids"]
    found = torch.tensor(ids[start : start + count * WINDOW]).view(count, WINDOW)
    return [{"input_ids": one[None]} for one in found]


class Judge:
    """Perplexity, and agreement with the original, on the test windows."""

    def __init__(self, model: nn.Module, test: Windows) -> None:
        self._test = test
        self.perplexity, self._best = self._run(model)

    def _run(self, model: nn.Module) -> tuple[float, Tensor]:
        losses, best = [], []
        with torch.no_grad():
            for window in self._test:
                logits = model(**window).logits[0]  # [tokens, vocabulary]
                losses.append(F.cross_entropy(logits[:-1], window["input_ids"][0, 1:]))
                best.append(logits.argmax(1))
        return float(torch.stack(losses).mean().exp()), torch.cat(best)

    def __call__(self, model: nn.Module) -> dict[str, float]:
        perplexity, best = self._run(model)
        agreement = float((best == self._best).double().mean())
        return {"perplexity": round(perplexity, 2), "agreement": round(agreement, 4)}


def magnitude(space: UnitSpace, model: nn.Module) -> Tensor:
    """The squared weights of each unit."""
    tensors, total = dict(model.named_parameters(remove_duplicate=False)), torch.zeros(space.size)
    for part in space.slices:
        squares = tensors[part.tensor].detach().square().movedim(part.dim, 0).flatten(1).sum(1)
        owned = torch.from_numpy(part.owner)
        total.index_add_(0, owned[owned >= 0], squares[owned >= 0])
    return total


@dataclass(frozen=True)
class ElementTaylor(Signal):
    """LLM-Pruner's first order: |weight x gradient|, summed over all weights of a unit."""

    name: str = "element_taylor"
    needs: ClassVar[frozenset[Observation]] = frozenset({"gradients"})

    def start(self, context: Context) -> Accumulator:
        return _ElementTaylor(context)


class _ElementTaylor(Accumulator):
    def __init__(self, context: Context) -> None:
        self._context = context
        self._sums: dict[str, Tensor] = {}

    def see_gradients(self, gradients: Mapping[str, Tensor], info: BatchInfo) -> None:
        for name, gradient in gradients.items():
            self._sums[name] = self._sums.get(name, torch.zeros(())) + gradient * info.samples

    def result(self) -> Result:
        tensors = dict(self._context.model.named_parameters(remove_duplicate=False))
        scores = {}
        for space in self._context.spaces:
            total = np.zeros(space.size)
            for part in space.slices:
                if part.tensor in self._sums:
                    terms = (tensors[part.tensor].detach() * self._sums[part.tensor]).abs()
                    sums = terms.movedim(part.dim, 0).flatten(1).sum(1).double().numpy()
                    np.add.at(total, part.owner[part.owner >= 0], sums[part.owner >= 0])
            scores[space.name] = total
        return Result(scores)


class Fluctuation:
    """FLAP's metric: the variance of each channel over tokens, times the squared weights that read it."""

    squares: ClassVar[dict[str, Tensor]] = {}  # space -> squared weights of every channel, [J, F]

    def __init__(self, space: UnitSpace) -> None:
        self._space, self._count = space, 0
        self._sum: Any = 0
        self._square: Any = 0

    def update(self, activation: Tensor, labels: Tensor | None) -> None:
        self._count += len(activation)
        self._sum = self._sum + activation.double().sum(0)
        self._square = self._square + activation.double().square().sum(0)

    def compute(self) -> Tensor:
        variance = self._square / self._count - (self._sum / self._count).square()  # [J, F]
        metric = variance * self.squares[self._space.name]
        standard: Tensor = (metric - metric.mean()) / metric.std()
        return standard.mean(1)


class Setting:
    """A model, its calibration text, and scores of every unit by all signals, made once."""

    def __init__(self, folder: Path, shared: Path, draw: int, signals: Collection[str]) -> None:
        self._signals = signals
        self.model: Any = pretrained(str(folder))
        self._tokenizer, self._shared = tokenizer_of(str(folder)), shared
        self.data = windows(self._tokenizer, text(shared, "train"), CALIBRATED, start=draw * 20_000)

    @cached_property
    def judge(self) -> Judge:
        return Judge(self.model, windows(self._tokenizer, text(self._shared, "val"), TESTED))

    @cached_property
    def embedded(self) -> int:
        return int(self.model.get_input_embeddings().weight.numel())

    def budget(self, share: float) -> fp.Budget:
        """What is kept if a share of the parameters outside of the embedding is removed."""
        total = fp.count_params(self.model)
        return fp.Budget("params", int(total - share * (total - self.embedded)))

    @cached_property
    def spaces(self) -> fp.Spaces:
        example = {"input_ids": self.data[0]["input_ids"][:, :16]}
        return fp.discover(self.model, example, kinds=[*WIDTH, "block"])

    @cached_property
    def scores(self) -> fp.Scores:
        weights = dict(self.model.named_parameters())
        width = self.spaces.only(kinds=WIDTH)
        for space in width:
            part = space.observed
            squares = (
                weights[part.tensor].detach().double().square().sum(0)
            )  # [channels], in the order of units
            Fluctuation.squares[space.name] = squares.view(space.size, -1)
        fp.signals.removal_signal("magnitude")(magnitude)
        fp.signals.removal_signal("flap")(Fluctuation)
        signals = [ElementTaylor() if name == "element_taylor" else name for name in self._signals]
        return fp.score(self.model, self.data, spaces=width, removal=signals, protection="taylor")

    @cached_property
    def blocks(self) -> fp.Scores:
        spaces = self.spaces.only(kinds=["block"])
        return fp.score(self.model, self.data, spaces=spaces, removal="influence", protection="taylor")

    @cached_property
    def deletions(self) -> fp.Scores:
        spaces = self.spaces.only(kinds=["block"])
        return fp.score(self.model, self.data[:2], spaces=spaces, removal="deletion", protection="taylor")


Way = Callable[[Setting, float], nn.Module]


@dataclass(frozen=True)
class BySignal:
    """Remove hidden units and groups of heads by a signal and a rule of this package."""

    removal: str
    rule: str
    repair: str | None = None

    def __call__(self, setting: Setting, share: float) -> nn.Module:
        scores = setting.scores.using(removal=self.removal)
        plan = fp.allocate(scores, keep=setting.budget(share), rule=self.rule)
        small = fp.cut(setting.model, plan)
        if self.repair is None:
            return small
        return fp.repair(small, setting.model, plan, setting.data, method=self.repair)


def branches(by: str) -> Way:
    """Remove residual branches, attention or MLP, by a signal of this package."""

    def way(setting: Setting, share: float) -> nn.Module:
        scores = setting.deletions if by == "deletion" else setting.blocks
        return fp.cut(setting.model, fp.allocate(scores, keep=setting.budget(share), rule="global"))

    return way


def flap(setting: Setting, share: float) -> nn.Module:
    """FLAP, with the mean of what was removed as a bias of its consumer."""
    plan = fp.allocate(setting.scores.using(removal="flap"), keep=setting.budget(share), rule="global")
    small = fp.cut(setting.model, plan)
    means = _input_means(setting, {space.observed.tensor for space in plan.spaces})
    weights = dict(setting.model.named_parameters())
    for space in plan.spaces:
        part = space.observed
        gone = torch.from_numpy(np.isin(part.owner, plan.removed[space.name]))
        lost = weights[part.tensor].detach()[:, gone] @ means[part.tensor][gone]  # [outputs]
        small.get_submodule(part.tensor.rpartition(".")[0]).bias = nn.Parameter(lost)
    return small


def _input_means(setting: Setting, tensors: set[str]) -> dict[str, Tensor]:
    """The mean over tokens of what each of these weights reads, [channels]."""
    sums: dict[str, Tensor] = {}
    handles = []
    for name in tensors:

        def seen(module: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
            sums[name] = sums.get(name, torch.zeros(())) + args[0].flatten(0, -2).sum(0)

        handles.append(setting.model.get_submodule(name.rpartition(".")[0]).register_forward_pre_hook(seen))
    with torch.no_grad():
        for window in setting.data:
            setting.model(**window)
    for handle in handles:
        handle.remove()
    return {name: total / (CALIBRATED * WINDOW) for name, total in sums.items()}


def shortgpt(setting: Setting, share: float) -> nn.Module:
    """Whole layers with the least block influence, until the share is reached."""
    layers = setting.model.model.layers
    turned = np.zeros(len(layers))
    handles = []
    for number, layer in enumerate(layers):

        def seen(module: nn.Module, args: Any, output: Any, number: int = number) -> None:
            after = output[0] if isinstance(output, tuple) else output
            turned[number] += float(1 - F.cosine_similarity(args[0], after, dim=-1).mean())

        handles.append(layer.register_forward_hook(seen))
    with torch.no_grad():
        for window in setting.data:
            setting.model(**window)
    for handle in handles:
        handle.remove()
    gone = np.argsort(turned)[: round(share * len(layers))]
    paths = {f"model.layers.{number}" for number in gone}
    spaces = setting.spaces.only(kinds=["block"])
    units = [u for part in spaces["blocks"].replaced if part.module in paths for u in part.units]
    return fp.cut(setting.model, fp.Plan.removing(spaces, {"blocks": units}))


WAYS: dict[str, Way] = {
    "magnitude": BySignal("magnitude", "uniform"),
    "Taylor, global (LLM-Pruner)": BySignal("element_taylor", "global"),
    "FLAP": flap,
    "ShortGPT": shortgpt,
    "fairpruner: activation, tod": BySignal("activation", "tod"),
    "fairpruner: activation, tod + least_squares": BySignal("activation", "tod", "least_squares"),
    "fairpruner: saliency, global": BySignal("saliency", "global"),
    "fairpruner: saliency, global + least_squares": BySignal("saliency", "global", "least_squares"),
    "fairpruner: reconstruction, global": BySignal("reconstruction", "global"),
    "fairpruner: reconstruction, global + least_squares": BySignal(
        "reconstruction", "global", "least_squares"
    ),
    "fairpruner: reconstruction, uniform + least_squares": BySignal(
        "reconstruction", "uniform", "least_squares"
    ),
    "fairpruner: blocks by influence": branches("influence"),
    "fairpruner: blocks by deletion": branches("deletion"),
}


def rows(folder: Path, shared: Path, wanted: Callable[[Row], bool]) -> Iterator[Row]:
    """One row for each draw, share and way, those of the first draw first."""

    @cache
    def setting(draw: int) -> Setting:
        """The scores are those that the wanted rows need."""
        needed = [
            way
            for name, way in WAYS.items()
            if any(wanted({"share": share, "draw": draw, "way": name}) for share in SHARES)
        ]
        signals = [way.removal for way in needed if isinstance(way, BySignal)]
        return Setting(folder, shared, draw, dict.fromkeys(signals + ["flap"] * (flap in needed)))

    for draw in range(DRAWS):
        for share in SHARES:
            for way, prune in WAYS.items():
                row: Row = {"share": share, "draw": draw, "way": way}
                if not wanted(row):
                    continue
                own = setting(draw)
                start = time.process_time()
                small = prune(own, share)
                seconds = time.process_time() - start
                kept = fp.count_params(small) - own.embedded
                whole = fp.count_params(own.model) - own.embedded
                yield {
                    **row,
                    **own.judge(small.eval()),
                    "original": round(own.judge.perplexity, 2),
                    "removed": round(1 - kept / whole, 4),
                    "cpu_seconds": round(seconds, 1),
                    "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
                }


def page() -> str:
    """Perplexity and agreement of every way, the mean over draws; literature is not mixed in."""
    found: list[Row] = pages.results(NAME) or []
    if not found:
        return "Not measured yet."
    shares = sorted({row["share"] for row in found})
    lines = []
    for way in WAYS:
        own = [row for row in found if row["way"] == way]
        if own:
            cells = [_cell([row for row in own if row["share"] == share]) for share in shares]
            lines.append([way, *cells, str(len({row["draw"] for row in own}))])
    measured = pages.table(["", *(f"{share:.0%} removed" for share in shares), "draws"], lines)
    original = found[0]["original"]
    return f"Perplexity (agreement of the most likely token in %). The original has {original}.\n\n{measured}"


def _cell(found: list[Row]) -> str:
    if not found:
        return "–"
    perplexity = float(np.mean([row["perplexity"] for row in found]))
    return f"{perplexity:.1f} ({100 * float(np.mean([row['agreement'] for row in found])):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--share", type=float)
    parser.add_argument("--draw", type=int)
    parser.add_argument("--way", action="append", help="only this row; may be given several times")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    found: list[Row] = pages.results(NAME) or []
    known = {(row["share"], row["draw"], row["way"]) for row in found}

    def wanted(row: Row) -> bool:
        asked = {key: getattr(options, key) for key in ("share", "draw")}
        fits = all(value is None or row[key] == value for key, value in asked.items())
        fits = fits and (options.way is None or row["way"] in options.way)
        return fits and (row["share"], row["draw"], row["way"]) not in known

    if not options.table:
        warnings.simplefilter("ignore", fp.FairprunerWarning)
        for row in rows(options.folder, options.shared, wanted):
            print(json.dumps(row), flush=True)
            found.append(row)
            pages.store(NAME, found)
    pages.fill(NAME, page())


if __name__ == "__main__":
    main()
