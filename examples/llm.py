"""Remove a share of a language model, without training, and compare perplexities.

python examples/llm.py MODEL CALIBRATION.txt HELD_OUT.txt [KEEP]

MODEL is a folder or hub name. CALIBRATION is a text for scores and repair, HELD_OUT another one for the
perplexity. KEEP is the share of all parameters to keep.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fairpruner as fp
from fairpruner.evaluation import check_text_unseen, perplexity, read_tokens
from fairpruner.inputs import pretrained, tokenizer_of

LENGTH = 512  # tokens of a window
WINDOWS = 16  # of calibration text, each of them full


def main(place: str, calibration: str, held_out: str, keep: str = "0.8") -> None:
    check_text_unseen(held_out, calibration)
    model: Any = pretrained(place).float()
    tokenizer = tokenizer_of(place)
    judge = read_tokens(held_out, tokenizer)
    print("full:", perplexity(model, judge, length=LENGTH))

    tokens = read_tokens(calibration, tokenizer)[: WINDOWS * LENGTH]
    data = [{"input_ids": window[None]} for window in tokens.split(LENGTH) if len(window) == LENGTH]
    budget = fp.Budget("params", float(keep))
    for kinds in (["hidden", "head"], ["block"]):
        spaces = fp.discover(model, model.dummy_inputs, kinds=kinds)
        plan = fp.allocate(fp.score(model, data, spaces=spaces), keep=budget)
        small = fp.repair(fp.cut(model, plan), model, plan, data)
        print(f"{' and '.join(kinds)}:", perplexity(small, judge, length=LENGTH), plan.kept)
        if not Path(f"pruned-{kinds[0]}").exists():
            fp.save(small, plan, f"pruned-{kinds[0]}", build=f"hf:{place}")


if __name__ == "__main__":
    if len(sys.argv) > 3:
        main(*sys.argv[1:5])
    else:
        print(__doc__)
