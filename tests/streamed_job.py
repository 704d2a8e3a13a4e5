"""One process of a job that scores a streamed model: streamed_job.py FOLDER OUTPUT."""

from __future__ import annotations

import os
import sys
import warnings

import conftest  # noqa: F401  # before transformers, which imports torchvision
import torch
from streamed_models import token_batches

import fairpruner as fp

if __name__ == "__main__":
    folder, output = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    streamed = fp.Streamed(f"hf:{folder}", work=f"{output}.work")
    scores = fp.score(streamed, token_batches(4), spaces=fp.discover(streamed, token_batches()[0]))
    scores.save(f"{output}.{os.environ.get('RANK', '0')}")
