"""One process of a scoring job, started by `torchrun` from the tests: python scoring_job.py OUTPUT
BATCHES [die].
"""

from __future__ import annotations

import os
import sys

import torch
from small_job_net import batches, build

import fairpruner as fp

SIGNALS = {
    "removal": ["wasserstein", "wasserstein_pooled", "activation", "reconstruction", "l1"],
    "protection": ["taylor", "taylor2", "random"],
}


def main(output: str, count: int, dies: bool) -> None:
    torch.set_num_threads(1)
    model, data = build(), batches(count)
    spaces = fp.discover(model, data[0][0])
    rank = os.environ.get("RANK", "0")

    def feed():
        for position, batch in enumerate(data):
            if dies and rank == "1" and position == 3:
                os._exit(17)
            yield batch

    scores = fp.score(model, feed(), spaces=spaces, **SIGNALS)
    scores.save(f"{output}.{rank}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), dies=len(sys.argv) > 3)
