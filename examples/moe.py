"""Remove half of the routed experts of a language model, without training, and compare perplexities.

python examples/moe.py MODEL TEXTS.jsonl HELD_OUT.txt [SHARE]

MODEL is a folder or hub name. TEXTS has a column "text" with the calibration texts. HELD_OUT is another text,
for the perplexity. SHARE is the share of experts to keep.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fairpruner as fp
from fairpruner.evaluation import check_text_unseen, perplexity, read_tokens
from fairpruner.inputs import Columns, Sampling, load_text, pretrained, tokenizer_of

LENGTH = 256  # tokens of a calibration text, and of a window of the held-out one


def main(place: str, texts: str, held_out: str, share: str = "0.5") -> None:
    check_text_unseen(held_out, texts)
    model: Any = pretrained(place).float()
    tokenizer = tokenizer_of(place)
    judge = read_tokens(held_out, tokenizer)
    print("full:", perplexity(model, judge, length=LENGTH))

    spaces = fp.discover(model, model.dummy_inputs, kinds=["expert"])
    scores = fp.score(
        model, load_text(texts, tokenizer, Sampling(batch_size=8), Columns(length=LENGTH)), spaces=spaces
    )
    for rule in ("uniform", "tod"):
        plan = fp.allocate(scores, keep=fp.Budget("experts", float(share)), rule=rule, exact=True)
        small = fp.cut(model, plan)
        kept = [space.size - plan.depths[space.name] for space in plan.spaces]
        print(
            f"{rule}:",
            perplexity(small, judge, length=LENGTH),
            "with",
            plan.predicted["experts"],
            "experts:",
            kept,
        )
        if not Path(f"pruned-{rule}").exists():
            fp.save(small, plan, f"pruned-{rule}", build=f"hf:{place}")


if __name__ == "__main__":
    if len(sys.argv) > 3:
        main(*sys.argv[1:5])
    else:
        print(__doc__)
