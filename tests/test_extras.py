"""Pruning from Python needs torch, numpy, scipy and safetensors; all else names its extra when missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Packages of the extras; `MISSING` hides them from imports, as if they were not installed.
OPTIONAL = (
    *(
        "typer",
        "rich",
        "accelerate",
        "timm",
        "torchvision",
        "transformers",
        "PIL",
        "pyarrow",
        "sklearn",
        "matplotlib",
    ),
    *("lm_eval", "codecarbon", "onnxruntime", "onnxscript", "openvino"),
)
MISSING = f"""
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {OPTIONAL} else super().find_spec(name, path, target)

sys.meta_path = [BuiltinImporter, FrozenImporter, Installed]
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", MISSING + code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_pipeline_runs_without_any_extra(tmp_path: Path) -> None:
    code = """
import warnings
import torch
from torch import nn
import fairpruner as fp

warnings.simplefilter("ignore", fp.FairprunerWarning)
def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
model, example = build(), torch.zeros(1, 4)
data = [(torch.randn(16, 4), torch.arange(16) % 2) for _ in range(2)]
scores = fp.score(model, data, spaces=fp.discover(model, example))
scores.save("scores.safetensors")
plan = fp.allocate(fp.Scores.load("scores.safetensors"), keep=fp.Budget("units", 0.5))
assert len(fp.diagnose(scores, plan).spaces) == 1
small = fp.repair(fp.cut(model, plan), model, plan, data)
fp.save(small, plan, "small")
assert torch.equal(fp.load("small", build=build)(example), small(example))
fp.report(scores, plan).save_html("report.html")
print(fp.measure(small, example, against=model, batch_sizes=[1], repeats=1, memory=False))
assert fp.prune(model, data, keep=fp.Budget("units", 0.5))
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"params"' in done.stdout  # a measurement prints as JSON where rich cannot make a table


@pytest.mark.slow
def test_recovery_without_accelerate_names_its_extra(tmp_path: Path) -> None:
    code = """
import torch
import fairpruner as fp

try:
    fp.recover(torch.nn.Linear(4, 2), [(torch.zeros(2, 4), torch.tensor([0, 1]))], epochs=1)
except fp.FairprunerError as error:
    print(error)
"""
    done = run(code, tmp_path)
    assert (
        done.stdout == "Recovery needs accelerate, which is not installed: pip install 'fairpruner[train]'.\n"
    ), done.stderr


@pytest.mark.slow
def test_the_command_without_typer_is_one_sentence_and_exit_code_1(tmp_path: Path) -> None:
    done = run("from fairpruner.__main__ import main\nmain()", tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert (
        done.stderr
        == "Error: The command needs typer, which is not installed: pip install 'fairpruner[cli]'.\n"
    )


@pytest.mark.slow
def test_parquet_without_pyarrow_names_its_extra(tmp_path: Path) -> None:
    (tmp_path / "texts.parquet").touch()
    code = """
from pathlib import Path
import fairpruner as fp
from fairpruner.inputs.text import read_rows

try:
    read_rows(Path("texts.parquet"))
except fp.FairprunerError as error:
    print(error)
"""
    done = run(code, tmp_path)
    assert "pip install 'fairpruner[text]'" in done.stdout, done.stderr
