"""Remove a share of a language model, without training, and compare perplexities.

python examples/llm.py MODEL CALIBRATION.txt HELD_OUT.txt [KEEP]

MODEL is a folder or hub name. CALIBRATION is a text for scores and repair, HELD_OUT another one for the
perplexity. KEEP is the share of the parameters outside of embeddings to keep. The smaller model is saved in
the folder `pruned`. `fp.prune(model, data, keep=...)` searches for a better one, which takes longer.
"""

from __future__ import annotations

import sys
from typing import Any

import fairpruner as fp
from fairpruner.evaluation import check_text_unseen, perplexity, read_tokens
from fairpruner.inputs import pretrained, tokenizer_of

LENGTH = 512  # tokens of a window
WINDOWS = 16  # of calibration text, each of them full, from all parts of it


def main(place: str, calibration: str, held_out: str, keep: str = "0.8") -> None:
    check_text_unseen(held_out, calibration)
    model: Any = pretrained(place).float()
    tokenizer = tokenizer_of(place)
    judge = read_tokens(held_out, tokenizer)
    print("full:", perplexity(model, judge, length=LENGTH))

    tokens = read_tokens(calibration, tokenizer)
    windows = [window for window in tokens.split(LENGTH) if len(window) == LENGTH]
    step = max(1, len(windows) // WINDOWS)
    data = [{"input_ids": window[None]} for window in windows[::step][:WINDOWS]]
    spaces = fp.discover(model, model.dummy_inputs, kinds=["hidden", "head"])
    scores = fp.score(model, data, spaces=spaces, removal="surgeon")
    plan = fp.allocate(scores, keep=fp.Budget("inner_params", float(keep)), rule="global", exact=True)
    small = fp.repair(fp.cut(model, plan), model, plan, data, method="least_squares")
    print("pruned:", perplexity(small, judge, length=LENGTH), plan.kept)
    fp.save(small, plan, "pruned", build=f"hf:{place}")


if __name__ == "__main__":
    if len(sys.argv) > 3:
        main(*sys.argv[1:5])
    else:
        print(__doc__)
