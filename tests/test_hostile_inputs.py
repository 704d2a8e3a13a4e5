"""Files, options and streams that users do have: each is read rightly, or refused in one sentence."""

from __future__ import annotations

import codecs
import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fairpruner as fp
from fairpruner.cli import app
from fairpruner.cli.common import show
from fairpruner.cli.reading import DataOptions
from fairpruner.evaluation import TASKS, check_text_unseen, evaluate, perplexity, read_tokens
from fairpruner.inputs.data_files import read_image
from fairpruner.inputs.hugging_face import place_of
from fairpruner.inputs.sources import factory_of, load_model, resolve
from fairpruner.inputs.text import read_rows
from fairpruner.inputs.weights import load_weights
from fairpruner.reporting.plots import draw
from fairpruner.terminal.tables import Printable


def refused(*arguments: object, code: int = 1) -> str:
    """Run a command that must fail without a traceback; what it prints on stderr, on one line."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return " ".join(result.stderr.replace("│", " ").split())


# Images


@pytest.mark.parametrize("mode", ["I;16", "I;16B"])
def test_images_of_16_bits_are_scaled_to_8(mode: str, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.array([[0, 257, 128 * 257, 65535]], dtype="<u2" if mode == "I;16" else ">u2")
    image.frombytes(mode, (4, 1), pixels.tobytes()).save(tmp_path / "grey.tif")
    with image.open(tmp_path / "grey.tif") as stored:
        assert stored.mode == mode
    found = np.array(read_image(tmp_path / "grey.tif"))  # [1, 4, 3]
    assert found.tolist() == [[[value] * 3 for value in (0, 1, 128, 255)]]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_images_of_32_bits_are_refused(mode: str, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new(mode, (4, 4), 1000).save(tmp_path / "deep.tif")
    with pytest.raises(fp.FairprunerError, match=rf"deep.tif has the mode '{mode}' .* save it with 8 bits"):
        read_image(tmp_path / "deep.tif")


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_given_size_keeps_the_librarys_mean_and_std(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "white").mkdir()
    image.new("RGB", (50, 40), "white").save(tmp_path / "white" / "1.png")
    source = f"{library}:resnet18"
    net = factory_of(source)()

    def pixel(**options: Any) -> torch.Tensor:
        ((x, _),) = DataOptions(**options).read(source, net, str(tmp_path))
        assert x.shape == (1, 3, 32, 32)
        return x[0, :, 0, 0]  # type: ignore[no-any-return]

    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(pixel(size=32), (1 - mean) / std)
    torch.testing.assert_close(pixel(size=32, mean="0"), 1 / std)
    torch.testing.assert_close(pixel(size=32, mean="0", std="1"), torch.ones(3))


def test_an_unknown_mean_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(source: str, model: nn.Module) -> None:
        raise OSError("no preprocessor_config.json")

    monkeypatch.setattr("fairpruner.inputs.sources.transform_of", fails)
    with pytest.raises(
        fp.FairprunerError, match=r"mean and std of hf:x are not known .* give --mean and --std"
    ):
        DataOptions(size=8).read("hf:x", nn.Identity(), str(tmp_path))


# Models and weights


def test_a_file_may_hold_dataclasses_with_postponed_annotations(tmp_path: Path) -> None:
    text = """
from __future__ import annotations
from dataclasses import dataclass
from torch import nn

@dataclass
class Config:
    width: int = {width}

def build() -> nn.Module:
    return nn.Linear(Config().width, 1)
"""
    for folder, width in (("a", 3), ("b", 5)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "net.py").write_text(text.format(width=width))
    first, second = (resolve(f"{tmp_path / folder / 'net.py'}:Config") for folder in "ab")
    assert first.__module__ != second.__module__
    assert sys.modules[first.__module__].Config is first
    assert load_model(f"{tmp_path / 'b' / 'net.py'}:build").in_features == 5


def test_a_file_that_fails_is_not_left_among_the_modules(tmp_path: Path) -> None:
    (tmp_path / "breaks.py").write_text("raise OSError('no disk')")
    with pytest.raises(fp.FairprunerError, match="no disk"):
        resolve(f"{tmp_path / 'breaks.py'}:build")
    assert not [name for name in sys.modules if name.startswith("breaks")]


def test_a_home_folder_behind_hf_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    assert place_of("hf:~/folder") == "/home/ann/folder"
    assert place_of("hf:owner/name") == "owner/name"
    asked: list[str] = []
    monkeypatch.setattr("fairpruner.inputs.hugging_face.pretrained", lambda place: asked.append(place))
    load_model("hf:~/folder")
    assert asked == ["/home/ann/folder"]


def test_the_refusal_of_weights_names_their_prefix_or_wrapper(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    torch.save({f"module.{name}": tensor for name, tensor in net.state_dict().items()}, tmp_path / "w.pt")
    with pytest.raises(fp.FairprunerError, match=r"begins with 'module\.'.*removeprefix\('module\.'\)"):
        load_weights(net, tmp_path / "w.pt")
    torch.save({"model_state_dict": net.state_dict(), "epoch": 3}, tmp_path / "w.pt")
    with pytest.raises(fp.FairprunerError, match="Save the value of 'model_state_dict' alone"):
        load_weights(net, tmp_path / "w.pt")


# Texts and evaluation


class Constant(nn.Module):
    """Gives the first token this logit, and all others 0."""

    def __init__(self, logit: float) -> None:
        super().__init__()
        self.logit = logit

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*input_ids.shape, 10)
        logits[..., 0] = self.logit
        return logits


@pytest.mark.parametrize(("logit", "word"), [(1e6, "1e"), (float("nan"), "nan")])
def test_a_perplexity_that_is_not_finite_is_one_sentence(logit: float, word: str) -> None:
    with pytest.raises(fp.FairprunerError, match=rf"token is {word}.*check the model's weights"):
        perplexity(Constant(logit), torch.arange(1, 9), length=4)


def test_numbers_that_json_cannot_hold_are_one_sentence() -> None:
    with pytest.raises(fp.FairprunerError, match="leave out --json"):
        show(Printable("", {"value": float("nan")}), as_json=True)


def test_a_batch_size_of_0_is_refused() -> None:
    with pytest.raises(fp.FairprunerError, match="batch_size=0, expected a whole number of at least 1"):
        perplexity(Constant(0), torch.arange(9), length=4, batch_size=0)
    with pytest.raises(fp.FairprunerError, match="batch_size=0"):
        evaluate(Constant(0), None, {}, batch_size=0)


def test_texts_that_cannot_be_read_are_one_sentence(tmp_path: Path) -> None:
    good, latin, packed = (tmp_path / name for name in ("good.txt", "latin.txt", "packed.txt.xz"))
    good.write_text("a text")
    latin.write_bytes("é".encode("latin-1"))
    packed.write_bytes(b"not packed")
    for bad in (latin, tmp_path / "missing.txt"):
        for text, calibration in ((bad, good), (good, bad)):
            with pytest.raises(fp.FairprunerError, match=bad.name):
                check_text_unseen(text, calibration)
    with pytest.raises(fp.FairprunerError, match=r"packed\.txt\.xz cannot be read"):
        read_tokens(packed, None)


def test_a_byte_order_mark_is_not_part_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_bytes(codecs.BOM_UTF8 + b"text,label\r\na,1\r\n")
    (tmp_path / "d.jsonl").write_bytes(codecs.BOM_UTF8 + b'{"text": "a", "label": "1"}\n')
    for name in ("d.csv", "d.jsonl"):
        assert read_rows(tmp_path / name) == [{"text": "a", "label": "1"}]


def write_csv(path: Path, row: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerow(row)
    return path


@pytest.mark.parametrize(("label", "answer"), [("0", "no"), ("1", "yes"), ("False", "no"), ("true", "yes")])
def test_labels_of_a_csv_are_converted(label: str, answer: str, tmp_path: Path) -> None:
    row = {"word": "w", "sentence1": "a", "sentence2": "b", "label": label}
    (item,) = TASKS["wic"].read(write_csv(tmp_path / "wic.csv", row))
    assert TASKS["wic"].answer(item) == answer


def test_options_of_a_csv_are_a_json_list(tmp_path: Path) -> None:
    row = {"question": "q", "answer": "B", "answer_index": "1", "category": "c", "options": '["x", "y"]'}
    task = TASKS["mmlu_pro"]
    (item,) = task.read(write_csv(tmp_path / "good.csv", row))
    assert task.answer(item) == "B"
    assert "A. x\nB. y\n" in task.prompt(item)
    for options in ("['x' 'y']", '"xy"'):
        with pytest.raises(fp.FairprunerError, match=r"Item 1 of .* the options are"):
            task.read(write_csv(tmp_path / "bad.csv", {**row, "options": options}))


# Figures and options


@pytest.mark.parametrize(
    "content",
    [
        [[0.1, 0.9]],
        {},
        {"ToD": [["a", "b"]]},
        {"ToD": ["12"]},
        {"ToD": 3},
        {"format": "plan", "removed": {"a": [1]}},
    ],
)
def test_an_ablation_of_other_content_is_one_sentence(content: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "curves.json").write_text(json.dumps(content))
    with pytest.raises(fp.FairprunerError, match=r"curves.json is invalid\. .*expected \{\"method\": "):
        draw("ablation", tmp_path / "curves.json", tmp_path / "out.png")


def test_options_without_effect_are_refused(tmp_path: Path) -> None:
    net, out = "torch.nn:Identity", tmp_path / "out"
    assert "without --repair" in refused("cut", net, "plan.json", "--data", "d.npz", "-o", out)
    told = refused("cut", net, "plan.json", "--samples", "8", "--length", "9", "-o", out)
    assert "Found --samples, --length without --data" in told
    for option in ("--train", "--augment", "--checkpoints", "--learning-rate"):
        told = refused("prune", net, "--data", "d.npz", option, "0.1", "-o", out)
        assert f"Found {option} without --recover-epochs" in told
    told = refused("report", tmp_path, "--removal", "nonsense", "-o", tmp_path / "page.html")
    assert "choose signals of a scores file" in told


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (
            "f.py:batches",
            ["--mean", "0.5"],
            "--mean applies to images and arrays, and f.py:batches gives",
        ),
        ("f.py:batches", ["--batch-size", "8"], "--batch-size applies to images and arrays and texts, and f"),
        ("texts.csv", ["--size", "8"], "--size applies to images, and texts.csv gives texts: leave it out"),
        ("d.npz", ["--size", "8"], "--size applies to images, and d.npz gives arrays"),
        (".", ["--label-column", "class"], "--label-column applies to texts, and . gives images"),
        (".", ["--length", "8"], "--length applies to texts"),
        (".", ["--text-column", "b"], "--text-column applies to texts"),
    ],
)
def test_options_for_other_data_are_refused(data: str, options: list[str], message: str) -> None:
    assert message in refused("score", "torch.nn:Identity", "--data", data, *options, "-o", "out.safetensors")


def test_an_option_that_fits_one_of_two_sources_is_used(tmp_path: Path) -> None:
    both = ["--data", "d.npz", "--train", tmp_path, "--recover-epochs", "1", "--alpha", "0.1"]
    told = refused("prune", "nothing:build", *both, "--size", "8", "-o", tmp_path / "out")
    assert "nothing does not import" in told


def test_data_that_does_not_exist_is_reported_before_its_options() -> None:
    told = refused("score", "torch.nn:Identity", "--data", "nowhere", "--size", "8", "-o", "out.safetensors")
    assert "'nowhere' is neither a folder that exists" in told


def test_folders_with_other_classes_are_refused(tmp_path: Path) -> None:
    for name in ("photos/ant", "photos/bee", "photos/.git", "held/bee"):
        (tmp_path / name).mkdir(parents=True)
    sources = ["--data", tmp_path / "photos", "--validation", tmp_path / "held", "--model", "nothing:build"]
    told = refused("recover", tmp_path / "small", *sources, "-o", tmp_path / "out")
    assert "has the class subfolder ant, so a class would have two labels" in told
    (tmp_path / "held" / "ant").mkdir()
    assert "ant" not in refused("recover", tmp_path / "small", *sources, "-o", tmp_path / "out")


def test_checkpoints_stay_out_of_folders_that_are_read(tmp_path: Path) -> None:
    for name in ("small", "other", "photos"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / "plan.json").write_text("{}")
    for name in ("small", "other", "photos"):
        sources = [tmp_path / "small", "--data", tmp_path / "photos", "--model", "nothing:build"]
        told = refused("recover", *sources, "--checkpoints", tmp_path / name, "-o", tmp_path / "out")
        assert f"{name} is a folder that this command reads, or holds a pruned model" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["discover", "--size", "8"], "Found --size without --data"),
        (["discover", "--shape", "8", "--data", "d.npz"], "Found --shape 8 and --data d.npz, expected one"),
        (["cut", "plan.json", "--work", "w"], "Found --work w without --stream"),
        (
            ["cut", "plan.json", "--repair", "sequental"],
            "method 'sequental': did you mean 'sequential",
        ),
        (["score", "--data", "d.npz", "--work", "w"], "Found --work w without --stream"),
        (["prune", "--data", "d.npz", "--alpha", "0.1", "--effort", "9"], "--effort 9 applies to the search"),
        (["prune", "--data", "d.npz"], "found neither: give --alpha 0.1 or --keep flops=0.5"),
        (["prune", "--data", "d.npz", "--alpha", "0", "--repair", "mena"], "did you mean 'mean'"),
    ],
)
def test_options_are_checked_before_the_model_is_built(arguments: list[str], message: str) -> None:
    assert message in refused(arguments[0], "nothing:build", *arguments[1:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["measure", "torch.nn:Identity", "--shape", "3", "--batch-sizes", "0"],
            "--batch-sizes 0: '0' is not a whole",
        ),
        (["plan", "x", "--keep", "flops=abc"], "--keep flops=abc: 'abc' is not a number; give flops=0.5 or"),
        (["plan", "x", "--keep", "flops"], "--keep flops: no amount; give flops=0.5 or flops=1000000"),
        (["discover", "torch.nn:Identity", "--shape", "3,²"], "--shape 3,²: '²' is not a whole number"),
    ],
)
def test_a_misread_value_is_reported_with_its_option(arguments: list[str], message: str) -> None:
    assert message in refused(*arguments, code=2)


# Streams


def printing(shell: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command that prints characters that Latin-1 lacks, in a process started by a shell."""
    (tmp_path / "printing.py").write_text(
        """
import sys
from fairpruner.__main__ import main
from fairpruner.cli.common import app, show
from fairpruner.terminal.tables import Printable

@app.command()
def say() -> None:
    show(Printable("before \u2192 after \u2026", {}), as_json=False)
    print("note \u2192 \u2026", file=sys.stderr)

sys.argv = ["fairpruner", "say"]
main()
""",
        encoding="utf-8",
    )
    command = f"'{sys.executable}' '{tmp_path / 'printing.py'}' {shell}"
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    return done


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_printing_works_on_every_stream(tmp_path: Path) -> None:
    done = printing("", tmp_path, PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "before ? after ?", "note ? ?\n")
    assert printing(">&-", tmp_path).returncode == 0
    assert printing("2>&-", tmp_path).returncode == 0
    done = printing(">/dev/full", tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "Error: Cannot write: No space left on device. Free some space, or choose another place.\n"
    )
