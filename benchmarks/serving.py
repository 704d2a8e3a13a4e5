"""Whether other versions of transformers, and llama.cpp, load what `save` writes and compute the same.

    python benchmarks/serving.py --make FOLDER --shared ../shared   # prunes tiny MoE models
    python benchmarks/serving.py --check FOLDER                     # needs no fairpruner
    python benchmarks/serving.py --check-gguf FOLDER                # needs torch and llama-cpp-python
    python benchmarks/serving.py --table                            # only writes the table of docs/moe.md

Half of the experts are removed from the trained tiny Qwen2-MoE, and from models of other families with
random weights and an unusual rotary base. Each folder also holds the outputs of the cut model for a few
texts: the 8 tokens that it generates, and all logits. The table shows the largest difference of a logit,
divided by the largest logit. For llama.cpp, first run `python convert_hf_to_gguf.py FOLDER/NAME --outtype
f32 --outfile FOLDER/NAME.gguf` for each model to check. The converter refuses unknown tokenizers and models
without one. To avoid this, add to a copy of it, before `model_instance = `: `model_class.set_vocab = lambda
self: (self._set_vocab_none(), self.gguf_writer.add_vocab_size(self.hparams["vocab_size"]))`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pages
import torch
from safetensors.torch import load_file, save_file

with suppress(ModuleNotFoundError):
    import torchvision_shim  # noqa: F401 (transformers imports torchvision where there is one)

RESULTS = Path(__file__).parent / "results" / "serving.json"
TRAINED = "tiny_qwen2moe"
UNTIED, UNEVEN = (
    f"{TRAINED}_untied",
    f"uneven_{TRAINED}",
)  # the latter comes last: old versions keep its class for all models of the family
FAMILIES = (
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "granitemoe",
    "phimoe",
    "glm4_moe",
    "ernie4_5_moe",
    "jamba",
)
ROTARY_BASE, VOCABULARY = 5000, 4096
TEXTS, LENGTH, WRITTEN = 4, 24, 8


def originals(shared: Path) -> Iterator[tuple[str, str, Any]]:
    """The name of each model, the rule it is pruned by, and the model."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from moe_zoo import moe

    from fairpruner.inputs.hugging_face import pretrained

    trained: Any = pretrained(str(shared / "weights" / TRAINED)).float()
    yield TRAINED, "uniform", trained
    yield UNEVEN, "tod", trained
    trained.config.tie_word_embeddings = False  # llama.cpp knows Qwen2-MoE only with a head of its own
    trained.lm_head.weight = torch.nn.Parameter(trained.lm_head.weight.detach().clone())
    yield UNTIED, "uniform", trained
    for family in FAMILIES:
        heads = (
            {"num_key_value_heads": 4} if family == "olmoe" else {}
        )  # llama.cpp knows it only without shared keys
        model = moe(family, torch.float32, vocab_size=VOCABULARY, rope_theta=ROTARY_BASE, **heads)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if (
                "correction_bias" in name
            ):  # where a score plus these is negative, transformers 4 chooses experts of other groups
                tensor.detach().abs_()
        yield family, "uniform", model


def make(folder: Path, shared: Path) -> None:
    """Prune every model, save it, and note what it gives."""
    from routing import read_tokens

    import fairpruner as fp

    texts = read_tokens(shared, "moe_tokens_val")[: TEXTS * LENGTH].view(TEXTS, LENGTH)
    for name, rule, model in originals(shared):
        spaces = fp.discover(model, {"input_ids": texts}, kinds=["expert"])
        scores = fp.score(model, [{"input_ids": texts}], spaces=spaces)
        plan = fp.allocate(scores, keep=fp.Budget("experts", 0.5), rule=rule, exact=True)
        small: Any = fp.cut(model, plan)
        fp.save(small, plan, folder / name)
        written = write_on(small, texts)
        save_file(
            {"texts": texts.clone(), "written": written, "logits": logits_of(small, written)},
            folder / f"{name}.safetensors",
        )


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


def difference(found: torch.Tensor, due: torch.Tensor) -> float:
    return float((found - due).abs().max() / due.abs().max())


def by_transformers(place: Path, due: dict[str, torch.Tensor]) -> float | str:
    """The largest difference, or why there is none."""
    import transformers

    if (
        json.loads((place / "config.json").read_text(encoding="utf-8"))["model_type"]
        not in transformers.CONFIG_MAPPING
    ):
        return "unknown to it"
    code = (place / "modeling_pruned.py").exists()
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        place, trust_remote_code=code, output_loading_info=True
    )
    strange = sorted(map(str, (*told["missing_keys"], *told["unexpected_keys"], *told["mismatched_keys"])))
    if strange:
        return f"other tensors: {strange[0]}"
    if not torch.equal(write_on(model, due["texts"]), due["written"]):
        return "writes other tokens"
    return difference(logits_of(model, due["written"]), due["logits"])


def by_llama_cpp(place: Path, due: dict[str, torch.Tensor]) -> float | str:
    """The largest difference; the texts are given at once, what was written token after token, through
    the cache.
    """
    import llama_cpp

    file = place.with_name(f"{place.name}.gguf")
    if not file.exists():
        return "not converted"
    model = llama_cpp.Llama(
        str(file),
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


def check(
    folder: Path, load: Callable[[Path, dict[str, torch.Tensor]], float | str]
) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            found[file.stem] = load(file.with_suffix(""), load_file(file))
        except Exception as error:
            found[file.stem] = (
                f"{type(error).__name__}: {' '.join(str(error).replace(str(folder), 'FOLDER').split())[:200]}"
            )
        print(file.stem, found[file.stem], flush=True)
    return found


def page() -> str:
    """Models by programs as Markdown."""
    results = pages.results("serving")
    models = sorted({model for found in results.values() for model in found})
    lines = [f"| half of the experts of | {' | '.join(results)} |", "|---" * (len(results) + 1) + "|"]
    for model in models:
        cells = (found.get(model, "") for found in results.values())
        shown = (
            (
                f"{cell:.0e}"
                if isinstance(cell, float) and cell
                else "0"
                if cell == 0
                else "fails"
                if ":" in cell
                else cell
            )
            for cell in cells
        )
        lines.append(f"| {model} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shared",
        type=Path,
        default=Path("../shared"),
        help="folder with data/text and weights/tiny_qwen2moe",
    )
    parser.add_argument("--make", type=Path, help="an empty folder for the pruned models")
    parser.add_argument("--check", type=Path, help="that folder, with whatever transformers is here")
    parser.add_argument("--check-gguf", type=Path, help="that folder, with llama.cpp")
    parser.add_argument("--table", action="store_true", help="put the table into docs/moe.md, check nothing")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if options.make:
        make(options.make, options.shared)
    if options.check:
        import transformers

        results[f"transformers {transformers.__version__}"] = check(options.check, by_transformers)
    if options.check_gguf:
        import llama_cpp

        results[f"llama.cpp (llama-cpp-python {llama_cpp.__version__})"] = check(
            options.check_gguf, by_llama_cpp
        )
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if options.table:
        pages.fill("serving", page())


if __name__ == "__main__":
    main()
