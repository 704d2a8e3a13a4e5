"""The user's files: what is there stays until the new output is whole; only fairpruner's own is replaced."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_storage import hand_made_plan, hand_made_scores
from torch import nn
from typer.testing import CliRunner

import fairpruner as fp
from fairpruner.cli import app
from fairpruner.core import writing
from fairpruner.core.work_folder import WorkFolder
from fairpruner.core.writing import remove_abandoned, written_whole
from fairpruner.files import folders

NET = """
from torch import nn

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
"""


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def a_plan(*removed: int) -> fp.Plan:
    return fp.Plan.removing(fp.discover(build(), torch.zeros(1, 4)), {"0": removed})


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a net, its weights, two plans and a pruned model `old` of the first plan."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    save_file(build().state_dict(), tmp_path / "net.safetensors")
    for name, plan in (("one", a_plan(1)), ("two", a_plan(1, 5))):
        plan.save(tmp_path / f"{name}.json")
    fp.save(fp.cut(build(), a_plan(1)), a_plan(1), tmp_path / "old")
    return tmp_path


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def cut(*options: str, plan: str = "two.json") -> Any:
    return run("cut", "net.py:build", plan, "--weights", "net.safetensors", *options)


def leftovers(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".")]


# Writing whole


def test_a_file_is_as_before_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with written_whole(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "rename-aside"])
def test_a_folder_is_swapped_for_a_whole_one(
    exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(writing, "_exchange", lambda *_: False)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    with written_whole(tmp_path / "out", over_folder=True) as temporary:
        temporary.mkdir()
        (temporary / "new").touch()
        assert os.listdir(tmp_path / "out") == ["old"]
    assert os.listdir(tmp_path / "out") == ["new"]
    assert os.listdir(tmp_path) == ["out"]


def test_a_swap_that_fails_halfway_puts_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_exchange", lambda *_: False)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    real = os.rename

    def fail_for_the_new_one(source: Path, target: Path) -> None:
        if Path(source).parent.name == "new":
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "rename", fail_for_the_new_one)
    with (
        pytest.raises(fp.FairprunerError, match="No space left"),
        written_whole(tmp_path / "out", over_folder=True) as temporary,
    ):
        temporary.mkdir()
    assert os.listdir(tmp_path / "out") == ["old"]
    assert os.listdir(tmp_path) == ["out"]


def dead_process() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def workspace(folder: Path, pid: int, *parts: str) -> Path:
    made = folder / f".fairpruner-{writing.node_name()}-{pid}-0123abcd"
    for part in ("new", "old", *parts):
        (made / part).mkdir(parents=True)
    return made


def test_what_a_dead_process_left_is_removed_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    dead = workspace(tmp_path, dead_process(), "new/out")
    (dead / "new" / "out" / ".tmpA1b2C3").touch()  # as safetensors leaves it
    alive = workspace(tmp_path, os.getppid())
    mine = tmp_path / ".fairpruner-notes"
    mine.mkdir()
    hand_made_plan().save(tmp_path / "plan.json")
    assert not dead.exists()
    assert alive.exists()
    assert mine.exists()


def test_a_workspace_of_another_machine_is_removed_only_after_a_day(tmp_path: Path) -> None:
    other = tmp_path / f".fairpruner-00000000-{dead_process()}-0123abcd"
    other.mkdir()
    remove_abandoned(tmp_path)
    assert other.exists()
    os.utime(other, (0, time.time() - 2 * writing.DAY))
    remove_abandoned(tmp_path)
    assert not other.exists()


@pytest.mark.parametrize("whole", [True, False], ids=["new", "old"])
def test_a_swap_whose_process_died_halfway_is_completed(whole: bool, tmp_path: Path) -> None:
    made = workspace(tmp_path, dead_process(), "old/out/o", *(["new/out/n"] if whole else []))
    remove_abandoned(tmp_path)
    assert os.listdir(tmp_path / "out") == ["n" if whole else "o"]
    assert not made.exists()


def test_a_work_folder_with_files_of_the_user_is_refused_and_strays_of_dead_processes_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A work folder is removed at the end of its job."""
    own = tmp_path / "work" / "process-0"
    own.mkdir(parents=True)
    (own / "thesis.txt").write_text("mine")
    with pytest.raises(fp.FairprunerError, match="holds files that fairpruner did not write"):
        WorkFolder(tmp_path / "work", {"job": 1})
    assert (own / "thesis.txt").read_text() == "mine"
    monkeypatch.chdir(tmp_path)
    node = writing.node_name()
    for process in (dead_process(), os.getpid()):
        (tmp_path / f".fairpruner-work-{node}-{process}-abcd" / "process-0").mkdir(parents=True)
    WorkFolder(None, {"job": 1}).close(finished=True)
    assert [path.name for path in tmp_path.glob(".fairpruner-*")] == [
        f".fairpruner-work-{node}-{os.getpid()}-abcd"
    ]


def test_a_link_named_like_a_workspace_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    link = tmp_path / f".fairpruner-{writing.node_name()}-{dead_process()}-0123abcd"
    link.symlink_to(tmp_path / "mine")
    remove_abandoned(tmp_path)
    assert (tmp_path / "mine" / "file").exists()


@pytest.mark.parametrize("dangling", [False, True])
def test_a_symbolic_link_stays_and_what_it_leads_to_is_written(dangling: bool, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere" / "plan.json"
    target.parent.mkdir()
    if not dangling:
        target.write_text("old")
    (tmp_path / "link.json").symlink_to(target)
    hand_made_plan().save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert fp.Plan.load(target).rule == "tod"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes")
def test_a_pipe_or_a_device_is_not_replaced(tmp_path: Path) -> None:
    """A rename would replace /dev/null for all programs, if its user may do so."""
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("pipe", "it is a pipe, a socket or a device"), ("a\0b", "Choose another name")):
        with (
            pytest.raises(fp.FairprunerError, match=message),
            written_whole(tmp_path / name) as temporary,
        ):
            temporary.write_text("new")
    assert (tmp_path / "pipe").is_fifo()


def test_saving_the_same_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    plan = a_plan(2)
    torch.manual_seed(0)
    small = fp.cut(build(), plan)
    for name in ("a", "b"):
        hand_made_scores().save(tmp_path / f"{name}.safetensors")
        fp.save(small, plan, tmp_path / name)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert content_of(tmp_path / "a") == content_of(tmp_path / "b")


def test_scores_stay_when_their_file_is_cut_short_afterwards(tmp_path: Path) -> None:
    hand_made_scores().save(tmp_path / "s.safetensors")
    scores = fp.Scores.load(tmp_path / "s.safetensors")
    os.truncate(tmp_path / "s.safetensors", 0)  # reading a map of it would end the process
    assert scores.removal["a.conv"][0] == 0.1


# --force


def test_force_replaces_a_folder_that_fairpruner_wrote(place: Path) -> None:
    assert cut("-o", "old", "--force").exit_code == 0
    assert fp.Plan.load("old/plan.json").depths == {"0": 2}
    assert leftovers(place) == []


def test_without_force_the_old_folder_stays(place: Path) -> None:
    before = content_of(place)
    result = cut("-o", "old")
    assert result.exit_code == 1
    assert "old already exists" in result.stderr
    assert content_of(place) == before


@pytest.mark.parametrize("stage", ["write_tensors", "write_documents", "_swap"])
def test_the_old_folder_stays_when_writing_the_new_one_fails(
    stage: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing if stage == "_swap" else folders, stage, fail)
    before = content_of(place)
    result = cut("-o", "old", "--force")
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert content_of(place) == before
    assert leftovers(place) == []


def add_file(place: Path) -> None:
    (place / "old" / "notes.txt").write_text("mine")


def add_folder(place: Path) -> None:
    (place / "old" / "runs").mkdir()


def become_an_original_model(place: Path) -> None:
    """A folder of Hugging Face: only names that fairpruner writes too."""
    shutil.rmtree(place / "old")
    (place / "old").mkdir()
    save_file(build().state_dict(), place / "old" / "model.safetensors")
    for name in ("config.json", "README.md"):
        (place / "old" / name).write_text("{}")


def put_a_plan_into_an_original_model(place: Path) -> None:
    become_an_original_model(place)
    shutil.copy(place / "one.json", place / "old" / "plan.json")


def become_a_file(place: Path) -> None:
    shutil.rmtree(place / "old")
    (place / "old").write_text("mine")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (add_file, "holds notes.txt, which is not part of a pruned model"),
        (add_folder, "holds runs, which is not part of a pruned model"),
        (become_an_original_model, "holds no plan.json of fairpruner"),
        (put_a_plan_into_an_original_model, "holds model.safetensors, which is not part of a pruned model"),
        (become_a_file, "is not a pruned model that fairpruner wrote"),
    ],
)
def test_force_never_replaces_what_fairpruner_did_not_write(
    change: Callable[[Path], None], message: str, place: Path
) -> None:
    change(place)
    before = content_of(place)
    result = cut("-o", "old", "--force")
    assert result.exit_code == 1
    assert message in result.stderr
    assert "choose another name, or remove it yourself" in result.stderr
    assert content_of(place) == before


def test_force_checks_again_when_the_work_is_done(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    papers = folders.write_documents

    def someone_adds_a_file_meanwhile(*arguments: Any) -> None:
        papers(*arguments)
        add_file(place)

    monkeypatch.setattr(folders, "write_documents", someone_adds_a_file_meanwhile)
    assert "holds notes.txt" in cut("-o", "old", "--force").stderr
    assert (place / "old" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("target", ["net.safetensors", "net.py", "one.json", "old/plan.json", "old"])
def test_force_replaces_a_file_only_by_one_of_its_kind(target: str, place: Path) -> None:
    hand_made_scores().save(place / "scores.safetensors")
    hand_made_plan().save(place / "mine.json")
    before = content_of(place)
    commands = {
        "one.json": ["latency", "net.py:build", "scores.safetensors"],
        "old/plan.json": ["plan", "scores.safetensors", "--alpha", "0.1"],
    }
    command = commands.get(target, ["score", "net.py:build", "--data", "d.npz"])
    result = run(*command, "-o", target, "--force")
    assert result.exit_code == 1, result.output
    assert "so --force does not replace it" in result.stderr or "choose another" in result.stderr
    assert content_of(place) == before


def test_force_follows_a_symbolic_link(place: Path) -> None:
    (place / "latest").symlink_to("old")
    assert cut("-o", "latest", "--force").exit_code == 0
    assert (place / "latest").is_symlink()
    assert fp.Plan.load("old/plan.json").depths == {"0": 2}


# A source is never its own output


@pytest.mark.parametrize("output", ["old", "./old", "link", "sub/../old"])
def test_recover_does_not_write_over_the_model_it_reads(output: str, place: Path) -> None:
    (place / "link").symlink_to("old")
    (place / "sub").mkdir()
    before = content_of(place)
    result = run("recover", "old", "--model", "net.py:build", "--data", "d.npz", "-o", output, "--force")
    assert result.exit_code == 1
    assert "which this command reads or writes: choose another output" in result.stderr
    assert content_of(place) == before


def test_an_output_folder_does_not_hold_the_checkpoints(place: Path) -> None:
    command = ["recover", "old", "--model", "net.py:build", "--data", "d.npz", "-o", "run"]
    for checkpoints in ("run", "run/checkpoints"):
        assert "run is or holds" in run(*command, "--checkpoints", checkpoints).stderr


def test_an_output_folder_does_not_hold_the_plan_or_the_weights(place: Path) -> None:
    shutil.copy(place / "net.safetensors", place / "old" / "weights.safetensors")
    assert "old is or holds" in cut("-o", "old", "--force", plan="old/plan.json").stderr
    result = run(
        "cut", "net.py:build", "two.json", "--weights", "old/weights.safetensors", "-o", "old", "--force"
    )
    assert "old is or holds" in result.stderr


# Streaming

STREAM = ["--stream", "-o"]


@pytest.fixture
def llama(place: Path) -> Path:
    """A Hugging Face model `whole`, a plan for it, a plan of another model, and a pruned model `old`."""
    from transformers_zoo import HUGGING_FACE, hugging_face

    pytest.importorskip("transformers", minversion="5")
    model = hugging_face("llama").float()
    model.save_pretrained(place / "whole")
    spaces = fp.discover(model, HUGGING_FACE["llama"][3]())
    fp.Plan.removing(spaces, {spaces[0].name: (0,)}).save(place / "plan.json")
    return place


def test_streaming_with_a_wrong_plan_keeps_the_old_folder(llama: Path) -> None:
    before = content_of(llama)
    result = run("cut", "hf:whole", "one.json", *STREAM, "old", "--force")
    assert result.exit_code == 1
    assert "belongs to another model" in result.stderr
    assert content_of(llama) == before


@pytest.mark.parametrize("output", ["whole", "link", "."])
def test_streaming_never_deletes_its_source(output: str, llama: Path) -> None:
    (llama / "link").symlink_to("whole")
    before = content_of(llama)
    result = run("cut", "hf:whole", "plan.json", *STREAM, output, "--force")
    assert result.exit_code == 1
    assert "is or holds" in result.stderr
    assert content_of(llama) == before


def test_streaming_replaces_with_force(llama: Path) -> None:
    assert run("cut", "hf:whole", "plan.json", *STREAM, "old", "--force").exit_code == 0
    assert fp.Plan.load("old/plan.json").to_json() == fp.Plan.load("plan.json").to_json()
    assert leftovers(llama) == []


def test_no_file_is_copied_that_a_link_leads_out_of_the_source(llama: Path) -> None:
    (llama / "secret.txt").write_text("secret")
    (llama / "whole" / "vocab.txt").symlink_to(llama / "secret.txt")
    (llama / "whole" / "real.txt").write_text("words")
    (llama / "whole" / "merges.txt").symlink_to("real.txt")
    with pytest.warns(
        fp.FairprunerWarning,
        match=r"vocab.txt was not copied, because it is a symbolic",
    ):
        run("cut", "hf:whole", "plan.json", *STREAM, "small")
    assert not (llama / "small" / "vocab.txt").exists()
    assert (llama / "small" / "merges.txt").read_text() == "words"


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/../../b", "..\\b"])
def test_an_index_that_leads_out_of_its_folder_is_refused(name: str, llama: Path) -> None:
    shutil.move(llama / "whole" / "model.safetensors", llama / "outside.safetensors")
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": name}}
    (llama / "whole" / "model.safetensors.index.json").write_text(json.dumps(index))
    for options in ([], ["--stream"]):
        result = run("cut", "hf:whole", "plan.json", "-o", "small", *options)
        assert result.exit_code == 1
        assert "expected only files of the same folder" in result.stderr


# Ctrl-C and SIGTERM

SLOW = """
import time
from pathlib import Path

def build():
    Path("started").touch()
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_print_one_sentence_and_exit_with_130(
    number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", "from fairpruner.cli import app; app()"),
            *("prune", "slow.py:build", "--data", "x.npz", "--keep", "flops=0.5"),
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while not (tmp_path / "started").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output) == (130, "")
    assert errors == "Stopped. No output was left half-written.\n"
