"""Models of Hugging Face by name: loaded, cut, saved, loaded again bit for bit, and by `transformers`
itself where that can be.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import outputs, some_units
from torch import nn
from transformers_zoo import HUGGING_FACE, hugging_face, tokens
from typer.testing import CliRunner

import fairpruner as fp
from fairpruner.cli import app
from fairpruner.inputs.hugging_face import example_for
from fairpruner.inputs.sources import factory_of, load_model, transform_of

transformers = pytest.importorskip("transformers")

WORDS = ["good", "bad", "film", "plot", "a", "the", "was", "very", "not", "it", "and", "of", "boring", "fine"]


def example_of(family: str) -> dict[str, torch.Tensor]:
    return {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in HUGGING_FACE[family][3]().items()
    }


def same(a: nn.Module, b: nn.Module, example: Any) -> bool:
    pairs = zip(outputs(a, example), outputs(b, example), strict=True)
    return a.state_dict().keys() == b.state_dict().keys() and all(torch.equal(x, y) for x, y in pairs)


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[EOS]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[EOS]"
    ).save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Saved models, as one would download them: without a padding token, as many language models are."""
    made = {}
    for family in ("bert", "llama"):
        folder = made[family] = tmp_path_factory.mktemp("hub") / family
        torch.manual_seed(1)
        hugging_face(family).save_pretrained(folder)
        save_tokenizer(folder)
    return made


def test_a_source_loads_weights_and_a_factory_only_builds(folders: dict[str, Path]) -> None:
    source = f"hf:{folders['bert']}"
    model, built = load_model(source), factory_of(source)()
    assert type(model) is type(built) is transformers.BertForSequenceClassification
    saved = transformers.BertForSequenceClassification.from_pretrained(folders["bert"])
    assert same(model, saved, tokens())
    assert not torch.equal(built.classifier.weight, saved.classifier.weight)
    assert built.classifier.weight.shape == saved.classifier.weight.shape


def test_a_weights_file_takes_the_place_of_the_folders_own(folders: dict[str, Path]) -> None:
    weights = folders["bert"] / "model.safetensors"
    assert same(load_model(f"hf:{folders['bert']}", weights), load_model(f"hf:{folders['bert']}"), tokens())


def test_an_example_for_every_kind_of_input() -> None:
    for family in ("bert", "t5", "vit"):
        assert len(fp.discover(hugging_face(family).float(), example_for(hugging_face(family))))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not a folder here, and no model of this name can be downloaded from the hub: OSError"),
        (
            {"model_type": "bert", "architectures": ["BertForNothing"]},
            "is a 'BertForNothing', which is no model of transformers",
        ),
        ({"model_type": "no-such-type"}, "cannot be loaded: "),
        (
            {
                "model_type": "bert",
                "architectures": ["BertModel"],
                "hidden_size": 32,
                "num_attention_heads": 4,
            },
            "cannot be loaded: OSError",
        ),
    ],
)
def test_a_wrong_source_is_one_clear_line(
    content: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "model"
    if content is not None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(fp.FairprunerError, match=message) as raised:
        load_model(f"hf:{folder}")
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["bert", "distilbert", "gpt2", "llama", "qwen3", "gemma", "t5", "vit", "clip"]
)
def test_blocks_of_different_sizes_come_back_bit_for_bit_without_build(family: str, tmp_path: Path) -> None:
    model, example = hugging_face(family).float(), example_of(family)
    spaces = fp.discover(model, example)
    removed = some_units(spaces, 0.5, 0)
    first = next(s.name for s in spaces if s.kind == "hidden")
    plan = fp.Plan.removing(spaces, {**removed, first: removed[first][:3]})
    small = fp.cut(model, plan)
    fp.save(small, plan, tmp_path / "small")
    again = fp.load(tmp_path / "small")
    assert same(small, again, example)
    assert all(
        torch.equal(x, y) for x, y in zip(small.parameters(), again.parameters(), strict=True)
    )  # tied ones count once
    readme = (tmp_path / "small" / "README.md").read_text()
    assert 'fp.load("path/to/this/folder")' in readme
    assert "cannot describe this model: a configuration has one number for all blocks" in readme
    with pytest.raises((RuntimeError, ValueError)):
        type(model).from_pretrained(tmp_path / "small")
    assert same(small, load_model(f"hf:{tmp_path / 'small'}"), example)
    auto = getattr(
        transformers, next(iter(json.loads((tmp_path / "small" / "config.json").read_text())["auto_map"]))
    )
    assert f'{auto.__name__}.from_pretrained("path/to/this/folder", trust_remote_code=True)' in readme
    assert same(small, auto.from_pretrained(tmp_path / "small", trust_remote_code=True), example)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("bert", ("hidden",)),
        ("gpt2", ("hidden",)),
        *(
            (family, ("head", "hidden"))
            for family in ("llama", "qwen2", "qwen3", "gemma", "gemma3", "t5", "vit", "deit")
        ),
    ],
)
def test_blocks_of_one_size_are_loaded_by_transformers_itself(
    family: str, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    model, example = hugging_face(family).float(), example_of(family)
    spaces = fp.discover(model, example)
    inner = [s for s in spaces if s.kind in kinds and "pooler" not in s.name]
    plan = fp.Plan.removing(spaces, {s.name: range(s.size // 2) for s in inner})
    small = fp.cut(model, plan)
    fp.save(small, plan, tmp_path / "small")
    alone, loading = type(model).from_pretrained(tmp_path / "small", output_loading_info=True)
    assert not loading["unexpected_keys"]
    assert not loading["mismatched_keys"]
    assert same(small, alone, example)
    assert same(small, fp.load(tmp_path / "small"), example)
    assert same(small, load_model(f"hf:{tmp_path / 'small'}"), example)
    assert f"{type(model).__name__}.from_pretrained" in (tmp_path / "small" / "README.md").read_text()


def test_heads_that_a_configuration_cannot_count_are_told(tmp_path: Path) -> None:
    """BERT takes the width of a head from the embedding: all of its blocks with half the heads are still
    not a configuration.
    """
    model = hugging_face("bert")
    spaces = fp.discover(model, tokens())
    plan = fp.Plan.removing(spaces, {s.name: (0, 1) for s in spaces if s.kind == "head"})
    fp.save(fp.cut(model, plan), plan, tmp_path / "small")
    readme = (tmp_path / "small" / "README.md").read_text()
    assert "attention.self.query.weight would have the shape [32, 32] instead of [16, 32]" in readme


def test_the_tokenizer_and_how_to_generate_come_along(folders: dict[str, Path], tmp_path: Path) -> None:
    source = f"hf:{folders['llama']}"
    model = load_model(source)
    model.generation_config.max_new_tokens = 5
    spaces = fp.discover(model, tokens())
    plan = fp.Plan.removing(spaces, some_units(spaces, 0.5, 0))
    small = fp.cut(model, plan)
    fp.save(small, plan, tmp_path / "small", build=source)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "small")
    prompt = tokenizer("the film was very", return_tensors="pt")
    again = fp.load(tmp_path / "small")
    assert json.loads((tmp_path / "small" / "generation_config.json").read_text())["max_new_tokens"] == 5
    assert type(again) is type(small)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        words = [
            m.generate(input_ids=prompt["input_ids"], max_new_tokens=5, do_sample=False, pad_token_id=0)
            for m in (small, again)
        ]
    assert torch.equal(*words)
    fp.save(small, plan, tmp_path / "by_name", build=source)
    assert same(small, fp.load(tmp_path / "by_name", build=source), tokens())


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    hugging_face("llama").save_pretrained(tmp_path / "whole")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.bfloat16)
    spaces = fp.discover(model, tokens())
    plan = fp.Plan.removing(spaces, {s.name: (0,) for s in spaces})
    small = fp.cut(model, plan)
    fp.save(small, plan, tmp_path / "small")
    assert same(small, fp.load(tmp_path / "small"), tokens())
    assert same(small, transformers.LlamaForCausalLM.from_pretrained(tmp_path / "small"), tokens())


def test_a_folder_of_another_library_needs_build(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    plan = fp.Plan.removing(fp.discover(model, torch.zeros(1, 4)), {"0": (1,)})
    fp.save(fp.cut(model, plan), plan, tmp_path / "small")
    with pytest.raises(fp.FairprunerError, match="does not hold the original architecture: give build="):
        fp.load(tmp_path / "small")


def run(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def reviews(folder: Path) -> Path:
    """Real enough: texts of different lengths with a class each."""
    rng = torch.Generator().manual_seed(0)
    rows = []
    for i in range(24):
        words = [WORDS[int(j)] for j in torch.randint(len(WORDS), (3 + i % 7,), generator=rng)]
        rows.append(
            {"text": " ".join(words), "second": "it was fine", "stars": i % 2, "mood": ("bad", "good")[i % 2]}
        )
    path = folder / "reviews.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options", "signals"),
    [
        ("bert", ("--label-column", "stars"), ("wasserstein", "taylor")),
        (
            "bert",
            ("--label-column", "mood", "--text-column", "text,second", "--length", "9"),
            ("wasserstein", "taylor2"),
        ),
        ("llama", (), ("activation", "taylor")),
        ("llama", ("--label-column", "stars"), ("wasserstein", "taylor")),
    ],
)
def test_from_texts_to_a_smaller_model_on_the_command_line(
    family: str, options: Any, signals: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    source, data = f"hf:{folders[family]}", reviews(tmp_path)
    scores, plan, small = tmp_path / "scores.safetensors", tmp_path / "plan.json", tmp_path / "small"
    told = run("discover", source, "--json")
    assert {space["kind"] for space in json.loads(told.stdout)["spaces"]} == {"head", "hidden"}
    chosen = ("--removal", signals[0], "--protection", signals[1], "--batch-size", 8)
    run("score", source, "--data", data, *options, *chosen, "-o", scores)
    assert fp.Scores.load(scores).samples == 24
    assert fp.Scores.load(scores).active == signals
    run("plan", scores, "--keep", "units=0.6", "-o", plan)
    run("cut", source, plan, "-o", small)
    run("cut", source, plan, "-o", small, "--force")
    assert same(fp.cut(load_model(source), fp.Plan.load(plan)), fp.load(small), tokens())
    assert (small / "tokenizer.json").read_bytes() == (folders[family] / "tokenizer.json").read_bytes()


def test_what_text_cannot_do_is_one_line(folders: dict[str, Path], tmp_path: Path) -> None:
    data = reviews(tmp_path)
    for arguments, message in [
        (
            (f"hf:{folders['bert']}", "--data", data),
            (
                "BertForSequenceClassification is not a causal language model, so its texts need classes:"
                " give --label-column"
            ),
        ),
        (
            (f"hf:{folders['llama']}", "--data", data, "--removal", "wasserstein"),
            "Signal 'wasserstein' compares classes, and batch 0 has none",
        ),
        (
            ("torch.nn:Identity", "--data", data, "--label-column", "stars"),
            "torch.nn:Identity has no tokenizer",
        ),
        (
            (f"hf:{folders['bert']}", "--data", data, "--label-column", "star"),
            "Unknown column of .* 'star': did you mean 'stars'",
        ),
        (
            (f"hf:{folders['bert']}", "--data", data, "--label-column", "text"),
            "expected class indices below the 2 logits",
        ),
    ]:
        result = run("score", *arguments, "-o", tmp_path / "scores.safetensors", code=1)
        assert result.stdout == ""
        assert re.fullmatch(f"Error: .*{message}.*\n", result.stderr), result.stderr


def test_image_folders_go_through_the_models_own_preprocessing(tmp_path: Path) -> None:
    from PIL import Image

    hugging_face("vit").float().save_pretrained(tmp_path / "vit")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.ViTImageProcessor(
            size={"height": 32, "width": 32}, image_mean=[0.5] * 3, image_std=[0.5] * 3
        ).save_pretrained(tmp_path / "vit")
        for name in ("black", "white"):
            (tmp_path / "images" / name).mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (50, 40), name).save(tmp_path / "images" / name / f"{i}.png")
        source = f"hf:{tmp_path / 'vit'}"
        transform = transform_of(source, load_model(source))
        assert transform is not None
        torch.testing.assert_close(transform(Image.new("RGB", (50, 40), "white")), torch.ones(3, 32, 32))
        run("score", source, "--data", tmp_path / "images", "-o", tmp_path / "scores.safetensors")
