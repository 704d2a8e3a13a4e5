"""Streaming: any plan of any model of Hugging Face, cut from files to files in a memory that could not
hold the model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import some_units
from moe_zoo import moe
from moe_zoo import tokens as moe_tokens
from safetensors.torch import load_file, save_file
from transformers_zoo import HUGGING_FACE, hugging_face
from typer.testing import CliRunner

import fairpruner as fp
from fairpruner.cli import app
from fairpruner.files.streaming import stream

transformers = pytest.importorskip("transformers", minversion="5")


def same(a: Any, b: Any) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "qwen3", "t5", "vit"])
def test_heads_and_hidden_units_are_streamed_as_they_are_cut(family: str, tmp_path: Path) -> None:
    hugging_face(family).float().save_pretrained(tmp_path / "whole", max_shard_size="20KB")
    model = type(hugging_face(family)).from_pretrained(tmp_path / "whole")
    example = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in HUGGING_FACE[family][3]().items()
    }
    spaces = fp.discover(model, example)
    plan = fp.Plan.removing(spaces, some_units(spaces, 0.5, 0))
    stream(tmp_path / "whole", plan, tmp_path / "small", max_shard_size="20KB")
    assert same(fp.cut(model, plan), fp.load(tmp_path / "small"))


@pytest.fixture
def qwen(tmp_path: Path) -> tuple[Path, fp.Plan, Any]:
    """A saved model, a plan for it, and what the plan leaves of it."""
    model = moe("qwen2_moe", torch.float32)
    model.save_pretrained(tmp_path / "whole")
    spaces = fp.discover(model, moe_tokens(), kinds=["expert"])
    plan = fp.Plan.removing(spaces, {spaces[0].name: (0, 5), spaces[1].name: (2, 3, 11)})
    return tmp_path / "whole", plan, fp.cut(model, plan)


def test_files_in_the_models_own_layout_are_streamed_too(
    qwen: tuple[Path, fp.Plan, Any], tmp_path: Path
) -> None:
    whole, plan, small = qwen
    fused = {
        name: tensor.contiguous()
        for name, tensor in moe("qwen2_moe", torch.float32).state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(
        {**fused, "lm_head.weight": moe("qwen2_moe", torch.float32).lm_head.weight.detach().clone()},
        whole / "model.safetensors",
    )
    stream(whole, plan, tmp_path / "small")
    assert same(small, fp.load(tmp_path / "small"))
    assert "model.layers.0.mlp.experts.9.up_proj.weight" in load_file(
        tmp_path / "small" / "model.safetensors"
    )  # what other programs look for


def test_half_precision_stays_and_the_configuration_decides(tmp_path: Path) -> None:
    moe("qwen2_moe", torch.bfloat16).save_pretrained(tmp_path / "whole")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    spaces = fp.discover(model, moe_tokens(), kinds=["expert"])
    plan = fp.Plan.removing(spaces, {spaces[0].name: (1,)})
    stream(tmp_path / "whole", plan, tmp_path / "small")
    again = fp.load(tmp_path / "small")
    assert again.dtype == torch.bfloat16
    assert same(fp.cut(model, plan), again)


def no_files(whole: Path) -> None:
    (whole / "model.safetensors").unlink()


def other_sizes(whole: Path) -> None:
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 24}))


def lost_tensor(whole: Path) -> None:
    tensors = load_file(whole / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, whole / "model.safetensors")


def cut_off(whole: Path) -> None:
    (whole / "model.safetensors").write_bytes((whole / "model.safetensors").read_bytes()[:1000])


def quantised(whole: Path) -> None:
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (no_files, "has neither a model.safetensors nor an index of several"),
        (other_sizes, "The plan belongs to another model"),
        (lost_tensor, r"1 tensors of Qwen2MoeForCausalLM are missing in the files \(model.norm.weight\)"),
        (cut_off, "model.safetensors is not a complete safetensors file"),
        (quantised, "are quantised, so they cannot be cut"),
    ],
)
def test_what_cannot_be_streamed_is_one_sentence_and_leaves_nothing(
    harm: Any, message: str, qwen: tuple[Path, fp.Plan, Any], tmp_path: Path
) -> None:
    whole, plan, _ = qwen
    harm(whole)
    with pytest.raises(fp.FairprunerError, match=message) as raised:
        stream(whole, plan, tmp_path / "small")
    assert len(str(raised.value).splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["whole"]


def test_the_command_line_streams_and_replaces(qwen: tuple[Path, fp.Plan, Any], tmp_path: Path) -> None:
    whole, plan, small = qwen
    plan.save(tmp_path / "plan.json")
    command = [
        "cut",
        f"hf:{whole}",
        str(tmp_path / "plan.json"),
        "--stream",
        "--max-shard-size",
        "30KB",
        "-o",
        str(tmp_path / "small"),
    ]
    for extra in ([], ["--force"]):
        result = CliRunner().invoke(app, [*command, *extra])
        assert result.exit_code == 0, (result.output, result.exception)
        assert same(small, fp.load(tmp_path / "small"))
    refused = CliRunner().invoke(app, [*command, "--force", "--repair", "sequential", "--data", "x.jsonl"])
    assert refused.exit_code == 1
    assert "'sequential' needs the whole model, which --stream does not load" in refused.stderr


LIMITED = """
import resource
import sys
import conftest
import torch, transformers
import fairpruner as fp
from fairpruner.files.streaming import stream

torch.set_num_threads(1)
transformers.Qwen2MoeForCausalLM  # what is imported is not what is limited
what, whole, plan, folder = sys.argv[1:]
plan = fp.Plan.load(plan)
used = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (used + 80_000_000, used + 80_000_000))
if what == "load":
    transformers.Qwen2MoeForCausalLM.from_pretrained(whole)
else:
    stream(whole, plan, folder, max_shard_size="8MB")
"""


def limited(what: str, folder: Path) -> subprocess.CompletedProcess[str]:
    arguments = [str(folder / name) for name in ("whole", "plan.json", "small")]
    command = [sys.executable, "-c", LIMITED, what, *arguments]
    return subprocess.run(
        command,
        cwd=Path(__file__).parent,
        env={**os.environ, "HF_DEACTIVATE_ASYNC_LOAD": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit on address space is Linux's")
def test_a_model_larger_than_the_memory_allowed_is_cut(tmp_path: Path) -> None:
    """140 MB of tensors in files of 8 MB, with room for 80 MB: loading fails, the stream does not, and the
    result is right. The plan comes from a file, so it is verified in this room too.
    """
    config = transformers.Qwen2MoeConfig(
        vocab_size=99,
        hidden_size=128,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=64,
        num_experts=60,
        num_experts_per_tok=4,
    )
    torch.manual_seed(0)
    model = transformers.Qwen2MoeForCausalLM(config).eval()
    assert sum(p.nbytes for p in model.parameters()) > 140e6
    model.save_pretrained(tmp_path / "whole", max_shard_size="8MB")
    spaces = fp.discover(model, moe_tokens(), kinds=["expert"])
    plan = fp.Plan.removing(spaces, {s.name: range(15 + 2 * i) for i, s in enumerate(spaces)})
    plan.save(tmp_path / "plan.json")
    loading, streaming = limited("load", tmp_path), limited("stream", tmp_path)
    assert loading.returncode != 0
    assert "annot allocate memory" in loading.stderr or "MemoryError" in loading.stderr
    assert streaming.returncode == 0, streaming.stderr[-3000:]
    assert same(fp.cut(model, plan), fp.load(tmp_path / "small"))


def reversed_owners(plan: Any) -> None:
    _reverse(next(part for part in plan["spaces"]["items"][-1]["slices"] if part["role"] == "read"))


def queries_that_one_token_hides(plan: Any) -> None:
    """With one token, attention does not depend on the queries."""
    heads = next(space for space in plan["spaces"]["items"] if space["kind"] == "head")
    plan["removed"][heads["name"]] = [0]
    _reverse(next(part for part in heads["slices"] if "q_proj" in part["tensor"]))
    for recorded in plan["spaces"]["examples"]["list"][0]["mapping"].values():
        recorded["shape"] = [1, 1]


def _reverse(part: Any) -> None:
    part["owner"] = [
        [first, 1, each] for first, count, each in part["owner"] for first in _falling(first, count)
    ]


def _falling(first: int, count: int) -> range:
    return range(first + count - 1, first - 1, -1)


def dropped_slice(plan: Any) -> None:
    space = plan["spaces"]["items"][-1]
    space["slices"] = [part for part in space["slices"] if part["role"] != "read"]


def other_role(plan: Any) -> None:
    for part in plan["spaces"]["items"][-1]["slices"]:
        part["role"] = "write"


@pytest.mark.slow
@pytest.mark.parametrize("harm", [reversed_owners, dropped_slice, other_role, queries_that_one_token_hides])
@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
def test_a_strangers_plan_is_verified_before_it_is_streamed(harm: Any, family: str, tmp_path: Path) -> None:
    """Digests can be recomputed; here they are left out, as in a plan written by hand."""
    if family == "llama":
        model, example = hugging_face(family).float(), HUGGING_FACE[family][3]()
    else:
        model, example = moe(family, torch.float32), moe_tokens()
    model.save_pretrained(tmp_path / "whole")
    spaces = fp.discover(model, example)
    plan = fp.Plan.removing(spaces, some_units(spaces, 0.4, 0))
    plan.save(tmp_path / "plan.json")
    stream(
        tmp_path / "whole", fp.Plan.load(tmp_path / "plan.json"), tmp_path / "small", max_shard_size="20KB"
    )
    assert same(fp.cut(model, plan), fp.load(tmp_path / "small"))
    content = json.loads((tmp_path / "plan.json").read_text())
    del content["digest"]
    harm(content)
    (tmp_path / "harmed.json").write_text(json.dumps(content))
    with pytest.raises(fp.FairprunerError, match=r"does not cut .* correctly"):
        stream(tmp_path / "whole", fp.Plan.load(tmp_path / "harmed.json"), tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()
