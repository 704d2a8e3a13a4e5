"""The command line: what each command writes and prints, its exit codes, and no traceback for a user's
mistake.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fairpruner as fp
from fairpruner import demo
from fairpruner.cli import app
from fairpruner.cli.tables import show_history
from fairpruner.core.plan import Plan
from fairpruner.core.scores import Scores
from fairpruner.recovery import Epoch
from fairpruner.terminal.tables import printed

COMMANDS = ("discover", "score", "sweep", "plan", "cut", "recover", "prune", "report", "plot", "info", "demo")
DEMO = "fairpruner.demo:build"


def run(*arguments: object, code: int = 0) -> Any:
    """Run a command in this process and check its exit code."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def refused(*arguments: object) -> str:
    """Run a command that must fail with exit code 1, nothing on stdout and one line on stderr; the line."""
    result = run(*arguments, code=1)
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("Error: ")
    return str(lines[0])


def printed_json(*arguments: object) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one demo run: digits.npz, net.safetensors, scores.safetensors, pruned/."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    result = run("demo", "-o", folder)
    (folder / "printed.txt").write_text(result.stdout, encoding="utf-8")
    return folder


@pytest.fixture
def work(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the demo's folder to work in."""
    shutil.copytree(made, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


# The demo


@pytest.mark.slow
def test_the_demo_halves_the_flops_and_says_what_it_did(made: Path) -> None:
    text = (made / "printed.txt").read_text(encoding="utf-8")
    plan = Plan.load(made / "pruned" / "plan.json")
    assert 0.45 < plan.share("flops") < 0.55
    for word in (
        "Accuracy on the test digits",
        str(made),
        *plan.spaces.names,
        f"{plan.predicted['flops']:,}",
    ):
        assert word in text, word


def test_the_demos_model_can_be_loaded_and_is_as_accurate_as_it_says(made: Path) -> None:
    small = fp.load(made / "pruned", build=DEMO)
    _, test = demo.Digits.load()
    accuracy = demo.accuracy(small, test)
    assert accuracy > 0.97
    assert f"{accuracy:.1%}" in (made / "printed.txt").read_text(encoding="utf-8")
    plan = Plan.load(made / "pruned" / "plan.json")
    assert fp.count_params(small) == plan.predicted["params"]
    assert fp.count_flops(small, test.x[:1]) == plan.predicted["flops"]


@pytest.mark.slow
def test_the_demo_does_not_overwrite_unless_forced(work: Path) -> None:
    assert "digits.npz already exists" in refused("demo", "-o", work)
    (work / "mine").mkdir()
    (work / "mine" / "net.safetensors").write_text("mine")
    assert "net.safetensors already exists" in refused("demo", "-o", work / "mine")
    stamp = (work / "net.safetensors").stat().st_mtime_ns
    content = printed_json("demo", "-o", work, "--force")
    assert (work / "net.safetensors").stat().st_mtime_ns > stamp
    assert content["accuracy"]["original"] > 0.97
    assert content["folder"] == str(work)


# The stages, one after the other


def test_the_pipeline_from_files_to_a_smaller_model(work: Path) -> None:
    spaces = printed_json("discover", DEMO, "--shape", "1,8,8")
    assert {s["name"]: s["size"] for s in spaces["spaces"]} == {
        "stem": 24,
        "block1.conv1": 24,
        "down": 48,
        "block2.conv1": 48,
    }
    assert list(spaces["left_out"]) == ["head"]

    scored = printed_json(
        "score",
        DEMO,
        "--weights",
        "net.safetensors",
        "--data",
        "digits.npz",
        "-o",
        "s.safetensors",
        "--removal",
        "l1,wasserstein",
        "--samples",
        200,
    )
    assert (scored["removal"], scored["samples"]) == (["l1", "wasserstein"], 200)
    assert all(-1 <= space["stability"]["taylor"] <= 1 for space in scored["spaces"])
    assert Scores.load("s.safetensors").active == ("l1", "taylor")

    swept = printed_json("sweep", "s.safetensors", "--metric", "params", "--amounts", "0.4,0.8")
    assert [abs(plan["share"]["params"] - plan["asked"]) < 0.05 for plan in swept["plans"]] == [True, True]

    planned = printed_json(
        "plan", "s.safetensors", "--keep", "flops=0.5", "-o", "p.json", "--removal", "wasserstein"
    )
    assert planned["kept"]["flops"] == pytest.approx(0.5, abs=0.05)
    assert {row["space"] for row in planned["spaces"]} == {s["name"] for s in spaces["spaces"]}

    cut = printed_json("cut", DEMO, "p.json", "--weights", "net.safetensors", "-o", "small")
    assert cut["predicted"] == planned["predicted"]
    small = fp.load("small", build=DEMO)
    assert fp.count_params(small) == planned["predicted"]["params"]
    assert fp.count_flops(small, torch.zeros(1, 1, 8, 8)) == planned["predicted"]["flops"]
    assert 'build="fairpruner.demo:build"' in Path("small/README.md").read_text(encoding="utf-8")


def test_task_and_loss_from_the_command_line(work: Path) -> None:
    (work / "own.py").write_text("def power(output, labels):\n    return output.square().mean()\n")
    common = (DEMO, "--data", "digits.npz", "--samples", 40, "--force")
    shown = run("score", *common, "--task", "unlabelled", "-o", "s.safetensors")
    assert "The data has no labels: removal by activation" in " ".join(shown.output.split())
    assert fp.Scores.load("s.safetensors").settings["task"] == "unlabelled"
    run("score", *common, "--loss", "own.py:power", "-o", "s.safetensors")
    assert fp.Scores.load("s.safetensors").settings["loss"] == "power"


def test_score_and_plan_are_the_same_as_from_python(work: Path) -> None:
    run("score", DEMO, "--weights", "net.safetensors", "--data", "digits.npz", "-o", "s.safetensors")
    run("plan", "s.safetensors", "--alpha", "0.2", "-o", "p.json")
    assert Plan.load("p.json").removed == fp.allocate(Scores.load("s.safetensors"), alpha=0.2).removed


@pytest.mark.parametrize(
    "options",
    [
        ["--rule", "uniform"],
        ["--exact"],
        ["--multiple-of", 8],
        ["--min-keep", 0.5],
        ["--min-keep", 12],
        ["--rule", "global", "--exact"],
    ],
)
def test_plan_options_reach_the_allocation(work: Path, options: list[object]) -> None:
    planned = printed_json("plan", "scores.safetensors", "--keep", "units=0.75", *options)
    plan = Plan.load("plan.json")
    kept = {space.name: space.size - plan.depths[space.name] for space in plan.spaces}
    expected = {
        "--rule": lambda: planned["rule"] == options[1],
        "--exact": lambda: plan.predicted["units"] == 108,
        "--multiple-of": lambda: all(k % 8 == 0 for k in kept.values()),
        "--min-keep": lambda: all(
            k >= (options[1] if isinstance(options[1], int) else options[1] * plan.spaces[name].size)
            for name, k in kept.items()
        ),
    }
    assert expected[str(options[0])]()


def test_skip_leaves_a_space_alone(work: Path) -> None:
    content = printed_json("discover", DEMO, "--data", "digits.npz", "--skip", "block*", "--skip", "stem")
    assert [s["name"] for s in content["spaces"]] == ["down"]
    scored = printed_json(
        "score", DEMO, "--data", "digits.npz", "--skip", "stem", "--samples", 40, "-o", "s.safetensors"
    )
    assert "stem" not in [s["name"] for s in scored["spaces"]]


@pytest.mark.parametrize(
    ("path", "word"),
    [("scores.safetensors", "1,257 samples"), ("pruned", "keeps"), ("pruned/plan.json", "keeps")],
)
def test_info_knows_every_kind_of_file(work: Path, path: str, word: str) -> None:
    assert word in run("info", path).stdout
    assert printed_json("info", path)["file"] == path


def test_discover_takes_from_data_what_the_model_requires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pair.py").write_text(
        """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.out = nn.Linear(4, 6), nn.Linear(4, 5), nn.Linear(11, 2)

    def forward(self, left, right):
        return self.out(torch.cat([self.left(left).relu(), self.right(right).relu()], 1))

def build():
    return Net()

def batches():
    return [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(2)]
""",
        encoding="utf-8",
    )
    content = printed_json("discover", "pair.py:build", "--data", "pair.py:batches")
    assert {space["size"] for space in content["spaces"]} == {5, 6}


def test_a_zoos_model_knows_its_input_and_tells_that_its_weights_are_random(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = printed_json("discover", "timm:test_resnet")
    assert content["spaces"]
    x = np.random.default_rng(0).integers(0, 255, (8, 3, 64, 64), dtype=np.uint8)
    np.savez("d.npz", x=x, y=np.arange(8) % 2)
    result = run(
        "score",
        "timm:test_resnet",
        "--data",
        "d.npz",
        "--mean",
        "0.5",
        "--std",
        "0.25,0.25,0.25",
        "--removal",
        "l1",
    )
    assert "timm:test_resnet has random weights" in result.stderr
    run("plan", "scores.safetensors", "--keep", "flops=0.6")
    run("cut", "timm:test_resnet", "plan.json", "-o", "small")
    assert fp.load("small", build="timm:test_resnet")(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)


# Tables and help


def test_tables_are_printed_without_markup_or_escape_codes(work: Path) -> None:
    os.rename("scores.safetensors", "[bold]scores.safetensors")
    for command in (
        ["sweep", "[bold]scores.safetensors"],
        ["plan", "[bold]scores.safetensors", "--alpha", "0.1"],
        ["info", "[bold]scores.safetensors"],
    ):
        text = run(*command).stdout
        assert "\x1b" not in text
    assert "[bold]scores.safetensors" in text
    assert "block2.conv1" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_examples_that_parse(command: str) -> None:
    text = " ".join(run(command, "--help").stdout.split())
    examples = re.split("Examples?: ", text)[1].split("; ")
    for example in examples:
        assert example.startswith(f"fairpruner {command} ")
        result = CliRunner().invoke(app, [*example.removeprefix("fairpruner ").split(), "--help"])
        assert result.exit_code == 0, result.output


def test_every_command_is_listed_and_the_version_is_known() -> None:
    text = run("--help").stdout
    assert all(command in text for command in COMMANDS)
    assert run("--version").stdout == f"{fp.__version__}\n"


@pytest.mark.slow
def test_completion_offers_the_rules() -> None:
    environment = {
        **os.environ,
        "_FAIRPRUNER_COMPLETE": "complete_bash",
        "COMP_WORDS": "fairpruner plan x --rule ",
        "COMP_CWORD": "4",
    }
    code = "from fairpruner.cli import app; app(prog_name='fairpruner')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["tod", "uniform", "global"]


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["discover", DEMO], "give --shape, such as"),
        (["discover", DEMO, "--shape", "3,8,8"], "example does not fit the model"),
        (
            ["discover", DEMO, "--shape", "1,8,8", "--kinds", "chanel"],
            "Unknown kind 'chanel': did you mean 'channel'",
        ),
        (
            ["discover", DEMO, "--shape", "1,8,8", "--skip", "steam"],
            "Unknown space to skip 'steam': did you mean 'stem'",
        ),
        (
            ["score", DEMO, "--data", "digits.npz", "-o", "new.safetensors", "--removal", "wassertein"],
            "Unknown removal signal 'wassertein': did you mean 'wasserstein'",
        ),
        (
            [
                "score",
                DEMO,
                "--data",
                "digits.npz",
                "-o",
                "new.safetensors",
                "--weights",
                "pruned/model.safetensors",
            ],
            "do not fit DigitsNet",
        ),
        (
            ["score", DEMO, "--data", "digits.npz", "-o", "new.safetensors", "--device", "nowhere"],
            "cannot be put on the device 'nowhere'",
        ),
        (["score", DEMO, "--data", "digits.npz", "-o", "new.safetensors", "--samples", "0"], "samples is 0"),
        (
            ["score", DEMO, "--data", "digits.npz"],
            "scores.safetensors already exists: choose another name, or replace it with --force",
        ),
        (["sweep", "scores.safetensors", "--metric", "flop"], "Unknown metric 'flop': did you mean 'flops'"),
        (["sweep", "scores.safetensors", "--amounts", "1.5"], "is not a share in"),
        (["sweep", "nothing.safetensors"], "Cannot read nothing.safetensors: there is no such file. Correct"),
        (["sweep", "score.safetensors"], "there is no such file. Did you mean scores.safetensors?"),
        (["sweep", "net.safetensors"], "holds fairpruner weights, expected a fairpruner scores file"),
        (["plan", "scores.safetensors", "--keep", "flops=0.001"], "out of reach: the smallest plan keeps"),
        (["plan", "scores.safetensors", "--keep", "speed=0.5"], "Unknown metric 'speed'"),
        (["plan", "scores.safetensors", "--keep", "flops=-1"], "keeps nothing"),
        (["plan", "scores.safetensors", "--alpha", "1"], r"Alpha is 1, expected a tolerance in [0, 1)"),
        (["plan", "scores.safetensors", "--alpha", "nan"], "Alpha is nan"),
        (
            ["plan", "scores.safetensors", "--alpha", "0.1", "--keep", "flops=0.5"],
            "either a tolerance or a budget",
        ),
        (["plan", "scores.safetensors"], "either a tolerance or a budget"),
        (
            ["plan", "scores.safetensors", "--keep", "flops=0.5", "--rule", "tot"],
            "Unknown rule 'tot': did you mean 'tod'",
        ),
        (["plan", "scores.safetensors", "--keep", "flops=0.5", "--removal", "l1"], "Unknown signal 'l1'"),
        (["plan", "scores.safetensors", "--keep", "flops=0.5", "-o", "digits.npz/plan.json"], "Cannot write"),
        (["cut", "torch.nn:Identity", "pruned/plan.json", "-o", "new"], "belongs to another model"),
        (
            ["cut", DEMO, "pruned/plan.json", "-o", "new", "--max-shard-size", "1GB"],
            "--max-shard-size 1GB applies to Hugging Face models, and fairpruner.demo:build is a DigitsNet",
        ),
        (
            ["measure", "timm:no_such_model", "--shape", "3,8,8"],
            "timm has no model 'no_such_model'",
        ),
        (["cut", DEMO, "pruned/plan.json"], "pruned is or holds pruned/plan.json"),
        (
            ["cut", DEMO, "pruned/plan.json", "-o", ".", "--force"],
            ". is or holds pruned/plan.json, which this command reads or writes",
        ),
        (
            ["cut", DEMO, "scores.safetensors", "-o", "new"],
            "Cannot read scores.safetensors: it holds no text",
        ),
        (["demo", "-o", "digits.npz/demo"], "is not a folder, or it is not writable"),
        (
            ["score", DEMO, "--data", "nothing.npz", "-o", "digits.npz/s.safetensors"],
            "Cannot write digits.npz/s.safetensors",
        ),
        (["info", "nothing"], "Cannot read nothing"),
        (["info", "digits.npz"], "Cannot read digits.npz"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_written(
    work: Path, arguments: list[str], message: str
) -> None:
    before = sorted(p for p in work.rglob("*"))
    assert message in refused(*arguments)
    assert sorted(p for p in work.rglob("*")) == before


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["prune"],
        ["plan"],
        ["plan", "scores.safetensors", "--keep", "flops"],
        ["plan", "scores.safetensors", "--keep", "flops=0.5,0.6"],
        ["plan", "x", "--alpha", "much"],
        ["sweep", "scores.safetensors", "--amounts", "a,b"],
        ["discover", DEMO, "--shape", "1,8.5,8"],
        ["discover", DEMO, "--shape", "1,-8,8"],
    ],
)
def test_wrong_usage_exits_with_2(work: Path, arguments: list[str]) -> None:
    run(*arguments, code=2)


def test_force_replaces_files_and_pruned_folders(work: Path) -> None:
    run("plan", "scores.safetensors", "--keep", "flops=0.7")
    run("plan", "scores.safetensors", "--keep", "flops=0.4", "--force")
    assert Plan.load("plan.json").share("flops") == pytest.approx(0.4, abs=0.05)
    run("cut", DEMO, "plan.json", "-o", "pruned", "--force")
    assert Plan.load("pruned/plan.json").removed == Plan.load("plan.json").removed


def test_a_real_bug_keeps_its_traceback(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(fp, "allocate", broken)
    assert isinstance(
        CliRunner().invoke(app, ["plan", "scores.safetensors", "--alpha", "0.1"]).exception, ZeroDivisionError
    )


# In a process of its own


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from fairpruner.cli import app; app()", *arguments]


@pytest.mark.slow
def test_ctrl_c_ends_with_130_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\nfrom pathlib import Path\n\ndef build():\n    Path('started').touch()\n   "
        " time.sleep(60)\n"
    )
    listening = partial(
        signal.signal, signal.SIGINT, signal.SIG_DFL
    )  # a job in the background of a shell is told to ignore it
    process = subprocess.Popen(
        command("discover", "slow.py:build", "--shape", "1,8,8"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=listening,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output) == (130, "")
    assert "Traceback" not in errors


@pytest.mark.slow
def test_warnings_are_told_without_the_code_that_gave_them(tmp_path: Path) -> None:
    told = (
        "import warnings\nfrom fairpruner.errors import FairprunerWarning\n\ndef build():\n   "
        " warnings.warn('Too few samples.', FairprunerWarning)\n    warnings.warn('other')\n    raise"
        " SystemExit(3)\n"
    )
    (tmp_path / "warner.py").write_text(told)
    done = subprocess.run(
        command("discover", "warner.py:build", "--shape", "1,8,8"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stderr.splitlines()
    assert lines[0] == "Warning: Too few samples."
    assert lines[1].endswith("UserWarning: other")


def test_the_installed_command_refuses_without_a_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        command("info", "nothing"), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: Cannot read nothing")


# Mending, training and the whole job


@pytest.mark.slow
def test_a_cut_is_mended_and_recovered_from_the_command_line(work: Path) -> None:
    _, test = demo.Digits.load()
    common = ["--weights", work / "net.safetensors", "--data", work / "digits.npz"]
    run("plan", work / "scores.safetensors", "--keep", "flops=0.5", "-o", work / "plan.json")
    run("cut", DEMO, work / "plan.json", "--weights", work / "net.safetensors", "-o", work / "plain")
    told = run(
        "cut", DEMO, work / "plan.json", *common, "--repair", "sequential", "-o", work / "mended"
    ).stdout
    assert "Repair: " in told
    assert " repaired (fitted" in told
    plain, mended = (demo.accuracy(fp.load(work / name, build=DEMO), test) for name in ("plain", "mended"))
    assert mended > plain + 0.3
    content = printed_json(
        "recover",
        work / "mended",
        "--model",
        DEMO,
        "--data",
        work / "digits.npz",
        "--epochs",
        "2",
        "-o",
        work / "recovered",
    )
    assert [epoch["number"] for epoch in content["epochs"]] == [1, 2]
    assert demo.accuracy(fp.load(work / "recovered", build=DEMO), test) > 0.97
    assert "--repair sequential needs samples: give --data" in refused(
        "cut", DEMO, work / "plan.json", "--repair", "sequential", "-o", work / "x"
    )


def test_prune_does_the_whole_job_in_rounds(work: Path) -> None:
    options = [
        "--keep",
        "flops=0.4",
        "--rounds",
        "2",
        "--repair",
        "least_squares",
        "--recover-epochs",
        "1",
        "--samples",
        "400",
    ]
    content = printed_json(
        "prune",
        DEMO,
        "--weights",
        work / "net.safetensors",
        "--data",
        work / "digits.npz",
        *options,
        "-o",
        work / "whole",
    )
    assert content["rule"] == "iterative"
    small, plan = fp.load(work / "whole", build=DEMO), Plan.load(work / "whole" / "plan.json")
    assert fp.count_params(small) == plan.predicted["params"]
    assert abs(plan.share("flops") - 0.4) < 0.06


def test_prune_searches_by_default_and_shows_what_it_tried(work: Path) -> None:
    common = ["prune", DEMO, "--weights", work / "net.safetensors", "--data", work / "digits.npz"]
    common += ["--keep", "flops=0.4", "--samples", "200"]
    told = run(*common, "--effort", "20", "-o", work / "best").stdout
    assert "repaired cuts" in told
    assert "chosen" in told
    tried = Plan.load(work / "best" / "plan.json").tried
    assert len(tried) > 3
    assert sum(trial.chosen for trial in tried) == 1
    assert "repaired cuts" in run("info", work / "best").stdout
    content = printed_json(*common, "--preset", "paper", "-o", work / "paper")
    assert content["rule"] == "tod"
    assert "tried" not in content


def test_training_images_are_augmented_where_that_is_possible(work: Path) -> None:
    recover = ["recover", work / "cut", "--model", DEMO, "--epochs", "1", "-o", work / "augmented"]
    run("plan", work / "scores.safetensors", "--keep", "flops=0.5", "-o", work / "half.json")
    run("cut", DEMO, work / "half.json", "--weights", work / "net.safetensors", "-o", work / "cut")
    data = ["--data", work / "digits.npz", "--samples", "128"]
    assert "epochs" in printed_json(*recover, *data, "--augment", "crop,flip")
    assert "augmentation 'shear'" in refused(*recover, *data, "--augment", "shear", "--force")
    (work / "batches.py").write_text("def batches():\n    return []\n", encoding="utf-8")
    told = refused(*recover, "--data", f"{work / 'batches.py'}:batches", "--augment", "flip", "--force")
    assert "--augment flip changes the images of a folder or of an .npz file" in told


def test_one_epoch_is_not_called_epochs() -> None:
    epoch = Epoch(1, 0.1, 0.1, accuracy=None, validation_loss=None, validation_accuracy=None, seconds=1.0)
    for history, title in (([epoch], "x: recovered in 1 epoch"), ([epoch] * 2, "x: recovered in 2 epochs")):
        assert title in [line.strip() for line in printed(show_history(history, "x").table).splitlines()]


def test_report_writes_a_page_of_the_scores(work: Path) -> None:
    content = printed_json("report", work / "scores.safetensors", "-o", work / "report.html")
    assert content["file"] == str(work / "report.html")
    assert "<html" in (work / "report.html").read_text(encoding="utf-8")[:200]


def test_plan_can_be_limited_to_some_spaces(work: Path) -> None:
    run(
        "plan", work / "scores.safetensors", "--keep", "flops=0.8", "--skip", "stem", "-o", work / "some.json"
    )
    assert "stem" not in Plan.load(work / "some.json").removed
