"""Texts as calibration data: files of texts, tokens and their padding, the loss of language models, what
signals see of tokens.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from transformers_zoo import hugging_face

import fairpruner as fp
from fairpruner.inputs.batches import read_batches
from fairpruner.inputs.datasets import Sampling
from fairpruner.inputs.losses import mean_loss
from fairpruner.inputs.text import Columns, load_text
from fairpruner.inputs.tokens import IGNORED, targets_of
from fairpruner.models.features import LastInput

CPU = torch.device("cpu")


def by_letter(
    first: list[str], second: list[str] | None = None, *, max_length: int, **options: Any
) -> dict[str, Tensor]:
    """A tokenizer of letters: 0 is padding, on the right."""
    assert options == {"padding": True, "truncation": True, "return_tensors": "pt"}
    texts = [(a + b)[:max_length] for a, b in zip(first, second or [""] * len(first), strict=True)]
    ids = nn.utils.rnn.pad_sequence(
        [torch.tensor([ord(letter) for letter in text]) for text in texts], batch_first=True
    )
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


ROWS = [
    {"text": "abc", "more": "xy", "class": "yes", "number": 1},
    {"text": "de", "more": "z", "class": "no", "number": 0},
    {"text": "fghij", "more": "w", "class": "yes", "number": 1},
]


def write(folder: Path, suffix: str, rows: list[dict[str, Any]] = ROWS) -> Path:
    path = folder / f"texts{suffix}"
    if suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return path


def read(path: Path, columns: Columns, **options: Any) -> dict[str, int]:
    """Text -> label, over all batches of two."""
    found = {}
    for batch in load_text(path, by_letter, Sampling(batch_size=2), columns, **options):
        assert batch["attention_mask"].equal((batch["input_ids"] > 0).long())
        assert (
            int(batch["attention_mask"].sum(1).max()) == batch["input_ids"].shape[1]
        )  # no wider than its longest text
        for ids, label in zip(
            batch["input_ids"], batch.get("labels", torch.full((len(batch["input_ids"]),), -1)), strict=True
        ):
            found["".join(chr(i) for i in ids if i)] = int(label)
    return found


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_texts_and_their_classes(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path, suffix)
    assert read(path, Columns()) == {"abc": -1, "de": -1, "fghij": -1}
    assert read(path, Columns(label="number")) == {"abc": 1, "de": 0, "fghij": 1}
    assert read(path, Columns(label="class")) == {"abc": 1, "de": 0, "fghij": 1}
    assert read(path, Columns(label="class"), classes={"yes": 0, "no": 2}) == {"abc": 0, "de": 2, "fghij": 0}
    with pytest.warns(fp.FairprunerWarning, match="numbered in sorted order: no = 0, yes = 1"):
        found = read(path, Columns(label="class"), classes={"LABEL_0": 0})
    assert found == {"abc": 1, "de": 0, "fghij": 1}
    with pytest.raises(fp.FairprunerError, match=r"Unknown class of the model in .* 'no': did you mean 'No'"):
        read(path, Columns(label="class"), classes={"yes": 0, "No": 1})
    assert read(path, Columns(text=("text", "more"), length=4)) == {"abcx": -1, "dez": -1, "fghi": -1}


@pytest.mark.parametrize(("row", "fields"), [("a, b, or c,1", 4), ("a", 1)])
def test_a_row_with_other_fields_than_the_columns_is_refused(row: str, fields: int, tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text(f'text,class\n"a, b",0\n{row}\n', encoding="utf-8")
    with pytest.raises(fp.FairprunerError, match=f"Row 2 of .* has {fields} fields, expected 2: put texts"):
        read(tmp_path / "texts.csv", Columns(label="class"))


def test_true_and_false_are_classes(tmp_path: Path) -> None:
    assert read(
        write(tmp_path, ".jsonl", [{"text": "a", "same": True}, {"text": "b", "same": False}]),
        Columns(label="same"),
    ) == {"a": 1, "b": 0}


def test_a_sample_is_even_over_the_classes(tmp_path: Path) -> None:
    path = write(tmp_path, ".csv", [{"text": "a" * (i + 1), "c": int(i > 7)} for i in range(10)])
    labels = [
        int(label)
        for batch in load_text(path, by_letter, Sampling(samples=4), Columns(label="c"))
        for label in batch["labels"]
    ]
    assert sorted(labels) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("content", "columns", "message"),
    [
        ('{"text": "a"}', Columns(label="lable"), "Unknown column of .*'lable'"),
        ('{"text": "a"}\n{"txt": "b"}', Columns(), "Unknown column of .* 'text': did you mean 'txt'"),
        ('{"text": 3}', Columns(), "Row 1 of .* has a int in column 'text', expected text"),
        (
            '{"text": "a", "c": 0.5}',
            Columns(label="c"),
            "has the label 0.5 among others, expected whole numbers, or words",
        ),
        ('{"text": "a", "c": null}', Columns(label="c"), "has the label None"),
        ('{"text": "a"}\n{not json', Columns(), "Line 2 of .* is not JSON: Expecting .* at character 2"),
        ("", Columns(), "has no rows, expected at least one"),
        ('{"text": "a"}\n[1]', Columns(), "Row 2 of .* is a list, expected an object with named columns"),
    ],
)
def test_a_bad_file_is_one_clear_error(content: str, columns: Columns, message: str, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(fp.FairprunerError, match=message):
        load_text(tmp_path / "texts.jsonl", by_letter, Sampling(), columns)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: load_text("nowhere.jsonl", by_letter, Sampling()), "Cannot read nowhere.jsonl"),
        (lambda: load_text("texts.xml", by_letter, Sampling()), "Unknown kind of text file '.xml'"),
        (lambda: Columns(text=("a", "b", "c")), "expected one, or two for pairs"),
        (lambda: Columns(length=0), "length is 0, expected at least 1"),
    ],
)
def test_bad_options_for_texts(make: Any, message: str) -> None:
    with pytest.raises(fp.FairprunerError, match=message):
        make()


# Tokens


def padded(texts: list[list[int]], side: str = "right") -> dict[str, Tensor]:
    longest = max(map(len, texts))
    rows, masks = [], []
    for text in texts:
        gap = [0] * (longest - len(text))
        rows.append(text + gap if side == "right" else gap + text)
        masks.append([1] * len(text) + gap if side == "right" else gap + [1] * len(text))
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}


def test_targets_by_hand() -> None:
    left, right = padded([[5, 6, 7], [8, 9]], "left"), padded([[5, 6, 7], [8, 9]])
    no = IGNORED
    whole = torch.zeros(2, dtype=torch.int64)
    assert targets_of(right, whole).tolist() == [[6, 7, no], [9, no, no]]
    assert targets_of(left, whole).tolist() == [[6, 7, no], [no, 9, no]]
    assert targets_of(right, right["input_ids"]).tolist() == [[6, 7, no], [9, no, no]]
    prompt = torch.tensor(
        [[no, 6, 7], [8, 9, no]]
    )  # the first token of the first text is given, not predicted
    assert targets_of(right, prompt).tolist() == [[6, 7, no], [9, no, no]]
    assert targets_of(right, torch.tensor([[no, no, 7], [8, 9, no]])).tolist() == [[no, 7, no], [9, no, no]]
    in_place = torch.tensor(
        [[1, 2, 3], [4, 5, 6]]
    )  # other labels belong to the position itself; padding has none
    assert targets_of(right, in_place).tolist() == [[1, 2, 3], [4, 5, no]]
    assert targets_of(torch.zeros(2, 3), whole) is None


@given(
    st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=6), min_size=1, max_size=5),
    st.sampled_from(["left", "right"]),
)
def test_every_token_but_the_first_is_predicted_once(texts: list[list[int]], side: str) -> None:
    batch = padded(texts, side)
    targets = targets_of(batch, torch.zeros(len(texts), dtype=torch.int64))
    assert [[t for t in row if t != IGNORED] for row in targets.tolist()] == [text[1:] for text in texts]


TEXTS = [
    [int(i) for i in np.random.default_rng(length).integers(3, 90, length)]
    for length in (7, 4, 5, 2, 9, 3, 6, 8)
]


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_default_loss_is_that_of_the_library(side: str) -> None:
    model, batch = hugging_face("llama"), padded(TEXTS, side)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    with torch.no_grad():
        output = model(**batch)
        if side == "right":
            expected = model(**batch, labels=labels).loss
        else:  # the library also predicts the first token, from padding
            shifted, valid = (
                labels[:, 1:],
                batch["attention_mask"][:, :-1].bool() & batch["attention_mask"][:, 1:].bool(),
            )
            expected = F.cross_entropy(output.logits[:, :-1][valid], shifted[valid])
    for given_labels in (labels, None):
        item = batch if given_labels is None else {**batch, "labels": given_labels}
        found = mean_loss(None, output, next(read_batches([item], CPU)))
        torch.testing.assert_close(found, expected)


def test_labels_in_place_for_a_masked_language_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    model, batch = transformers.BertForMaskedLM(config).eval(), padded(TEXTS)
    labels = torch.where(torch.arange(9) % 3 == 1, batch["input_ids"], -100).masked_fill(
        batch["attention_mask"] == 0, -100
    )
    hidden = {**batch, "input_ids": torch.where(labels != -100, 1, batch["input_ids"])}
    with torch.no_grad():
        output, expected = model(**hidden), model(**hidden, labels=labels).loss
    torch.testing.assert_close(
        mean_loss(None, output, next(read_batches([{**hidden, "labels": labels}], CPU))), expected
    )


def in_batches(size: int, side: str = "right") -> Iterator[dict[str, Tensor]]:
    for start in range(0, len(TEXTS), size):
        yield padded(TEXTS[start : start + size], side)


def close(found: Any, expected: Any, what: str) -> None:
    """Equal but for rounding: the library's norms and losses are in float32, whatever the model is in."""
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max(), err_msg=what)


SIGNALS = {"removal": ["activation", "reconstruction", "l2"], "protection": ["taylor", "taylor2"]}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_scores_of_a_language_model_depend_neither_on_batches_nor_on_padding(family: str) -> None:
    model = hugging_face(family).double()
    spaces = fp.discover(model, {"input_ids": torch.tensor(TEXTS[:1])})
    alone = fp.score(model, list(in_batches(1)), spaces=spaces, **SIGNALS)
    assert alone.samples == len(TEXTS)
    others = [("right", 3), ("right", 8)] + (
        [("left", 3)] if family == "llama" else []
    )  # GPT-2 counts positions from the left edge
    for side, size in others:
        again = fp.score(model, list(in_batches(size, side)), spaces=spaces, **SIGNALS)
        for kind in ("removals", "protections"):
            for signal, by_space in getattr(alone, kind).items():
                for name, values in by_space.items():
                    close(getattr(again, kind)[signal][name], values, f"{side} {size} {signal} {name}")


def test_taylor_of_a_language_model_against_autograd() -> None:
    model = hugging_face("llama").double()
    spaces = fp.discover(model, {"input_ids": torch.tensor(TEXTS[:1])})
    scores = fp.score(model, list(in_batches(3)), spaces=spaces, removal="l2")
    whole = padded(TEXTS)
    model(**whole, labels=whole["input_ids"].masked_fill(whole["attention_mask"] == 0, -100)).loss.backward()
    parameters = dict(model.named_parameters())
    for space in spaces:
        expected = np.zeros(space.size)
        for part in space.slices:
            tensor = parameters[part.tensor]
            rows = (tensor * tensor.grad).detach().movedim(part.dim, 0).flatten(1).sum(1).numpy()
            np.add.at(expected, part.owner[part.owner >= 0], rows[part.owner >= 0])
        close(scores.protection[space.name], np.abs(expected), space.name)


def reads(model: nn.Module, batch: dict[str, Tensor], module: str) -> Tensor:
    """What a module is called with, [N, T, C]."""
    found = []
    hook = model.get_submodule(module).register_forward_pre_hook(
        lambda _, args: found.append(args[0].detach())
    )
    with torch.no_grad():
        model.eval()(**batch)
    hook.remove()
    return found[0]


def test_what_signals_see_of_texts_by_hand() -> None:
    """`activation` is a mean over real tokens; `wasserstein` compares the mean over the real tokens of
    each text.
    """
    model, batch = hugging_face("bert").double(), padded(TEXTS)
    labels = torch.arange(8) % 2
    spaces = fp.discover(model, {"input_ids": torch.tensor(TEXTS[:1])})
    data = [{**{k: v[i : i + 4] for k, v in batch.items()}, "labels": labels[i : i + 4]} for i in (0, 4)]
    scores = fp.score(model, data, spaces=spaces, removal=["wasserstein", "activation"])
    hidden = next(s.name for s in spaces if s.kind == "hidden" and s.size == 48)
    read_by = spaces[hidden].observed.tensor.removesuffix(".weight")
    states, real = reads(model, batch, read_by), batch["attention_mask"].bool()
    np.testing.assert_allclose(
        scores.removals["activation"][hidden], states[real].abs().mean(0).numpy(), rtol=1e-9
    )
    pooled = torch.stack([states[i][real[i]].mean(0) for i in range(8)])  # [N, J]
    first, second = pooled[labels == 0].sort(0).values, pooled[labels == 1].sort(0).values
    np.testing.assert_allclose(
        scores.removals["wasserstein"][hidden], (first - second).abs().mean(0).numpy(), rtol=1e-9
    )


def test_wasserstein_of_heads_takes_texts_of_any_length_and_groups_of_classes() -> None:
    model = hugging_face("llama").double()
    data = [{**batch, "labels": torch.arange(len(batch["input_ids"])) % 4} for batch in in_batches(4)]
    scores = fp.score(
        model, data, removal="wasserstein"
    )  # classes for the removal signal, next tokens for the loss
    grouped = fp.score(model, data, removal="wasserstein", groups=2)
    for by_space in (scores.removal, grouped.removal):
        assert all((values > 0).all() for values in by_space.values())
    assert all((grouped.removal[name] <= values + 1e-12).any() for name, values in scores.removal.items())


def test_grouping_classes_sees_no_padding() -> None:
    """Two texts of each class; classes 0 and 1 share one, so do 2 and 3: whatever the padding, these are
    the groups.
    """
    model = hugging_face("llama").double()
    texts = [TEXTS[0], TEXTS[0], TEXTS[3], TEXTS[3]]
    labels = torch.arange(4)
    apart = [{**padded([text]), "labels": labels[i : i + 1]} for i, text in enumerate(texts)]
    together = [
        {**padded([*texts[:1], *texts[2:], TEXTS[4]]), "labels": torch.tensor([0, 2, 3, 3])},
        {**padded(texts[1:2]), "labels": labels[1:2]},
    ]
    spaces = fp.discover(model, padded(TEXTS[:1]))
    for data in (apart, together):
        scores = fp.score(model, data, spaces=spaces, removal="wasserstein", groups=2)
        assert scores.settings["groups"] == 2
    real = padded(texts)["attention_mask"].bool()
    with LastInput() as last, torch.no_grad():
        model(**padded(texts))
    with LastInput() as alone, torch.no_grad():
        model(**padded(texts[2:]))
    torch.testing.assert_close(
        last.features(4, real)[2:],
        alone.features(2, torch.ones(2, 2, dtype=torch.bool)),
        rtol=1e-5,
        atol=1e-7,
    )


def test_wasserstein_without_classes_says_what_to_do() -> None:
    model = hugging_face("llama")
    with pytest.raises(
        fp.FairprunerError,
        match=(
            r"'wasserstein' compares classes, and batch 0 has none: its labels are int64\[8, 9\].*activation,"
            r" reconstruction, l2"
        ),
    ):
        fp.score(model, [padded(TEXTS)], removal="wasserstein")


def test_an_encoder_decoder_has_two_paddings() -> None:
    model = hugging_face("t5").double()
    inner, outer = padded(TEXTS[:4]), padded(TEXTS[4:])
    whole = {
        **inner,
        **{f"decoder_{name}": tensor for name, tensor in outer.items()},
        "labels": outer["input_ids"].masked_fill(outer["attention_mask"] == 0, -100),
    }
    spaces = fp.discover(model, {k: v[:1] for k, v in whole.items() if k != "labels"})
    singles = []
    for i in range(4):
        part = {
            **padded(TEXTS[i : i + 1]),
            **{f"decoder_{k}": v for k, v in padded(TEXTS[4 + i : 5 + i]).items()},
        }
        singles.append({**part, "labels": part["decoder_input_ids"]})
    one, each = (fp.score(model, data, spaces=spaces, removal=["activation"]) for data in ([whole], singles))
    for name in spaces.names:
        close(one.removal[name], each.removal[name], name)
        close(one.protection[name], each.protection[name], name)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"pixels": torch.zeros(2, 3)}, r"Batch 0 does not fit the model"),
        (padded([[5], [6]]), "Batch 0 has no token to predict: give longer texts"),
        (
            {**padded([[5, 6, 7]]), "labels": torch.zeros(1, 2, dtype=torch.int64)},
            r"batch 0 has labels int64\[1, 2\], expected logits .* a label for each token",
        ),
    ],
)
def test_bad_batches_of_texts(item: Any, message: str) -> None:
    model = hugging_face("llama")
    spaces = fp.discover(model, padded(TEXTS[:1]))
    with pytest.raises(fp.FairprunerError, match=message):
        fp.score(model, [item], spaces=spaces, removal="l2")
