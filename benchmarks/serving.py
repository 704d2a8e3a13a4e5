"""Whether other versions of transformers, and llama.cpp, load what `save` writes and compute the same.

Half of the experts are removed from the trained tiny Qwen2-MoE, and from models of other families with
random weights and an unusual rotary base. The pruned model notes the 8 tokens that it generates after a few
texts, and all logits. A process without fairpruner loads its folder. A row has the largest difference of a
logit, divided by the largest logit, or why there is none.

The programs are installed into benchmarks/.peers. Rows of llama.cpp are only measured if its source is in
benchmarks/.peers/llama.cpp. Its convert_hf_to_gguf.py refuses unknown tokenizers and models without one. To
avoid this, add to it, before `model_instance = `: `model_class.set_vocab = lambda self:
(self._set_vocab_none(), self.gguf_writer.add_vocab_size(self.hparams["vocab_size"]))`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from harness import runs
from safetensors.torch import load_file, save_file

with suppress(ModuleNotFoundError):
    from harness import torchvision_shim  # noqa: F401 (transformers imports torchvision where there is one)

HERE = Path(__file__).parent
PACKAGES = HERE / ".peers"
CONVERTER = PACKAGES / "llama.cpp" / "convert_hf_to_gguf.py"
LLAMA = "llama.cpp (llama-cpp-python 0.3.36)"
PROGRAMS = {  # and what pip installs
    **{f"transformers {v}": f"transformers=={v}" for v in ("5.22.2", "5.0.0", "4.57.6", "4.46.3")},
    LLAMA: "llama-cpp-python==0.3.36",
}
TRAINED = "tiny_qwen2moe"
UNTIED, UNEVEN = f"{TRAINED}_untied", f"uneven_{TRAINED}"
FAMILIES = (
    "deepseek_v2",
    "deepseek_v3",
    "ernie4_5_moe",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "jamba",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen3_moe",
)
ROTARY_BASE, VOCABULARY = 5000, 4096
TEXTS, LENGTH, WRITTEN = 4, 24, 8
Row = dict[str, Any]


def cases(quick: bool) -> Iterator[Row]:
    models = ("mixtral", TRAINED) if quick else (*FAMILIES, TRAINED, UNTIED, UNEVEN)
    for program in list(PROGRAMS)[:1] if quick else PROGRAMS:
        if program != LLAMA or CONVERTER.exists():
            yield from ({"program": program, "model": model} for model in models)


def measure(case: Row, shared: Path) -> Row:
    """Prune the model here, and load it in a process with the packages of the program."""
    script = f"import serving; serving.print_case({case['program']!r})"
    packages = os.pathsep.join([str(installed(case["program"])), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        make(case["model"], shared, Path(folder))
        if case["program"] == LLAMA and not converted(Path(folder)):
            return {"note": "not converted"}
        command = [sys.executable, "-c", script, folder]
        environment = {**os.environ, "PYTHONPATH": packages}
        done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode == 0 and last.startswith("{"):
        found: Row = json.loads(last)
        return found
    return {"note": f"exit code {done.returncode}: {done.stderr.strip().rpartition(chr(10))[2][:200]}"}


def installed(program: str) -> Path:
    """Where a program is, with what it needs; torch is that of this environment."""
    folder = PACKAGES / PROGRAMS[program]
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.part")
        install = ["install", "--quiet", "--upgrade", "--target", str(partial), PROGRAMS[program]]
        subprocess.run([sys.executable, "-m", "pip", *install], check=True)
        partial.rename(folder)
    return folder


def original(name: str, shared: Path) -> Any:
    """The whole model."""
    sys.path.append(str(HERE.parent / "tests"))
    from moe_zoo import moe

    from fairpruner.inputs.hugging_face import pretrained

    if name not in FAMILIES:
        model: Any = pretrained(str(shared / "weights" / TRAINED)).float()
        if name == UNTIED:  # llama.cpp knows Qwen2-MoE only with a head of its own
            model.config.tie_word_embeddings = False
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        return model
    heads = {"num_key_value_heads": 4} if name == "olmoe" else {}  # llama.cpp knows no shared keys of it
    model = moe(name, torch.float32, vocab_size=VOCABULARY, rope_theta=ROTARY_BASE, **heads)
    for part, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "correction_bias" in part:
            # Where a score plus these is negative, transformers 4 chooses experts of other groups.
            tensor.detach().abs_()
    return model


def make(name: str, shared: Path, folder: Path) -> None:
    """Prune a model, save it, and note what it gives."""
    from routing import read_tokens

    import fairpruner as fp

    texts = read_tokens(shared, "moe_tokens_val")[: TEXTS * LENGTH].view(TEXTS, LENGTH)
    model = original(name, shared)
    spaces = fp.discover(model, {"input_ids": texts}, kinds=["expert"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fp.FairprunerWarning)  # so few texts do not rank experts well
        scores = fp.score(model, [{"input_ids": texts}], spaces=spaces)
    rule = "tod" if name == UNEVEN else "uniform"
    plan = fp.allocate(scores, keep=fp.Budget("experts", 0.5), rule=rule, exact=True)
    small: Any = fp.cut(model, plan)
    fp.save(small, plan, folder / "model")
    written = write_on(small, texts)
    due = {"texts": texts.clone(), "written": written, "logits": logits_of(small, written)}
    save_file(due, folder / "due.safetensors")


def converted(folder: Path) -> bool:
    """Whether llama.cpp converts the model."""
    options = ["--outtype", "f32", "--outfile", str(folder / "model.gguf")]
    command = [sys.executable, str(CONVERTER), str(folder / "model"), *options]
    return subprocess.run(command, capture_output=True).returncode == 0


def write_on(model: Any, texts: torch.Tensor) -> torch.Tensor:
    options = {
        "attention_mask": torch.ones_like(texts),
        "do_sample": False,
        "max_new_tokens": WRITTEN,
        "min_new_tokens": WRITTEN,
    }
    return model.generate(texts, **options)


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens).logits


def print_case(program: str) -> None:
    """What a program that is installed here makes of the folder, as the last line that is printed."""
    sys.modules["fairpruner"] = None  # cannot be imported
    folder = sys.argv[1]
    load = by_llama_cpp if program == LLAMA else by_transformers
    try:
        found = load(Path(folder), load_file(Path(folder) / "due.safetensors"))
    except Exception as error:
        words = " ".join(str(error).replace(folder, "FOLDER").split())
        found = {"note": f"{type(error).__name__}: {words[:200]}"}
    print(json.dumps(found))


def by_transformers(folder: Path, due: dict[str, torch.Tensor]) -> Row:
    """The largest difference, or why there is none."""
    import transformers

    place = folder / "model"
    config = json.loads((place / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] not in transformers.CONFIG_MAPPING:
        return {"note": "unknown to it"}
    code = (place / "modeling_pruned.py").exists()
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        place, trust_remote_code=code, output_loading_info=True
    )
    strange = sorted(map(str, (*told["missing_keys"], *told["unexpected_keys"], *told["mismatched_keys"])))
    if strange:
        return {"note": f"other tensors: {strange[0]}"}
    if not torch.equal(write_on(model, due["texts"]), due["written"]):
        return {"note": "writes other tokens"}
    return difference(logits_of(model, due["written"]), due["logits"])


def by_llama_cpp(folder: Path, due: dict[str, torch.Tensor]) -> Row:
    """The largest difference; the texts are given at once, what was written token after token, through
    the cache.
    """
    import llama_cpp

    model = llama_cpp.Llama(
        str(folder / "model.gguf"),
        n_ctx=LENGTH + WRITTEN,
        logits_all=True,
        verbose=False,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
    )
    found = []
    for tokens in due["written"].tolist():
        model.reset()
        for some in (tokens[:LENGTH], *([token] for token in tokens[LENGTH:])):
            model.eval(some)
        found.append(torch.from_numpy(model.scores[: len(tokens)].copy()))
    return difference(torch.stack(found), due["logits"])


def difference(found: torch.Tensor, due: torch.Tensor) -> Row:
    return {"difference": float((found - due).abs().max() / due.abs().max())}


def page() -> str:
    """Models by programs as Markdown."""
    cells = {(row["model"], row["program"]): words(row) for row in runs.stored("serving")}
    programs = [program for program in PROGRAMS if any(program == of for _, of in cells)]
    lines = [
        f"| {model} | {' | '.join(cells.get((model, program), '') for program in programs)} |"
        for model in sorted({model for model, _ in cells})
    ]
    head = f"| half of the experts of | {' | '.join(programs)} |"
    return "\n".join([head, "|---" * (len(programs) + 1) + "|", *lines])


def words(row: Row) -> str:
    """A row of the results as a cell of the table."""
    if "difference" in row:
        return f"{row['difference']:.0e}" if row["difference"] else "0"
    return "fails" if ":" in row["note"] else str(row["note"])
