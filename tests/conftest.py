"""What every test relies on: fixed seeds, one thread per worker, and a torchvision that imports."""

from __future__ import annotations

import os
import sys

import hypothesis
import pytest
import torch

# Some virtual machines announce AMX and then refuse its instructions, which kills the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start; two workers leave each a core

hypothesis.settings.register_profile("fairpruner", deadline=None, derandomize=True)
hypothesis.settings.load_profile("fairpruner")


def _make_torchvision_importable() -> None:
    """Declare the compiled operators that torchvision insists on at import, where its build came without
    them.

    Only box operators are compiled; the models under test need none of them.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )


_make_torchvision_importable()


@pytest.fixture(autouse=True)
def _fixed_seed_and_one_thread() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
