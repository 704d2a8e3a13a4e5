"""Evaluation: what is asked, how answers are read, hand-counted outcomes, perplexity against a
token-by-token count, the command.
"""

from __future__ import annotations

import json
import lzma
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_zoo import moe
from typer.testing import CliRunner

import fairpruner as fp
from fairpruner.cli import app
from fairpruner.evaluation import (
    TASKS,
    check_text_unseen,
    evaluate,
    find_files,
    perplexity,
    read_tokens,
)
from fairpruner.evaluation.tasks import parse_letter, parse_yes_or_no
from fairpruner.inputs.hugging_face import tokenizer_of

transformers = pytest.importorskip("transformers")

WIC = [
    {
        "word": "place",
        "sentence1": "Come over to my place.",
        "sentence2": "No place for the weak.",
        "label": False,
    },
    {"word": "run", "sentence1": "She ran ten miles.", "sentence2": "He runs every day.", "label": True},
    {"word": "bank", "sentence1": "The bank of a river.", "sentence2": "A bank lends money.", "label": False},
    {"word": "cold", "sentence1": "A cold morning.", "sentence2": "Cold water.", "label": True},
]
MMLU_PRO = [
    {
        "question": f"Question {i}?",
        "options": ["red", "green", "blue", "white"],
        "answer": "ABCD"[i % 4],
        "answer_index": i % 4,
        "category": category,
    }
    for i, category in enumerate(["law", "law", "math", "math", "math", "health"])
]


def write(rows: list[dict[str, Any]], path: Path) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


def byte_tokenizer() -> Any:
    """Every byte is a token, so that every text can be written."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(["<end>", *letters])}, merges=[])
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", model_max_length=2048
    )


def tiny_config() -> Any:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    return transformers.LlamaConfig(
        vocab_size=300, max_position_embeddings=2048, bos_token_id=0, eos_token_id=0, pad_token_id=0, **sizes
    )


class Scripted(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Writes what the test says when the prompt holds a certain text."""

    replies: dict[str, str]

    def generate(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        tokenizer = byte_tokenizer()
        written = []
        for row in input_ids:
            prompt = tokenizer.decode(row, skip_special_tokens=True)
            written.append(
                tokenizer(next(reply for part, reply in self.replies.items() if part in prompt))["input_ids"]
            )
        length = max(map(len, written))
        padded = torch.tensor([ids + [0] * (length - len(ids)) for ids in written])
        return torch.cat([input_ids, padded], dim=1)


def scripted(replies: dict[str, str]) -> Any:
    model = Scripted(tiny_config())
    model.replies = replies
    return model


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" yes", "yes"),
        ("No.", "no"),
        ("I think yes, not no", "yes"),
        ("nothing of the kind", None),
        ("", None),
        ("yesterday it was NO", "no"),
    ],
)
def test_yes_and_no_are_read_as_words(text: str, answer: str | None) -> None:
    assert parse_yes_or_no(text, {}) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("B", "B"),
        (" (C) because", "C"),
        ("**D.** It is", "D"),
        ("The answer is (A).", "A"),
        ("B is wrong, so the answer is C", "C"),
        ("A cat sat there", None),
        ("I do not know", None),
        ("E", None),  # there are four options
        ("b", None),
        ("", None),
    ],
)
def test_letters_are_read_strictly(text: str, answer: str | None) -> None:
    assert parse_letter(text, MMLU_PRO[0]) == answer


def test_prompts_are_those_of_the_documentation() -> None:
    page = (Path(__file__).parents[1] / "docs" / "moe.md").read_text(encoding="utf-8")
    assert TASKS["wic"].prompt({"word": "WORD", "sentence1": "FIRST", "sentence2": "SECOND"}) in page
    assert TASKS["mmlu_pro"].prompt({"question": "QUESTION", "options": ["FIRST", "SECOND"]}) in page


def test_outcomes_are_those_counted_by_hand(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    files = {
        "wic": write(WIC, tmp_path / "wic_validation.jsonl"),
        "mmlu_pro": write(MMLU_PRO, tmp_path / "mmlu_pro_test.jsonl"),
    }
    replies = {
        "my place": " No, they differ.",  # right
        "ten miles": " no",  # wrong
        "river": " maybe",  # not readable
        "cold": "Yes",  # right
        "Question 0": "A",  # law: right
        "Question 1": "The answer is (D)",  # law: wrong
        "Question 2": "(C)",  # math: right
        "Question 3": "I cannot say",  # math: not readable
        "Question 4": "B",  # math: wrong
        "Question 5": "B.",  # health: right
    }
    found = evaluate(scripted(replies), byte_tokenizer(), files, batch_size=3)
    wic, mmlu = found["wic"], found["mmlu_pro"]
    assert (wic.items, wic.accuracy, wic.parse_rate, wic.categories) == (4, 2 / 4, 3 / 4, {})
    assert (mmlu.items, mmlu.accuracy, mmlu.parse_rate) == (6, 3 / 6, 5 / 6)
    by_category = {
        name: (part.items, part.accuracy, part.parse_rate) for name, part in mmlu.categories.items()
    }
    assert by_category == {
        "law": (2, 1 / 2, 1.0),
        "math": (3, pytest.approx(1 / 3), pytest.approx(2 / 3)),
        "health": (1, 1.0, 1.0),
    }


def test_a_limit_takes_items_of_every_category_and_a_chat_template_is_used(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    file = write(MMLU_PRO, tmp_path / "mmlu_pro_test.jsonl")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}CHAT {{ m['content'] }}{% endfor %}"
    found = evaluate(scripted({"CHAT Question": "A"}), tokenizer, {"mmlu_pro": file}, limit=3)["mmlu_pro"]
    assert found.items == 3
    assert {name: part.items for name, part in found.categories.items()} == {"law": 1, "math": 1, "health": 1}


def test_the_model_and_the_random_state_are_left_as_they_were(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    model = scripted({"": "yes"}).train()
    before, state = (
        torch.get_rng_state(),
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
    )
    evaluate(model, byte_tokenizer(), {"wic": write(WIC, tmp_path / "wic.jsonl")})
    perplexity(model, torch.arange(9), length=4)
    assert model.training
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_what_was_scored_on_is_not_evaluated_on(tmp_path: Path) -> None:
    file = write(WIC, tmp_path / "wic_validation.jsonl")
    calibration = write(
        [{"a": WIC[2]["sentence2"], "b": WIC[2]["sentence1"]}, {"a": WIC[0]["sentence1"], "b": "other"}],
        tmp_path / "calibration.jsonl",
    )
    with pytest.raises(fp.FairprunerError, match=r"1 of the 4 items of .* are in the calibration data"):
        evaluate(scripted({"": "yes"}), byte_tokenizer(), {"wic": file}, calibration=calibration)
    passage = (
        "A passage that is long enough to be in two texts by no accident, since it has more than eighty"
        " letters."
    )
    texts = write([{"text": passage}, {"text": "short"}], tmp_path / "texts.jsonl")
    (tmp_path / "text.txt").write_text(f"short\n{passage}\n")
    with pytest.raises(fp.FairprunerError, match="1 of the 1 long texts"):
        check_text_unseen(tmp_path / "text.txt", texts)
    plain = tmp_path / "calibration.txt"
    plain.write_text(f"short\n{passage}\n")
    with pytest.raises(fp.FairprunerError, match="1 of the 1 long texts"):
        check_text_unseen(tmp_path / "text.txt", plain)
    (tmp_path / "text.txt").write_text("short\n")
    check_text_unseen(tmp_path / "text.txt", texts)
    check_text_unseen(tmp_path / "text.txt", plain)


def test_files_are_found_and_read_in_every_form(tmp_path: Path) -> None:
    write(WIC, tmp_path / "wic_validation.jsonl")
    with lzma.open(tmp_path / "mmlu_pro_test.jsonl.xz", "wt") as file:
        file.write("\n".join(map(json.dumps, MMLU_PRO)))
    found = find_files(["mmlu_pro", "wic"], tmp_path)
    assert {name: path.name for name, path in found.items()} == {
        "mmlu_pro": "mmlu_pro_test.jsonl.xz",
        "wic": "wic_validation.jsonl",
    }
    assert TASKS["mmlu_pro"].read(found["mmlu_pro"]) == MMLU_PRO
    assert find_files(["wic"], f"wic={tmp_path / 'other.jsonl'}") == {"wic": tmp_path / "other.jsonl"}
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    parquet.write_table(arrow.Table.from_pylist(MMLU_PRO), tmp_path / "mmlu.parquet")
    assert TASKS["mmlu_pro"].read(tmp_path / "mmlu.parquet") == MMLU_PRO


@pytest.mark.parametrize(
    ("rows", "task", "message"),
    [
        (
            [{"word": "w", "sentence1": "a", "sentence2": "b"}],
            "wic",
            "Item 1 of .* has no 'label', expected the columns word, sentence1, sentence2, label of wic",
        ),
        ([{**WIC[0], "label": "T"}], "wic", "Item 1 of .* the label is 'T', expected true or false"),
        (
            [MMLU_PRO[0], {**MMLU_PRO[1], "answer": "C"}],
            "mmlu_pro",
            "Item 2 of .* the answer is 'C' with index 1 of 4 options",
        ),
        ([{**MMLU_PRO[0], "answer_index": 12}], "mmlu_pro", "Item 1 of .* has no valid answer for mmlu_pro"),
    ],
)
def test_items_that_make_no_sense_are_refused(rows: Any, task: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(fp.FairprunerError, match=message):
        TASKS[task].read(write(rows, tmp_path / "items.jsonl"))


def test_an_unknown_task_and_a_missing_package_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(WIC, tmp_path / "wic_validation.jsonl")
    with pytest.raises(fp.FairprunerError, match="Unknown task 'wix': did you mean 'wic'"):
        find_files(["wix"], tmp_path)
    with pytest.raises(
        fp.FairprunerError,
        match=r"No data for task mmlu_pro in .*: expected a folder with mmlu_pro_test.jsonl",
    ):
        find_files(["mmlu_pro"], tmp_path)
    with pytest.raises(fp.FairprunerError, match="limit is 0"):
        evaluate(scripted({}), byte_tokenizer(), {"wic": file}, limit=0)
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(fp.FairprunerError, match=r"pip install 'fairpruner\[lm_eval\]'"):
        evaluate(scripted({}), byte_tokenizer(), {"wic": file})


def test_perplexity_is_the_token_by_token_count() -> None:
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(tiny_config()).double().eval()
    tokens = torch.randint(0, 300, (23,))
    total, count = 0.0, 0
    for start in range(0, 23, 7):  # windows of 7, 7, 7 and 2
        window = tokens[start : start + 7]
        for position in range(1, len(window)):
            with torch.no_grad():
                last = model(input_ids=window[None, :position]).logits[0, -1]
            total -= float(last.log_softmax(-1)[window[position]])
            count += 1
    for batch_size in (1, 2, 8):
        found = perplexity(model, tokens, length=7, batch_size=batch_size)
        assert (found.tokens, found.windows) == (count, 4) == (19, 4)
        assert found.value == pytest.approx(math.exp(total / count), rel=1e-9)


def test_every_byte_of_a_text_counts(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes("line\r\nénd\n".encode())
    assert byte_tokenizer().decode(read_tokens(tmp_path / "text.txt", byte_tokenizer())) == "line\r\nénd\n"


def test_a_tokenizer_without_settings_is_taken_at_its_word(tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    text = "Two words,\r\n and 3 more."
    tokenizer = tokenizer_of(str(tmp_path))
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == byte_tokenizer()(text)["input_ids"]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<end>", "<end>")


def test_perplexity_refuses_what_it_cannot_count(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(tiny_config())
    with pytest.raises(
        fp.FairprunerError, match="length is 4096, expected at least 2 and at most the 2048 positions"
    ):
        perplexity(model, torch.arange(9), length=4096)
    with pytest.raises(fp.FairprunerError, match="The text has 1 tokens, expected at least 2"):
        perplexity(model, torch.arange(1))
    with pytest.raises(fp.FairprunerError, match="Cannot read"):
        read_tokens(tmp_path / "none.txt", byte_tokenizer())


def run(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


@pytest.mark.slow
def test_from_scores_to_an_evaluated_smaller_model_on_the_command_line(tmp_path: Path) -> None:
    """score, plan, cut, cut --stream and evaluate, on a local MoE folder."""
    pytest.importorskip("lm_eval")
    moe("qwen2_moe", torch.float32, vocab_size=300, max_position_embeddings=1024).save_pretrained(
        tmp_path / "whole"
    )
    byte_tokenizer().save_pretrained(tmp_path / "whole")
    write(
        [{"text": f"A text about the number {i}, and about {i * i}."} for i in range(24)],
        tmp_path / "texts.jsonl",
    )
    write(WIC, tmp_path / "wic_validation.jsonl")
    write(MMLU_PRO, tmp_path / "mmlu_pro_test.jsonl")
    (tmp_path / "story.txt").write_text("Once upon a time there was a number that nobody had counted. " * 5)
    source, scores, plan = f"hf:{tmp_path / 'whole'}", tmp_path / "scores.safetensors", tmp_path / "plan.json"
    run(
        "score", source, "--data", tmp_path / "texts.jsonl", "--length", 32, "--kinds", "expert", "-o", scores
    )
    run("plan", scores, "--keep", "experts=16", "--exact", "-o", plan)
    assert fp.Plan.load(plan).predicted["experts"] == 16
    run("cut", source, plan, "-o", tmp_path / "small")
    run("cut", source, plan, "--stream", "-o", tmp_path / "streamed")
    small, streamed = fp.load(tmp_path / "small"), fp.load(tmp_path / "streamed")
    assert all(torch.equal(a, b) for a, b in zip(small.parameters(), streamed.parameters(), strict=True))
    tasks = (
        "--tasks",
        "wic,mmlu_pro",
        "--data",
        tmp_path,
        "--limit",
        2,
        "--calibration",
        tmp_path / "texts.jsonl",
    )
    models = (source, f"hf:{tmp_path / 'small'}")
    told = json.loads(
        run("evaluate", *models, *tasks, "--text", tmp_path / "story.txt", "--length", 64, "--json").stdout
    )["models"]
    assert set(told) == set(models)
    assert {name: set(found) for name, found in told.items()} == {
        model: {"wic", "mmlu_pro", "story.txt"} for model in models
    }
    assert told[models[1]]["story.txt"]["value"] == pytest.approx(
        perplexity(small, read_tokens(tmp_path / "story.txt", byte_tokenizer()), length=64).value
    )
    table = run("evaluate", *models, "--text", tmp_path / "story.txt").stdout
    assert "perplexity" in table
    assert "mean" not in table  # of a model and its cut it would say nothing
    table = run("evaluate", *models, f"hf:{tmp_path / 'streamed'}", "--text", tmp_path / "story.txt").stdout
    assert "mean of 2 ± deviation" in " ".join(table.split())
    assert (
        f"{perplexity(small, read_tokens(tmp_path / 'story.txt', byte_tokenizer())).value:.3f} ± 0.00"
        in " ".join(table.split())
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "There is nothing to evaluate: give --tasks together with --data, or --text"),
        (("--tasks", "wic"), "There is nothing to evaluate"),
        (("--text", "story.txt"), "torch.nn:Identity has no tokenizer"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(arguments: Any, message: str) -> None:
    assert message in run("evaluate", "torch.nn:Identity", *arguments, code=1).stderr
