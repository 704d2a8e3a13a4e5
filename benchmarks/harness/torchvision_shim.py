"""`from harness.torchvision_shim import torchvision`: torchvision with or without its compiled operators.

Import it before anything that imports torchvision. The missing operators are declared, and would fail
only if called, which no classification model does.
"""

from __future__ import annotations

import sys

import torch

try:
    import torchvision
except RuntimeError:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    for operator in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
    import torchvision

__all__ = ["torchvision"]
