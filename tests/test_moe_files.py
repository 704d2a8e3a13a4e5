"""Pruned MoE models on disk: saved, loaded by fairpruner and by transformers alone, streamed from files
to files, bit for bit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_zoo import FAMILIES, moe, plain_example, plain_moe, tokens
from safetensors import safe_open
from torch import nn

import fairpruner as fp
from fairpruner.files.pretrained_files import write_config
from fairpruner.files.shards import parse_size
from fairpruner.files.streaming import stream
from fairpruner.inputs.pruned_modeling import resize
from fairpruner.models.experts import expert_blocks

transformers = pytest.importorskip("transformers", minversion="5")


def equal_state(a: nn.Module, b: nn.Module) -> bool:
    """Same class, names, dtypes and bits."""
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) and first[name].dtype == second[name].dtype for name in first
    )


def logits(model: Any, implementation: str = "eager") -> torch.Tensor:
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        return model.eval()(**tokens()).logits


def uneven(spaces: fp.Spaces) -> dict[str, Sequence[int]]:
    """Experts to remove: more from every next block, equally many from every router group."""
    removed = {}
    for number, space in enumerate(spaces):
        each = min(1 + number, (space.size - space.min_keep) // space.groups)
        length = space.size // space.groups
        removed[space.name] = [group * length + i for group in range(space.groups) for i in range(each)]
    return removed


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2-MoE folder as one would download it: several files, experts one by one, a tokenizer with a
    chat template.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("hub") / "qwen"
    model = moe("qwen2_moe", torch.float32, tie_word_embeddings=True)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(folder, max_shard_size="40KB")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(90)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="w0", eos_token="w2", pad_token="w0"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def loaded(folder: Path) -> Any:
    return (
        fp.load(folder)
        if (folder / "plan.json").exists()
        else transformers.AutoModelForCausalLM.from_pretrained(folder)
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_comes_back_bit_for_bit_with_other_counts_in_every_block(
    family: str, tmp_path: Path
) -> None:
    """Through save, through `transformers` with the folder's code, and through a stream that never builds
    the model.
    """
    moe(family, torch.float32).save_pretrained(tmp_path / "whole", max_shard_size="30KB")
    model = getattr(transformers, FAMILIES[family][0]).from_pretrained(tmp_path / "whole")
    spaces = fp.discover(model, tokens(), kinds=["expert"])
    plan = fp.Plan.removing(spaces, uneven(spaces))
    small: Any = fp.cut(model, plan)
    fp.save(small, plan, tmp_path / "small", max_shard_size="30KB")
    stream(tmp_path / "whole", plan, tmp_path / "streamed", max_shard_size="30KB")
    expected = logits(small)
    again = [fp.load(tmp_path / "small"), fp.load(tmp_path / "streamed")]
    if family != "gemma4":  # the text model of a larger one has no Auto class
        auto = next(iter(json.loads((tmp_path / "small" / "config.json").read_text())["auto_map"]))
        again.append(getattr(transformers, auto).from_pretrained(tmp_path / "small", trust_remote_code=True))
    for other in again:
        assert equal_state(small, other)
        assert (
            [b.size for b in expert_blocks(other)]
            == [b.size for b in expert_blocks(small)]
            == [s.size - plan.depths[s.name] for s in spaces]
        )
        torch.testing.assert_close(logits(other), expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(logits(other), expected) for other in again[:2])
    assert type(again[0]) is type(model)
    assert names_of(tmp_path / "small") == names_of(tmp_path / "streamed")


def names_of(folder: Path) -> set[str]:
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            names |= set(opened.keys())
    return names


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "qwen2_moe",
        "qwen3_moe",
        "mixtral",
        "olmoe",
        "deepseek_v3",
        "gpt_oss",
        "granitemoe",
        "ernie4_5_moe",
        "glm4_moe",
    ],
)
def test_equal_counts_make_a_folder_without_code(family: str, tmp_path: Path) -> None:
    """The experts lie in its files as in the original's, and all that transformers 5 renamed also has its
    earlier name: other programs look for those.
    """
    model = moe(family, torch.float32, rope_theta=5000)
    model.save_pretrained(tmp_path / "whole")
    spaces = fp.discover(model, tokens(), kinds=["expert"])
    plan = fp.Plan.removing(
        spaces, {s.name: [g * (s.size // s.groups) for g in range(s.groups)] for s in spaces}
    )
    small: Any = fp.cut(model, plan)
    fp.save(small, plan, tmp_path / "small")
    stream(tmp_path / "whole", plan, tmp_path / "streamed")
    for folder in (tmp_path / "small", tmp_path / "streamed"):
        config = json.loads((folder / "config.json").read_text())
        assert not (folder / "modeling_pruned.py").exists()
        assert "pruned" not in config
        assert "auto_map" not in config
        read = type(model.config).from_dict
        assert (
            read(
                {name: config[name] for name in config if name not in ("rope_parameters", "dtype")}
            ).to_dict()
            == read(config).to_dict()
        )
        assert read(config).rope_parameters["rope_theta"] == config["rope_theta"] == 5000
        alone, told = type(model).from_pretrained(folder, output_loading_info=True)
        assert not told["unexpected_keys"]
        assert not told["missing_keys"]
        assert equal_state(small, alone)
        assert equal_state(small, fp.load(folder))
        assert names_of(folder) <= names_of(tmp_path / "whole")
        assert "vLLM, SGLang" in (folder / "README.md").read_text()


def test_numbers_of_experts_and_rotary_settings_have_their_earlier_names_too(tmp_path: Path) -> None:
    """Transformers 4 would take 128 experts and a base of 10,000 otherwise."""
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    text = {
        "num_experts": 6,
        "rope_parameters": {**scaled, "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
        "dtype": "bfloat16",
    }
    write_config(transformers.Qwen3MoeConfig(**text), tmp_path / "config.json")
    write_config(transformers.Qwen3VLMoeConfig(text_config=text), tmp_path / "parts.json")
    alone, within = (json.loads((tmp_path / name).read_text()) for name in ("config.json", "parts.json"))
    for found in (alone, within["text_config"]):
        assert found["num_experts"] == 6
        assert found["rope_theta"] == 5000
        assert found["rope_scaling"] == scaled
        assert found["partial_rotary_factor"] == 0.5
        assert found["torch_dtype"] == "bfloat16"
    assert "rope_theta" not in within


def test_a_transformers_that_keeps_experts_otherwise_is_told(original: Path) -> None:
    """Version 4 has them one by one."""
    model = loaded(original)
    with pytest.raises(
        ValueError,
        match=(
            r"Qwen2MoeForCausalLM has no model.layers.0.mlp.experts.3.up_proj.weight in the .* written"
            r" with 5\."
        ),
    ):
        resize(model, {"tensors": {"model.layers.0.mlp.experts.3.up_proj.weight": [20, 32]}, "modules": {}})


def plan_for(folder: Path) -> tuple[Any, fp.Plan]:
    """A plan over experts, hidden units and heads at once."""
    model = loaded(folder)
    spaces = fp.discover(model, tokens())
    experts = uneven(spaces.only(["expert"]))
    others = {s.name: range(s.size // 2) for s in spaces if s.kind != "expert"}
    return model, fp.Plan.removing(spaces, {**others, **experts})


def test_experts_heads_and_hidden_units_go_in_one_plan(original: Path, tmp_path: Path) -> None:
    model, plan = plan_for(original)
    assert {s.kind for s in plan.spaces} == {"expert", "head", "hidden"}
    small: Any = fp.cut(model, plan)
    fp.save(small, plan, tmp_path / "small", build=f"hf:{original}", max_shard_size="20KB")
    stream(original, plan, tmp_path / "streamed", max_shard_size="20KB")
    for folder in (tmp_path / "small", tmp_path / "streamed"):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = sorted(folder.glob("model-*.safetensors"))
        assert len(files) > 2
        assert set(index["weight_map"].values()) == {file.name for file in files}
        again = fp.load(folder)
        assert equal_state(small, again)
        assert again.lm_head.weight is again.model.embed_tokens.weight
        assert json.loads((folder / "generation_config.json").read_text())["max_new_tokens"] == 7
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert tokenizer.apply_chat_template([{"role": "user", "content": "w5"}], tokenize=False) == "w5"
    assert (tmp_path / "small" / "config.json").read_bytes() == (
        tmp_path / "streamed" / "config.json"
    ).read_bytes()


def test_a_pruned_folder_is_pruned_again(original: Path, tmp_path: Path) -> None:
    folder = original
    for turn in range(2):
        model = loaded(folder)
        spaces = fp.discover(model, tokens(), kinds=["expert"])
        plan = fp.Plan.removing(spaces, uneven(spaces))
        small = fp.cut(model, plan)
        folder = tmp_path / f"turn{turn}"
        fp.save(small, plan, folder)
        assert equal_state(small, fp.load(folder))
        assert equal_state(
            small, transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        )
    assert [block.size for block in expert_blocks(fp.load(folder))] == [10, 8]


def test_all_backends_agree_and_generation_uses_its_cache(original: Path, tmp_path: Path) -> None:
    model = loaded(original)
    spaces = fp.discover(model, tokens(), kinds=["expert"])
    plan = fp.Plan.removing(spaces, uneven(spaces))
    fp.save(fp.cut(model, plan), plan, tmp_path / "small")
    small = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small", trust_remote_code=True)
    expected = logits(small, "eager")
    for implementation in ("batched_mm", "grouped_mm"):
        torch.testing.assert_close(logits(small, implementation), expected, rtol=1e-4, atol=1e-5)
    prompt = tokens()
    options = {
        "attention_mask": torch.ones_like(prompt["input_ids"]),
        "do_sample": False,
        "max_new_tokens": 6,
    }
    cached, plain = (small.generate(**prompt, **options, use_cache=use) for use in (True, False))
    assert cached.shape[1] == prompt["input_ids"].shape[1] + 6
    assert torch.equal(cached, plain)


@pytest.mark.slow
def test_the_folders_code_needs_no_fairpruner(original: Path, tmp_path: Path) -> None:
    model, plan = plan_for(original)
    small: Any = fp.cut(model, plan)
    fp.save(small, plan, tmp_path / "small")
    script = f"""
import sys
import conftest
sys.modules["fairpruner"] = None
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path / "small")!r}, trust_remote_code=True)
print(sum(p.double().abs().sum().item() for p in model.parameters()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == sum(p.double().abs().sum().item() for p in small.parameters())


def test_files_that_only_the_outer_class_converts_are_converted_for_the_folders_code_too(
    tmp_path: Path,
) -> None:
    """GPT-NeoX calls its head `embed_out` in files; transformers leaves the files of foreign code as they
    are, unless told.
    """
    sizes = {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 24,
    }
    model = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes)).eval()
    spaces = fp.discover(model, tokens(), kinds=["hidden"])
    plan = fp.Plan.removing(spaces, {spaces[0].name: (1, 2)})
    small = fp.cut(model, plan)
    fp.save(small, plan, tmp_path / "small")
    assert "embed_out.weight" in names_of(tmp_path / "small")
    assert equal_state(small, fp.load(tmp_path / "small"))
    assert equal_state(
        small, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small", trust_remote_code=True)
    )


def test_a_listed_block_is_saved_and_loaded(tmp_path: Path) -> None:
    model = plain_moe()
    spaces = fp.discover(model, plain_example())
    plan = fp.Plan.removing(spaces, uneven(spaces.only(["expert"])))
    small = fp.cut(model, plan)
    fp.save(small, plan, tmp_path / "small")
    again = fp.load(tmp_path / "small", build=plain_moe)
    assert equal_state(small, again)
    assert torch.equal(small(plain_example()), again(plain_example()))


def test_files_of_another_plan_or_altered_ones_are_refused(original: Path, tmp_path: Path) -> None:
    model, plan = plan_for(original)
    other = fp.Plan.removing(plan.spaces, {})
    fp.save(fp.cut(model, plan), plan, tmp_path / "small", max_shard_size="20KB")
    other.save(tmp_path / "small" / "plan.json")
    with pytest.raises(
        fp.FairprunerError,
        match=r"plan.json and model-00001-of-\d+.safetensors of folder .* do not belong together",
    ):
        fp.load(tmp_path / "small")
    plan.save(tmp_path / "small" / "plan.json")
    fp.load(tmp_path / "small")
    last = sorted((tmp_path / "small").glob("model-*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1] + b"\x01")
    with pytest.raises(fp.FairprunerError, match="was altered after it was written"):
        fp.load(tmp_path / "small")


def test_a_model_of_several_types_has_them_again(original: Path, tmp_path: Path) -> None:
    model = loaded(original).to(torch.bfloat16)
    model.model.norm.float()
    spaces = fp.discover(loaded(original), tokens(), kinds=["expert"])
    plan = fp.Plan.removing(spaces, uneven(spaces))
    small = fp.cut(model, plan)
    fp.save(small, plan, tmp_path / "small")
    assert {p.dtype for p in small.parameters()} == {torch.bfloat16, torch.float32}
    assert equal_state(small, fp.load(tmp_path / "small"))


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5_000_000_000), ("1.5mb", 1_500_000), (77, 77), ("2KB", 2000)]
)
def test_sizes_are_understood(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "5 apples", "GB", "0KB", "-3MB"])
def test_sizes_that_are_not_are_refused(text: str) -> None:
    with pytest.raises(fp.FairprunerError, match="shard size is"):
        parse_size(text)
