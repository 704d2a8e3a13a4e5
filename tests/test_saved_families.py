"""Hugging Face models whose configurations are unlike most: saved, and loaded in a new process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fairpruner as fp

transformers = pytest.importorskip("transformers", minversion="5")

PIXELS = {"pixel_values": torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))}
TOKENS = {"input_ids": torch.arange(6)[None]}
LOAD = """
import sys
import conftest
import torch
from safetensors.torch import load_file, save_file
import fairpruner as fp

for folder in sys.argv[1:]:
    inputs = load_file(folder + "/inputs.safetensors")
    with torch.no_grad():
        save_file({"logits": fp.load(folder)(**inputs)["logits"]}, folder + ".out")
"""


def models() -> dict[str, tuple[Any, dict[str, torch.Tensor]]]:
    """Heads by stage (Swin, SegFormer), and a head_dim that cannot be set (Falcon)."""
    swin = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    segformer = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[2, 4],
        mlp_ratios=[2, 2],
    )
    falcon = transformers.FalconConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, multi_query=False
    )
    return {
        "swin": (transformers.SwinForImageClassification(swin), PIXELS),
        "segformer": (transformers.SegformerForImageClassification(segformer), PIXELS),
        "falcon": (transformers.FalconForCausalLM(falcon), TOKENS),
    }


@pytest.mark.slow
def test_swin_segformer_and_falcon_are_saved_and_loaded_in_a_new_process(tmp_path: Path) -> None:
    expected: dict[str, torch.Tensor] = {}
    for name, (model, inputs) in models().items():
        model.eval()
        spaces = fp.discover(model, inputs)
        units = {s.name: range(s.size // 4) for s in spaces if s.size // 4 <= s.size - s.min_keep}
        assert any(space.kind == "head" for space in spaces), name
        small = fp.cut(model, plan := fp.Plan.removing(spaces, units))
        fp.save(small, plan, tmp_path / name)
        save_file(inputs, tmp_path / name / "inputs.safetensors")
        with torch.no_grad():
            expected[name] = small(**inputs)["logits"]
    command = [sys.executable, "-c", LOAD, *(str(tmp_path / name) for name in expected)]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, env=dict(os.environ), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for name, logits in expected.items():
        torch.testing.assert_close(load_file(tmp_path / f"{name}.out")["logits"], logits, rtol=0, atol=1e-5)
