"""Models larger than memory: what `--stream` takes, and whether its scores are those of the model in memory.

*same*: scores of the same tokens by `fp.score` on the model in memory, in float32, and on `fp.Streamed`. The
difference is the largest over all units, signals and spaces, relative to the largest score of its space.
Plans are compared at alpha 0.05, 0.1, 0.2 and 0.4. The time is a ratio of processor times, of two processes
that do nothing else.
*large*: the five commands on a Qwen2-MoE of random weights in bfloat16. Each is a process with RLIMIT_DATA of
4 GB: all memory that it writes to, without the cache of files. Beside it stands the largest VmHWM, which
includes the pages of libraries. The model is written shard by shard into the folder for temporary files.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness.torchvision_shim  # noqa: F401 (transformers imports torchvision)
import torch
from harness import pages, runs

import fairpruner as fp

HERE = Path(__file__).parent
LIMIT = 4_000_000_000  # bytes
TOKENS, BATCHES = 20_000, 10
ALPHAS = (0.05, 0.1, 0.2, 0.4)
LAYERS, HIDDEN, EXPERTS, INNER, VOCABULARY = 16, 512, 336, 512, 512
STAGES = ("discover", "score", "plan", "cut", "evaluate")
COMMAND = "import harness.torchvision_shim; from fairpruner.cli import app; app()"
Row = dict[str, Any]


def cases(quick: bool) -> Iterator[Row]:
    """Equality first, then the large model."""
    for model, tokens in (("tiny Qwen2-MoE", 2048), ("SmolLM2-135M", 1024))[: 1 if quick else 2]:
        yield {"part": "same", "model": model, "tokens": tokens}
    for stage in () if quick else STAGES:
        yield {"part": "large", "stage": stage}


def measure(case: Row, shared: Path) -> Row:
    return same(case, shared.resolve()) if case["part"] == "same" else large(case["stage"])


# --- the same scores ---


def folder_of(model: str, shared: Path) -> Path:
    if model.startswith("tiny"):
        return shared / "weights" / "tiny_qwen2moe"
    sys.path.insert(0, str(shared / "data"))
    from language_models import fetch  # type: ignore[import-not-found]

    found: Path = fetch("smollm2", Path(tempfile.gettempdir()) / "smollm2")
    return found


def same(case: Row, shared: Path) -> Row:
    """Score in two processes, and compare."""
    folder = folder_of(case["model"], shared)
    with tempfile.TemporaryDirectory() as place:
        seconds = {}
        for how in ("memory", "stream"):
            script = (
                f"import larger_than_memory as b; b.scored({str(folder)!r}, {place!r}, {how!r}, {case!r})"
            )
            done = subprocess.run(
                [sys.executable, "-c", script], cwd=HERE, check=True, capture_output=True, text=True
            )
            seconds[how] = float(done.stdout.split()[-1])
        one, other = (fp.Scores.load(f"{place}/{how}.safetensors") for how in ("memory", "stream"))
    difference = 0.0
    for group in ("removals", "protections"):
        for signal, by_space in getattr(one, group).items():
            for name, values in by_space.items():
                largest = float(abs(values).max()) or 1.0
                apart = float(abs(values - getattr(other, group)[signal][name]).max())
                difference = max(difference, apart / largest)
    plans = sum(fp.allocate(one, a).removed == fp.allocate(other, a).removed for a in ALPHAS)
    return {
        "units": sum(space.size for space in one.spaces),
        "difference": difference,
        "plans_same": plans,
        "memory_s": round(seconds["memory"], 1),
        "stream_s": round(seconds["stream"], 1),
        "ratio_cpu": round(seconds["stream"] / seconds["memory"], 2),
    }


def scored(folder: str, place: str, how: str, case: Row) -> None:
    """Score one way, and print the processor seconds without loading and discovery."""
    from fairpruner.inputs.hugging_face import pretrained

    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = [{"input_ids": torch.randint(10, 4000, (2, 256))} for _ in range(case["tokens"] // 512)]
    streamed = fp.Streamed(f"hf:{folder}", work=f"{place}/work")
    spaces = fp.discover(streamed, data[0])
    model = pretrained(folder).float().eval() if how == "memory" else streamed
    start = time.process_time()
    scores = fp.score(model, data, spaces=spaces)
    spent = time.process_time() - start
    scores.save(f"{place}/{how}.safetensors")
    print(spent)


# --- the large model ---


def large(stage: str) -> Row:
    """Run one command under the limit."""
    place = Path(tempfile.gettempdir()) / "fairpruner-larger-than-memory"
    if not (place / "whole" / "config.json").exists():
        write_model(place / "whole")
    (place / "data.py").write_text(
        "import torch\n"
        "def batches():\n"
        "    torch.manual_seed(0)\n"
        f"    shape = ({TOKENS // BATCHES // 250}, 250)\n"
        f"    return [{{'input_ids': torch.randint(0, 256, shape)}} for _ in range({BATCHES})]\n"
    )
    (place / "text.txt").write_text((HERE.parent / "README.md").read_text(encoding="utf-8")[:4096])
    commands = {
        "discover": ["hf:whole", "--stream"],
        "score": ["hf:whole", "--stream", "--data", "data.py:batches", "-o", "scores.safetensors", "--force"],
        "plan": ["scores.safetensors", "--keep", "params=0.7", "-o", "plan.json", "--force"],
        "cut": ["hf:whole", "plan.json", "--stream", "--max-shard-size", "500MB", "-o", "small", "--force"],
        "evaluate": ["hf:small", "--stream", "--text", "text.txt", "--batch-size", "2"],
    }
    start, before = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, stage, *commands[stage], "--json"],
        cwd=place,
        env={**os.environ, "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT)),
    )
    peaks: dict[str, int] = {}
    while process.poll() is None:
        peaks |= {key: max(peaks.get(key, 0), value) for key, value in memory_of(process.pid).items()}
        time.sleep(0.2)
    output, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"{stage} failed: {errors[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = re.search(r"takes up to ([\d.]+) GB", errors)
    found: Row = {
        "model_gb": round(sum(f.stat().st_size for f in (place / "whole").glob("*.safetensors")) / 1e9, 2),
        "limit_gb": LIMIT / 1e9,
        "data_gb": round(peaks["VmData"] / 1e9, 2),
        "peak_gb": round(peaks["VmHWM"] / 1e9, 2),
        "disk_gb": float(said[1]) if said else 0.0,
        "minutes": round((time.time() - start) / 60, 1),
        "cpu_minutes": round((after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 60, 1),
    }
    if stage == "evaluate":
        found["perplexity"] = json.loads(output)["models"]["hf:small"]["text.txt"]["value"]
    if stage == "cut":
        found["small_gb"] = round(
            sum(f.stat().st_size for f in (place / "small").glob("*.safetensors")) / 1e9, 2
        )
    return found


def memory_of(process: int) -> dict[str, int]:
    """VmData and VmHWM of a process, in bytes; nothing if it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    values = dict(line.split(":", 1) for line in lines)
    return {key: int(values[key].split()[0]) * 1024 for key in ("VmData", "VmHWM") if key in values}


def write_model(folder: Path) -> None:
    """A Qwen2-MoE of random weights in bfloat16, one shard for each layer, and a tokenizer of bytes."""
    import transformers
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = transformers.Qwen2MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=INNER,
        moe_intermediate_size=INNER,
        shared_expert_intermediate_size=INNER,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16",
        architectures=["Qwen2MoeForCausalLM"],
    )
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)

    pool = torch.randn(2**24)  # tensors are windows into it, which is much quicker than drawing each anew
    drawn = 0

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        nonlocal drawn
        size = math.prod(shape)
        drawn = (drawn + 7919) % (len(pool) - size)
        return (pool[drawn : drawn + size].view(shape) * (scale / shape[-1] ** 0.5)).bfloat16()

    places: dict[str, str] = {}
    for layer in range(-1, LAYERS):
        tensors: dict[str, torch.Tensor] = {}
        if layer < 0:
            tensors["model.embed_tokens.weight"] = random(VOCABULARY, HIDDEN)
            tensors["model.norm.weight"] = torch.ones(HIDDEN).bfloat16()
        else:
            prefix = f"model.layers.{layer}"
            for name in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{prefix}.{name}.weight"] = torch.ones(HIDDEN).bfloat16()
            for name, width in (("q", HIDDEN), ("k", HIDDEN // 2), ("v", HIDDEN // 2)):
                tensors[f"{prefix}.self_attn.{name}_proj.weight"] = random(width, HIDDEN)
                tensors[f"{prefix}.self_attn.{name}_proj.bias"] = random(width)
            tensors[f"{prefix}.self_attn.o_proj.weight"] = random(HIDDEN, HIDDEN)
            tensors[f"{prefix}.mlp.gate.weight"] = random(EXPERTS, HIDDEN, scale=2)
            tensors[f"{prefix}.mlp.shared_expert_gate.weight"] = random(1, HIDDEN)
            experts = [f"experts.{number}" for number in range(EXPERTS)]
            for part in (*experts, "shared_expert"):
                for name in ("gate", "up", "down"):
                    tensors[f"{prefix}.mlp.{part}.{name}_proj.weight"] = random(INNER, HIDDEN)
        file = f"model-{layer + 2:05d}-of-{LAYERS + 1:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8"
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    config.save_pretrained(folder)  # last: its config.json says that the folder is complete


# --- the page ---


def page() -> str:
    rows = runs.stored("larger_than_memory")
    equal = pages.table(
        (
            "model",
            "tokens",
            "units",
            "largest difference of a score",
            "same plans",
            "time of the pass in memory",
        ),
        [
            (
                row["model"],
                f"{row['tokens']:,}",
                f"{row['units']:,}",
                f"{row['difference']:.1e}",
                f"{row['plans_same']} of {len(ALPHAS)}",
                f"{row['ratio_cpu']:.2f} x",
            )
            for row in rows
            if row["part"] == "same"
        ],
    )
    found = [row for row in rows if row["part"] == "large"]
    if not found:
        return equal
    stages = pages.table(
        ("command", "memory written to, GB", "VmHWM, GB", "work folder, GB", "processor minutes"),
        [
            (
                f"`{row['stage']}`",
                f"{row['data_gb']:.2f}",
                f"{row['peak_gb']:.2f}",
                f"{row['disk_gb']:.2f}",
                f"{row['cpu_minutes']:.1f}",
            )
            for row in found
        ],
    )
    missing = [f"`{stage}`" for stage in STAGES if all(row["stage"] != stage for row in found)]
    rest = f" Not measured yet: {', '.join(missing)}." if missing else ""
    return (
        f"{equal}\n\nA Qwen2-MoE of {found[0]['model_gb']} GB in bfloat16 ({LAYERS} layers of {EXPERTS}"
        f" experts, random weights) under a limit of {found[0]['limit_gb']:.0f} GB (RLIMIT_DATA)."
        f" `score` reads {TOKENS:,} tokens.{rest}\n\n{stages}"
    )
